"""The report of benchmarks/choose_defaults.py: tables of all phases in Markdown.

Losses are nats per token, differences mnat (thousandths). Intervals are two-sided, of Student's t.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from trial_statistics import (
    Estimate,
    crossing,
    holm,
    mean_estimate,
    paired,
    plackett_burman,
    value_at,
)

from dtt.errors import InputError

if TYPE_CHECKING:
    from choose_defaults import Measurement, Outcome

TODAY = "today"
PHASES = ("noise", "screen", "confirm", "transfer")


def report(measurement: Measurement) -> str:
    """Return all results so far; a phase that is not complete is named as such."""
    parts = {
        "Runs": _runs,
        "Noise: today's settings": _noise,
        "Screen: main effects": _screen,
        "Confirmation": _confirmation,
        "Transfer": _transfer,
        "Error of the evaluation": _evaluation,
        "Result": _result,
    }
    lines = ["# Defaults by measurement"]
    if measurement.plan.smoke:
        lines += ["", "A smoke test of 4 steps on synthetic text: the figures mean nothing."]
    for title, part in parts.items():
        lines += ["", f"## {title}", ""]
        try:
            lines += list(part(measurement))
        except InputError as error:
            lines.append(f"Not available: {str(error).splitlines()[0]}.")
    return "\n".join(lines)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(headings) + " |"
    yield "|" + " --- |" * len(headings)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def _mnat(value: float) -> str:
    return f"{1000 * value:+.1f}"


def _p(value: float) -> str:
    return "< 0.0001" if value < 0.0001 else f"{value:.4f}"


def _interval(measurement: Measurement, estimate: Estimate) -> str:
    low, high = estimate.interval(measurement.plan.content["confidence"])
    return f"{_mnat(low)} to {_mnat(high)}"


# ---- phases --------------------------------------------------------------------------------------


def _runs(measurement: Measurement) -> Iterator[str]:
    """Yield what was run, and on what."""
    recorded, records = measurement.recorded(), list(measurement.run_records())
    yield f"- commit {recorded.get('commit', 'none')}"
    yield f"- plan: sha256 {measurement.plan.sha256}"
    yield f"- torch {recorded.get('torch', '?')}, {recorded.get('cores', '?')} cores"
    for name, sha256 in recorded.get("tokens", {}).items():
        yield f"- token files of {name}: manifest sha256 {sha256}"
    yield ""
    rows = []
    for phase in PHASES:
        of_phase = [r for r in records if r["run"].startswith(f"{phase}/")]
        if not of_phase:
            continue
        trials = measurement.trials(phase)
        outcomes = [o for o in map(measurement.outcome, trials) if o is not None]
        seconds = sum(r["seconds"] for r in of_phase)
        rows.append(
            (
                phase,
                f"{len(outcomes)} of {len(trials)}",
                str(sum(not outcome.finished for outcome in outcomes)),
                str(sum(measurement.job(trial).attempt() > 1 for trial in trials)),
                f"{seconds / 3600:.2f}",
                f"{max(r['busy_percent'] for r in of_phase):.0f} %",
            )
        )
    headings = ("phase", "finished", "diverged", "resumed", "hours", "busiest before a run")
    yield from _table(headings, rows)


def _noise(measurement: Measurement) -> Iterator[str]:
    seeds = measurement.plan.content["phases"]["noise"]["seeds"]
    losses = measurement.losses("noise")[TODAY]
    yield from _table(
        ("seed", "loss"),
        ((str(seed), f"{loss:.4f}") for seed, loss in zip(seeds, losses, strict=True)),
    )
    mean = mean_estimate(losses)
    low, high = mean.interval(measurement.plan.content["confidence"])
    yield ""
    yield (
        f"Mean {mean.value:.4f}, 95 % interval {low:.4f} to {high:.4f}; standard deviation of "
        f"a run {1000 * statistics.stdev(losses):.1f} mnat ({mean.freedom} degrees of freedom)."
    )


def _screen(measurement: Measurement) -> Iterator[str]:
    plan = measurement.plan
    effects, losses = measurement.effects(), measurement.losses("screen")
    names = [*plan.factors, *(f"no factor {i}" for i in range(1, 12 - len(plan.factors)))]
    rows = []
    for name, effect in zip(names, effects, strict=True):
        texts = [""] * 2
        if name in plan.factors:
            texts = [plan.level(name, sign).strip() or "no" for sign in (-1, 1)]
        significant = effect.p < plan.content["significance"]
        rows.append(
            (name, *texts, _mnat(effect.value), f"{1000 * effect.error:.1f}",
             _interval(measurement, effect), _p(effect.p), "yes" if significant else "no")
        )  # fmt: skip
    headings = ("factor", "today", "other", "effect (mnat)", "standard error", "95 % interval", "p")
    yield from _table((*headings, "differs from 0"), rows)
    yield ""
    yield (
        f"Negative: the other level is better. {effects[0].freedom} degrees of freedom, p of each "
        "factor by itself. Columns without a factor show interactions and noise."
    )
    yield ""
    seeds = plan.content["phases"]["screen"]["seeds"]
    settings = measurement.settings("screen")
    signs = ["".join("+" if s > 0 else "-" for s in row) for row in plackett_burman()]
    yield from _table(
        ("row", "columns", *(f"loss, seed {seed}" for seed in seeds), "mean", "changes"),
        (
            (name, sign, *(f"{loss:.4f}" for loss in each), f"{statistics.fmean(each):.4f}",
             plan.changes(settings[name]))
            for sign, (name, each) in zip(signs, losses.items(), strict=True)
        ),
    )  # fmt: skip
    yield ""
    for name, levels in measurement.candidates().items():
        yield f"- Candidate {name}: {plan.changes(levels)}"


def _confirmation(measurement: Measurement) -> Iterator[str]:
    adjusted = confirmed(measurement)
    yield from _comparison(measurement, "confirm", adjusted)


def _transfer(measurement: Measurement) -> Iterator[str]:
    yield from _comparison(measurement, "transfer", None)
    outcomes = measurement.losses("transfer")
    better = measurement.better_candidate()
    signs = [a < b for a, b in zip(outcomes[better], outcomes[TODAY], strict=True)]
    yield ""
    yield f"Candidate {better} is better with {sum(signs)} of {len(signs)} seeds."


def _comparison(
    measurement: Measurement, phase: str, adjusted: dict[str, float] | None
) -> Iterator[str]:
    """Yield tables of all settings of a phase, and of their differences to today's, by seed."""
    outcomes = measurement.outcomes(phase)
    seeds = measurement.plan.content["phases"][phase]["seeds"]
    losses = measurement.losses(phase)
    yield from _table(
        ("setting", *(f"loss, seed {seed}" for seed in seeds), "mean", "step (s)"),
        (
            (name, *(f"{loss:.4f}" for loss in losses[name]),
             f"{statistics.fmean(losses[name]):.4f}", f"{step_seconds(each):.4f}")
            for name, each in outcomes.items()
        ),
    )  # fmt: skip
    yield ""
    rows = []
    for name in (n for n in outcomes if n != TODAY):
        difference = paired(losses[name], losses[TODAY])
        p = _p(adjusted[name] if adjusted else difference.p)
        equal = at_equal_seconds(outcomes[name], outcomes[TODAY])
        rows.append(
            (name, _mnat(difference.value), f"{1000 * difference.error:.1f}",
             _interval(measurement, difference), p,
             f"{_mnat(equal.value)} ({_interval(measurement, equal)})")
        )  # fmt: skip
    p_heading = "p (Holm)" if adjusted else "p"
    headings = ("candidate", "difference (mnat)", "standard error", "95 % interval", p_heading)
    yield from _table((*headings, "at equal seconds (mnat)"), rows)
    yield ""
    yield from _to_same_loss(measurement, outcomes)


def _to_same_loss(measurement: Measurement, outcomes: dict[str, list[Outcome]]) -> Iterator[str]:
    """Yield the table of steps and seconds to the last loss of today's settings, by seed."""
    rows = []
    for name in (n for n in outcomes if n != TODAY):
        shares, missed = steps_share(outcomes[name], outcomes[TODAY])
        ratio = step_seconds(outcomes[name]) / step_seconds(outcomes[TODAY])
        low, high = shares.interval(measurement.plan.content["confidence"])
        rows.append(
            (name, f"{shares.value:.3f}", f"{low:.3f} to {high:.3f}", f"{shares.value * ratio:.3f}",
             str(missed))
        )  # fmt: skip
    headings = ("candidate", "share of the steps", "95 % interval", "share of the seconds")
    yield from _table((*headings, "seeds that never reach it"), rows)
    yield ""
    yield (
        "Steps to the last loss that today's settings have with the same seed, interpolated "
        "between evaluations. The schedule ends at the last step, so that these are upper bounds: "
        "a shorter schedule would decay earlier. A seed that never reaches it counts with all of "
        "them."
    )


def _evaluation(measurement: Measurement) -> Iterator[str]:
    """Yield the standard errors over held-out sequences, from the last checkpoints of a seed."""
    trials = {t.setting: t for t in reversed(measurement.trials("confirm"))}
    measurement.outcomes("confirm")
    better = measurement.better_candidate()
    today = sequence_losses(measurement, trials[TODAY].name)
    other = sequence_losses(measurement, trials[better].name)
    one, difference = mean_estimate(today), paired(other, today)
    yield (
        f"{len(today):,} held-out sequences, the same in all runs; seed {trials[TODAY].seed}. "
        f"Standard error over sequences: {1000 * one.error:.1f} mnat of today's loss "
        f"({one.value:.4f}), and {1000 * difference.error:.1f} mnat of the difference of candidate "
        f"{better} ({_mnat(difference.value)} mnat). Sequences of one document are not "
        "independent: the true errors are larger. They are common to all seeds, and not in the "
        "intervals above, which hold for this held-out text."
    )


def _result(measurement: Measurement) -> Iterator[str]:
    """Yield each condition of the rule, and what follows."""
    plan, better = measurement.plan, measurement.better_candidate()
    outcomes, losses = measurement.outcomes("confirm"), measurement.losses("confirm")
    difference = paired(losses[better], losses[TODAY])
    p = confirmed(measurement)[better]
    low, high = difference.interval(plan.content["confidence"])
    equal = at_equal_seconds(outcomes[better], outcomes[TODAY]).value
    novels = measurement.losses("transfer")
    transfer = paired(novels[better], novels[TODAY]).value
    conditions = {
        f"adjusted p = {p:.4f} < {plan.content['significance']}": p < plan.content["significance"],
        f"the 95 % interval ends at {_mnat(high)} < 0 mnat": high < 0,
        f"at equal seconds {_mnat(equal)} < 0 mnat": equal < 0,
        f"on the novels {_mnat(transfer)} < 0 mnat": transfer < 0,
    }
    for text, holds in conditions.items():
        yield f"- {text}: {'holds' if holds else 'does not hold'}"
    yield f"- half the width of the 95 % interval: {500 * (high - low):.1f} mnat"
    yield ""
    if all(conditions.values()):
        yield f"Ship candidate {better}: {plan.changes(measurement.candidates()[better])}."
    else:
        yield "Today's settings stay: the candidate did not pass."


# ---- figures -------------------------------------------------------------------------------------


def confirmed(measurement: Measurement) -> dict[str, float]:
    """Return the p of each candidate's paired t-test in the confirmation, adjusted by Holm."""
    losses = measurement.losses("confirm")
    return holm({n: paired(losses[n], losses[TODAY]).p for n in losses if n != TODAY})


def step_seconds(outcomes: Sequence[Outcome]) -> float:
    """Return the median over runs of the median time of a step."""
    return statistics.median(outcome.step_seconds for outcome in outcomes)


def at_equal_seconds(candidate: Sequence[Outcome], today: Sequence[Outcome]) -> Estimate:
    """Return the difference in loss when today's settings have finished, paired by seed.

    A candidate with slower steps has by then done steps * (today's time of a step / its own).
    """
    speed = step_seconds(today) / step_seconds(candidate)
    reached = [
        value_at(c.curve, t.curve[-1][0] * min(1.0, speed))
        for c, t in zip(candidate, today, strict=True)
    ]
    return paired(reached, [outcome.loss for outcome in today])


def steps_share(candidate: Sequence[Outcome], today: Sequence[Outcome]) -> tuple[Estimate, int]:
    """Return the share of the steps to today's last loss, and how many seeds never reach it."""
    found = [crossing(c.curve, t.loss) for c, t in zip(candidate, today, strict=True)]
    last = [t.curve[-1][0] for t in today]
    shares = [1.0 if f is None else f / n for f, n in zip(found, last, strict=True)]
    return mean_estimate(shares), found.count(None)


def sequence_losses(measurement: Measurement, name: str) -> list[float]:
    """Return the mean loss of each held-out sequence of a run's last checkpoint, in fp32."""
    import numpy as np
    import torch

    from dtt.commands.model_source import load_model, on_device
    from dtt.config.load import load_job
    from dtt.data.samples.dataset import open_dataset
    from dtt.evaluate.validation import held_out

    root = measurement.work / "jobs" / name
    cfg = load_job(root)
    (part,) = held_out(open_dataset(cfg), cfg.train.eval_tokens // cfg.train.seq_len)
    model = on_device(load_model(str(root), ema=False), torch.device("cpu")).float().eval()
    losses: list[float] = []
    with torch.no_grad():
        for first in range(0, part.count, 16):
            samples = np.arange(first, min(first + 16, part.count), dtype=np.uint64)
            ids = torch.from_numpy(part.source.read(samples).ids)
            loss_BT = model(ids[:, :-1], ids[:, 1:], reduction="none")
            losses += loss_BT.double().mean(1).tolist()
    assert not any(map(math.isnan, losses))
    return losses
