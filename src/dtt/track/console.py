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
                self._shown = self._live_line(record)
            case "perf":
                log.info("%s", self._line(record))
            case "eval":
                log.info("step %d: validation loss %s", record["step"], _found(record))
            case "task" if record.get("n") != 0:
                log.info("step %d: %s %s", record["step"], record["task"], _scores(record))
            case "sample":
                how = f" at temperature {t}" if (t := record.get("temperature")) is not None else ""
                log.info("step %d: sample%s\n%s", record["step"], how, _indented(record["text"]))
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
        loss, norm = _number(train["loss"], 4), _number(train["grad_norm"], 2)
        return (
            f"step {train['step']}/{perf['steps']}  loss {loss}  lr {train['lr']:.2e}  "
            f"grad {norm}  {_si(perf['tokens_per_second'])}tok/s  mfu {mfu}  "
            f"mem {perf['memory_gb']:.1f}GB  eta {_clock(left)}{_fill(train)}{_preference(train)}"
            f"{_terms(train)}{_load(train)}{_losses(perf)}"
        )

    def _live_line(self, perf: Record) -> str:
        """Return a bar and the figures of `_line`, the most important first, cut to the terminal.

        A line that wraps could not be erased.
        """
        parts = self._line(perf).split("  ")
        parts.sort(
            key=lambda part: not part.startswith(("step", "loss", "eta")) and "/s" not in part
        )
        full = round(BAR * self._train["step"] / perf["steps"])
        bar = "━" * full + "─" * (BAR - full)
        return f"{bar} {'  '.join(parts)}"[: shutil.get_terminal_size().columns - 1]


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


def _fill(train: Record) -> str:
    """Return the efficiency of packed conversations, such as `  98% full, 41% trained`."""
    if "padding_efficiency" not in train:
        return ""
    return f"  {train['padding_efficiency']:.0%} full, {train['trained_share']:.0%} trained"


def _preference(record: Record) -> str:
    """Return the margin and the accuracy of DPO, such as `  margin 0.52, accuracy 88%`."""
    if record.get("reward_margin") is None:
        return ""
    return f"  margin {record['reward_margin']:.3f}, accuracy {record['reward_accuracy']:.0%}"


def _terms(record: Record) -> str:
    """Return the first own terms of the loss with a short name, such as `  divergence 0.5213`."""
    own = {name.removeprefix(OWN): record[name] for name in record if name.startswith(OWN)}
    short = [f"  {name} {_number(own[name], 4)}" for name in own if len(name) <= TERM]
    return "".join(short[:TERMS])


def _load(train: Record) -> str:
    """Return the largest load of an expert, such as `  busiest expert +48%`; empty without any."""
    violations = [v for v in train.get("expert_violation", {}).values() if v is not None]
    return f"  busiest expert +{max(violations):.0%}" if violations else ""


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
    found += _preference(evaluation) + _terms(evaluation)
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


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _si(value: float) -> str:
    return f"{value / 1e6:.2f}M" if value >= 1e6 else f"{value / 1e3:.1f}k"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"
