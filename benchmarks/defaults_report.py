"""The report of benchmarks/choose_defaults.py: tables of all phases in Markdown.

Losses are nats per token, differences mnat (thousandths). Intervals are two-sided, of Student's t.
"""

from __future__ import annotations

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

from dtt.base.errors import InputError

if TYPE_CHECKING:
    from choose_defaults import Measurement
    from trial_runner import Outcome

TODAY = "today"


def report(measurement: Measurement) -> str:
    """Return all results so far; a phase that is not complete is named as such."""
    parts = {
        "Runs": _runs,
        "Noise: today's settings": _noise,
        "Screen: main effects": _screen,
        "Confirmation": _confirmation,
        "Transfer": _transfer,
        "AdamW": _adamw,
        "AdamW on the novels": _adamw_novels,
        "Result": _result,
    }
    lines = ["# Defaults by measurement"]
    if measurement.plan.smoke:
        lines += ["", "A smoke test of 4 steps on synthetic text: the figures mean nothing."]
    for title, part in parts.items():
        lines += ["", f"## {title}", ""]
        try:
            lines.extend(part(measurement))  # an error leaves the lines before it
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
    lines = measurement.record.lines
    if not lines:
        raise InputError("no run has finished")
    for name, value in lines[0].items():
        yield f"- {name}: {value}"
    yield ""
    rows = []
    for phase in measurement.plan.content["phases"]:
        of_phase = [line for line in lines[1:] if line["run"].startswith(f"{phase}/")]
        hours = sum(line["seconds"] for line in of_phase) / 3600
        diverged = sum(not line["finished"] for line in of_phase)
        rows.append((phase, str(len(of_phase)), str(diverged), f"{hours:.2f}"))
    yield from _table(("phase", "finished runs", "diverged", "hours of processes"), rows)
    repeated = [line["run"] for line in lines[1:] if line["run"].startswith("repeated/")]
    equal = sum(map(measurement.repeated_equal, repeated))
    yield ""
    yield (
        f"{len(repeated)} repetitions of the first run, with other versions of the source: the "
        f"losses of {equal} were the same bit for bit."
    )


def _noise(measurement: Measurement) -> Iterator[str]:
    seeds = measurement.plan.seeds("noise")
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
    seeds = plan.seeds("screen")
    settings = measurement.settings("screen")
    signs = ["".join("+" if s > 0 else "-" for s in row) for row in plackett_burman()]
    yield from _table(
        ("row", "columns", *(f"loss, seed {seed}" for seed in seeds), "mean", "changes"),
        (
            (name, sign, *(f"{loss:.4f}" for loss in each), f"{statistics.fmean(each):.4f}",
             settings[name].changes)
            for sign, (name, each) in zip(signs, losses.items(), strict=True)
        ),
    )  # fmt: skip
    yield ""
    for name, levels in measurement.candidates().items():
        yield f"- Candidate {name}: {plan.setting(levels).changes}"


def _confirmation(measurement: Measurement) -> Iterator[str]:
    yield from _losses(measurement, "confirm")
    yield ""
    yield from _differences(measurement, "confirm", confirmed(measurement))
    yield ""
    yield from _to_same_loss(measurement, "confirm", "times", TODAY)


def _transfer(measurement: Measurement) -> Iterator[str]:
    yield from _losses(measurement, "transfer")
    yield ""
    yield from _differences(measurement, "transfer", None)
    yield ""
    yield from _to_same_loss(measurement, "transfer", "times-novels", TODAY)


def _adamw(measurement: Measurement) -> Iterator[str]:
    yield from _beside_adamw(measurement, "adamw", "confirm", "times")


def _adamw_novels(measurement: Measurement) -> Iterator[str]:
    yield from _beside_adamw(measurement, "adamw-novels", "transfer", "times-novels")


def _beside_adamw(measurement: Measurement, phase: str, others: str, times: str) -> Iterator[str]:
    """Yield the grid of AdamW, its losses by seed, and the steps of Muon to the same losses."""
    grid = measurement.losses(f"tune-{phase}")
    settings = measurement.settings(f"tune-{phase}")
    yield from _table(
        ("AdamW", "loss"),
        ((settings[name].changes, f"{losses[0]:.4f}") for name, losses in grid.items()),
    )
    yield ""
    yield from _losses(measurement, phase)
    yield ""
    yield from _to_same_loss(measurement, others, times, "adamw", phase)


def _losses(measurement: Measurement, phase: str) -> Iterator[str]:
    """Yield the table of the last losses of all settings by seed."""
    yield from _table(
        ("setting", *(f"seed {n}" for n in measurement.plan.seeds(phase)), "mean", "σ (mnat)"),
        (
            (name, *(f"{loss:.4f}" for loss in each), f"{statistics.fmean(each):.4f}",
             f"{1000 * statistics.stdev(each):.1f}")
            for name, each in measurement.losses(phase).items()
        ),
    )  # fmt: skip


def _differences(
    measurement: Measurement, phase: str, adjusted: dict[str, float] | None
) -> Iterator[str]:
    """Yield the table of differences to today's settings, paired by seed."""
    losses = measurement.losses(phase)
    rows = []
    for name in (n for n in losses if n != TODAY):
        difference = paired(losses[name], losses[TODAY])
        p = _p(adjusted[name] if adjusted else difference.p)
        better = sum(a < b for a, b in zip(losses[name], losses[TODAY], strict=True))
        rows.append(
            (name, _mnat(difference.value), f"{1000 * difference.error:.1f}",
             _interval(measurement, difference), p, f"{better} of {len(losses[name])}")
        )  # fmt: skip
    p_heading = "p (Holm)" if adjusted else "p"
    headings = ("candidate", "difference (mnat)", "standard error", "95 % interval", p_heading)
    yield from _table((*headings, "seeds better"), rows)


def _to_same_loss(
    measurement: Measurement, phase: str, times: str, baseline: str, of: str | None = None
) -> Iterator[str]:
    """Yield the table of steps and seconds to the last loss of a setting with the same seed."""
    outcomes = measurement.outcomes(phase)
    base = measurement.outcomes(of or phase)[baseline]
    seconds = {name: step_seconds(each) for name, each in measurement.outcomes(times).items()}
    rows = []
    for name in (n for n in outcomes if n != baseline):
        shares, missed = steps_share(outcomes[name], base)
        low, high = shares.interval(measurement.plan.content["confidence"])
        slower = seconds[name] / seconds[baseline]
        equal = at_equal_seconds(outcomes[name], base, slower)
        rows.append(
            (name, f"{shares.value:.3f}", f"{low:.3f} to {high:.3f}", f"{1 / shares.value:.2f}",
             f"{seconds[name]:.4f}", f"{1 / (shares.value * slower):.2f}", str(missed),
             f"{_mnat(equal.value)} ({_interval(measurement, equal)})")
        )  # fmt: skip
    yield from _table(
        ("setting", "share of the steps", "95 % interval", "times fewer", "step (s)",
         "times fewer seconds", "seeds that never reach it", "at equal seconds (mnat)"),
        rows,
    )  # fmt: skip
    yield ""
    yield (
        f"Steps and seconds to the last loss of {baseline} ({seconds[baseline]:.4f} s per step) "
        "with the same seed, interpolated between evaluations. Where each seed reaches it, the "
        "share is an upper bound, because the schedule ends at the last step: a shorter one would "
        "decay earlier. A seed that never reaches it counts with all steps, which is too few."
    )


def _result(measurement: Measurement) -> Iterator[str]:
    """Yield each condition of the rule, and what follows."""
    plan, better = measurement.plan, measurement.better_candidate()
    outcomes, losses = measurement.outcomes("confirm"), measurement.losses("confirm")
    difference = paired(losses[better], losses[TODAY])
    p = confirmed(measurement)[better]
    low, high = difference.interval(plan.content["confidence"])
    times = measurement.outcomes("times")
    slower = step_seconds(times[better]) / step_seconds(times[TODAY])
    equal = at_equal_seconds(outcomes[better], outcomes[TODAY], slower).value
    novels = measurement.losses("transfer")
    transfer = paired(novels[better], novels[TODAY]).value
    conditions = {
        f"adjusted p = {_p(p)} < {plan.content['significance']}": p < plan.content["significance"],
        f"the 95 % interval ends at {_mnat(high)} < 0 mnat": high < 0,
        f"at equal seconds {_mnat(equal)} < 0 mnat": equal < 0,
        f"on the novels {_mnat(transfer)} < 0 mnat": transfer < 0,
    }
    for text, holds in conditions.items():
        yield f"- {text}: {'holds' if holds else 'does not hold'}"
    yield f"- half the width of the 95 % interval: {500 * (high - low):.1f} mnat"
    yield ""
    if all(conditions.values()):
        yield f"Ship candidate {better}: {plan.setting(measurement.candidates()[better]).changes}."
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


def at_equal_seconds(
    candidate: Sequence[Outcome], baseline: Sequence[Outcome], slower: float
) -> Estimate:
    """Return the difference in loss when the baseline has finished, paired by seed.

    A candidate whose steps take `slower` times as long has by then done steps / slower.
    """
    reached = [
        value_at(c.curve, b.curve[-1][0] * min(1.0, 1 / slower))
        for c, b in zip(candidate, baseline, strict=True)
    ]
    return paired(reached, [outcome.loss for outcome in baseline])


def steps_share(candidate: Sequence[Outcome], baseline: Sequence[Outcome]) -> tuple[Estimate, int]:
    """Return the share of the steps to the baseline's last loss, and how many seeds miss it."""
    found = [crossing(c.curve, b.loss) for c, b in zip(candidate, baseline, strict=True)]
    last = [b.curve[-1][0] for b in baseline]
    shares = [1.0 if f is None else f / n for f, n in zip(found, last, strict=True)]
    return mean_estimate(shares), found.count(None)
