"""`dtt mup coord-check | transfer`: check that hyperparameters transfer across model widths."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from dtt.base.errors import ConfigError, Diverged
from dtt.base.log import log
from dtt.base.ranks import Ranks
from dtt.config.run import RunConfig
from dtt.config.scaling import MupConfig
from dtt.mesh import dist
from dtt.mup import coordinate_check
from dtt.mup.coordinate_check import KINDS
from dtt.mup.short_training import at_width
from dtt.mup.transfer import drift, final_loss
from dtt.track.jsonl import plain

TOLERANCE = 0.35
"""Largest exponent of the width that passes; without muP it is 0.5 or more."""
OCTAVES = range(-3, 4)
"""Default learning rates of `transfer`, in octaves relative to that of the configuration."""

Number = TypeVar("Number", int, float)


def coord_check(cfg: RunConfig, widths: str, *, as_json: bool) -> None:
    """Measure activation sizes at several widths, and print their exponents of the width.

    Raises Diverged if an activation depends on the width.
    """
    cfg, sizes = _with_mup(cfg, widths)
    world = dist.start(Ranks(), cfg.train.device)
    measured = {}
    for width in sizes:
        log.info("width %d: %d steps", width, cfg.train.steps)
        measured[width] = coordinate_check.measure(cfg, width, world)
    slopes = coordinate_check.slopes(measured)
    rows: list[tuple[str, ...]] = [("step", *KINDS)]
    rows += [(str(step), *(f"{one[k]:.2f}" for k in KINDS)) for step, one in enumerate(slopes)]
    faults = coordinate_check.faults(slopes, TOLERANCE)
    _report(cfg, rows, faults, {"slopes": slopes, "sizes": measured}, as_json=as_json)


def transfer(cfg: RunConfig, widths: str, rates: str | None, *, as_json: bool) -> None:
    """Train at several widths and learning rates, and print the final losses and the best rates.

    Raises Diverged if the best learning rate depends on the width.
    """
    cfg, sizes = _with_mup(cfg, widths)
    tried = [cfg.optim.lr * 2.0**octave for octave in OCTAVES]
    if rates is not None:
        tried = _numbers("--lrs", rates, float, "1e-3,2e-3")
    world = dist.start(Ranks(), cfg.train.device)
    losses: dict[int, dict[float, float]] = {width: {} for width in sizes}
    for width in sizes:
        for lr in tried:
            log.info("width %d, lr %.3g: %d steps", width, lr, cfg.train.steps)
            losses[width][lr] = final_loss(cfg, width, lr, world)
    best = {width: min(by_rate, key=by_rate.__getitem__) for width, by_rate in losses.items()}
    rows = [("width", *(f"{lr:.2g}" for lr in tried), "best lr")]
    rows += [
        (str(width), *(f"{loss:.3f}" for loss in losses[width].values()), f"{lr:.2g}")
        for width, lr in best.items()
    ]
    facts = {"best": best, "losses": losses}
    _report(cfg, rows, drift(best, tried), facts, as_json=as_json)


def short_warmup(cfg: RunConfig, steps: int) -> dict[str, str]:
    """Return a shorter warm-up for runs of `steps` steps, if that of `cfg` is longer than these."""
    warmup = cfg.schedule.warmup
    most = {"steps": steps, "tokens": steps * cfg.train.global_batch_tokens}
    longer = warmup.unit in most and warmup.amount > most[warmup.unit]
    return {"schedule.warmup": "10%"} if longer else {}


def _with_mup(cfg: RunConfig, widths: str) -> tuple[RunConfig, list[int]]:
    """Return the run with muP, and the widths, at each of which the model can be built.

    The base of muP is that of the configuration, or else the narrowest of `widths`.
    """
    if not cfg.optim.supports_mup:
        raise ConfigError(
            "muP has no rule for an optimizer of your own",
            where="optim.type",
            next="check with optim.type=adamw or optim.type=muon",
        )
    found = _numbers("--widths", widths, int, "64,128,256")
    for width in found:
        at_width(cfg, width)
    if not isinstance(cfg.scaling, MupConfig):
        cfg = cfg.model_copy(update={"scaling": MupConfig(base_dim=found[0])})
    return cfg, found


def _report(
    cfg: RunConfig,
    rows: Sequence[Sequence[str]],
    faults: Sequence[str],
    facts: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    """Print the table of a check, or its facts as JSON; raise Diverged if there are faults."""
    if as_json:
        verdict = {"scaling": cfg.scaling.model_dump(), "passed": not faults, "faults": faults}
        print(json.dumps(plain(verdict | facts), indent=1))
    else:
        print("\n".join("".join(f"{cell:>10}" for cell in row) for row in rows))
        print("FAIL" if faults else "pass")
    if faults:
        raise Diverged(
            "muP check failed: the model depends on its width",
            why="; ".join(faults),
            next="narrow models and few steps are noisy: try other --widths, more train.steps or "
            "lower rates (optim.lr, --lrs), and report a failure that persists",
        )


def _numbers(option: str, text: str, kind: Callable[[str], Number], example: str) -> list[Number]:
    """Parse two or more different positive numbers, such as `64,128`; return them sorted.

    Raises ConfigError for anything else.
    """
    try:
        found = sorted({kind(one) for one in text.split(",")})
    except ValueError:
        found = []
    if len(found) < 2 or not all(0 < one < math.inf for one in found):
        raise ConfigError(
            f"{option} {text}: expected two or more different positive numbers",
            next=f"separate them with commas, such as {option} {example}",
        )
    return found
