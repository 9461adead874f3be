"""Progress on the console: one line updated in place on a terminal, plain log lines elsewhere."""

from __future__ import annotations

import shutil
import sys

from dtt.base.log import ERASE_LINE, log
from dtt.base.terminal import Coded, one_line
from dtt.track.base import OWN, Record

BAR = 20
"""Characters of the progress bar."""
NOTABLE = 0.05
"""Minimum share of the time for which a cost is shown on the progress line."""
TERMS, TERM = 3, 20
"""Maximum number of own terms of a loss on the progress line, and characters of the name of one."""


class ConsoleTracker:
    """Tracker that prints to stderr: progress per `perf` record, evaluations, samples, skips."""

    def __init__(self) -> None:
        """Create a tracker; on a terminal it rewrites one progress line.

        Unlike the bars of `dtt.base.log.progress`, it draws the line itself: a thread of rich
        would take the GIL from the training loop ten times a second.
        """
        self._train: Record = {}
        self._shown = ""
        self._live = sys.stderr.isatty()

    def log(self, record: Record) -> None:
        """Print one record, or keep it for the next progress line."""
        match record["kind"]:
            case "train":
                self._train = record
            case "guard" if record["action"] != "stop":  # a stop raises an error
                log.warning(
                    "step %d: skipped (%s)", record["step"], record["why"].replace("_", "-")
                )
            case "perf" if self._live:
                # A bar and the figures, the most important first, cut to the terminal: a line that
                # wraps could not be erased.
                parts = self._line(record).split("  ")
                parts.sort(
                    key=lambda part: (
                        not part.startswith(("step", "loss", "eta")) and "/s" not in part
                    )
                )
                full = round(BAR * self._train["step"] / record["steps"])
                line = f"{'━' * full}{'─' * (BAR - full)} {'  '.join(parts)}"
                self._shown = line[: shutil.get_terminal_size().columns - 1]
            case "perf":
                log.info("%s", self._line(record))
            case "eval":
                log.info("step %d: validation loss %s", record["step"], _found(record))
            case "task" if record.get("n") != 0:
                log.info("step %d: %s %s", record["step"], record["task"], _scores(record))
            case "sample":
                how = f" at temperature {t}" if (t := record.get("temperature")) is not None else ""
                text = "\n".join(f"    {line}" for line in record["text"].splitlines())
                log.info("step %d: sample%s\n%s", record["step"], how, text)
        if self._shown:  # a log line has erased it
            sys.stderr.write(Coded(f"{ERASE_LINE}{one_line(self._shown)}"))
            sys.stderr.flush()

    def flush(self) -> None:
        """Do nothing: output is not buffered."""

    def close(self) -> None:
        """End the progress line, so that later output starts on a new line."""
        if self._live:
            sys.stderr.write("\n")

    def _line(self, perf: Record) -> str:
        train = self._train
        mfu = "n/a" if perf["mfu"] is None else f"{100 * perf['mfu']:.1f}%"
        left = perf["seconds_per_step"] * (perf["steps"] - train["step"])
        minutes, seconds = divmod(round(left), 60)
        eta = (
            f"{minutes // 60}h{minutes % 60:02d}m" if minutes >= 60 else f"{minutes}m{seconds:02d}s"
        )
        rate = perf["tokens_per_second"]
        speed = f"{rate / 1e6:.2f}M" if rate >= 1e6 else f"{rate / 1e3:.1f}k"
        line = (
            f"step {train['step']}/{perf['steps']}  loss {_number(train['loss'], 4)}  "
            f"lr {train['lr']:.2e}  grad {_number(train['grad_norm'], 2)}  {speed}tok/s  "
            f"mfu {mfu}  mem {perf['memory_gb']:.1f}GB  eta {eta}"
        )
        if "padding_efficiency" in train:  # of packed conversations
            full, trained = train["padding_efficiency"], train["trained_share"]
            line += f"  {full:.0%} full, {trained:.0%} trained"
        line += _objective(train)
        # How far the load of the busiest expert is above the mean.
        loads = [v for v in train.get("expert_violation", {}).values() if v is not None]
        line += f"  busiest expert +{max(loads):.0%}" if loads else ""
        return line + _losses(perf)


def _losses(perf: Record) -> str:
    """Return the notable costs, such as `  data 12%`: data, communication, waits, a slow rank."""
    seconds, text = perf["seconds"], ""
    whole = sum(seconds.values()) or 1.0
    communication = sum(perf["communication_seconds"].values())
    for name, taken in {"data": seconds.get("data", 0.0), "communication": communication}.items():
        if taken / whole >= NOTABLE:
            text += f"  {name} {taken / whole:.0%}"
    if (bubble := perf.get("bubble", 0.0)) >= NOTABLE:
        text += f"  bubble {bubble:.0%}"
    behind = perf["slowest_behind"]
    if behind is not None and behind >= NOTABLE:
        text += f"  rank {perf['slowest_rank']} ({perf['slowest_node']}) {behind:.0%} slower"
    return text


def _objective(record: Record) -> str:
    """Return the margin and accuracy of DPO, and the first own terms of a loss with short names."""
    text = ""
    if record.get("reward_margin") is not None:
        margin, accuracy = record["reward_margin"], record["reward_accuracy"]
        text = f"  margin {margin:.3f}, accuracy {accuracy:.0%}"
    own = {name.removeprefix(OWN): record[name] for name in record if name.startswith(OWN)}
    short = [f"  {name} {_number(own[name], 4)}" for name in own if len(name) <= TERM]
    return text + "".join(short[:TERMS])


def _number(value: float | None, digits: int) -> str:
    """Format a number; None (a non-finite number) becomes `n/a`."""
    return "n/a" if value is None else f"{value:.{digits}f}"


def _found(evaluation: Record) -> str:
    """Format an evaluation: loss, bits per byte, loss by source, loss of the averaged weights."""
    found = f"{evaluation['loss']:.4f}"
    if evaluation["bits_per_byte"] is not None:
        found += f", {evaluation['bits_per_byte']:.4f} bits per byte"
    losses = ", ".join(f"{k} {loss:.4f}" for k, loss in evaluation.get("losses", {}).items())
    found = f"{found} ({losses})" if losses else found
    found += _objective(evaluation)
    if evaluation.get("answer_stop_rate") is not None:
        found += f"; {evaluation['answer_stop_rate']:.0%} of the greedy answers stop"
    if "ema_loss" in evaluation:
        found += f"; with averaged weights {evaluation['ema_loss']:.4f}"
    return found


def _scores(record: Record) -> str:
    """Format the scores of a benchmark task, such as `acc 0.312 ± 0.005, bits_per_byte 1.204`."""
    found = []
    for name, score in record.items():
        if isinstance(score, float) and not name.endswith("_stderr"):
            error = record.get(f"{name}_stderr")
            found.append(f"{name} {score:.3f}" + ("" if error is None else f" ± {error:.3f}"))
    return ", ".join(found)
