"""`dtt mup coord-check | transfer`: check that hyperparameters transfer across model widths."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeVar

from dtt.base.errors import ConfigError, Diverged
from dtt.base.files import write_atomically
from dtt.base.log import log
from dtt.base.ranks import Ranks
from dtt.config.base import measure
from dtt.config.run import RunConfig
from dtt.config.scaling import MupConfig, StandardConfig
from dtt.mesh import dist
from dtt.mup import coordinate_check
from dtt.mup.coordinate_check import KINDS, Sizes
from dtt.mup.short_training import at_width
from dtt.mup.transfer import Optimum, drift, final_loss, optimum, power
from dtt.track import plot
from dtt.track.jsonl import plain
from dtt.track.plot import Curve, Panel

OCTAVES = range(-3, 4)
"""Default learning rates of `transfer`, in octaves relative to that of the configuration."""

Number = TypeVar("Number", int, float)
Losses = dict[float, list[float]]
"""Final losses in nats by learning rate, one for each seed."""


def coord_check(
    cfg: RunConfig, widths_given: str, *, tolerance: float, compare: bool, out: Path, as_json: bool
) -> None:
    """Measure activation sizes at several widths, print and plot them (muP coordinate check).

    Writes coord-check.png and .json into `out`. With `compare`, also measures the standard
    parametrization. Raises Diverged if an activation depends on the width under muP.
    """
    widths = _widths(cfg, widths_given)
    world = dist.start(Ranks(), cfg.train.device)
    results: dict[str, Any] = {}
    rows = []
    for name, run in _parametrizations(cfg, widths, compare).items():
        measured: dict[int, list[Sizes]] = {}
        for width in widths:
            log.info("%s at width %d: %d steps", name, width, run.train.steps)
            measured[width] = coordinate_check.measure(run, width, world)
        slopes = coordinate_check.slopes(measured)
        faults = coordinate_check.faults(slopes, tolerance)
        results[name] = _facts(run, faults) | {"slopes": slopes, "sizes": measured}
        rows.append(_panels(name, measured))
        if not as_json:
            print("\n".join(_slopes_table(name, slopes, faults)))
    drawing = plot.grid(rows, "width", "mean |activation|", log_y=True)
    _finish(results, plot.save(drawing, out / "coord-check.png"), as_json=as_json)


def transfer(
    cfg: RunConfig,
    widths_given: str,
    rates_given: str | None,
    *,
    seeds: int,
    tolerance: float,
    compare: bool,
    out: Path,
    as_json: bool,
) -> None:
    """Sweep learning rates at several widths, print and plot the final losses.

    Writes transfer.png and .json into `out`. With `compare`, also sweeps the standard
    parametrization. Raises Diverged if the best learning rate depends on the width under muP.
    """
    widths = _widths(cfg, widths_given)
    if rates_given is None:
        rates = [cfg.optim.lr * 2.0**octave for octave in OCTAVES]
    else:
        rates = _numbers("--lrs", rates_given, float, "1e-3,2e-3")
    world = dist.start(Ranks(), cfg.train.device)
    results: dict[str, Any] = {}
    rows = []
    for name, run in _parametrizations(cfg, widths, compare).items():
        losses: dict[int, Losses] = {width: {} for width in widths}
        for width in widths:
            for lr in rates:
                log.info("%s at width %d, lr %.3g: %d steps", name, width, lr, run.train.steps)
                seeded = (run.model_copy(update={"seed": run.seed + i}) for i in range(seeds))
                losses[width][lr] = [final_loss(one, width, lr, world) for one in seeded]
        best = {width: optimum(_means(losses[width])) for width in widths}
        faults = _drift_faults(best, tolerance)
        results[name] = _facts(run, faults) | {
            "drift_octaves": drift(best),
            "power": power(best),
            "best": {width: asdict(one) for width, one in best.items()},
            "losses": losses,
        }
        rows.append([_panel(name, losses, best)])
        if not as_json:
            print("\n".join(_losses_table(name, losses, best, faults)))
    drawing = plot.grid(rows, "learning rate", "final loss, nats", log_y=False, panel_width=6.0)
    _finish(results, plot.save(drawing, out / "transfer.png"), as_json=as_json)


def short_warmup(cfg: RunConfig, steps: int) -> dict[str, str]:
    """Return a shorter warm-up for runs of `steps` steps, if that of `cfg` is longer than these."""
    unit, length = measure(cfg.schedule.warmup)
    most = {"steps": steps, "tokens": steps * cfg.train.global_batch_tokens}
    return {"schedule.warmup": "10%"} if unit in most and length > most[unit] else {}


def _parametrizations(cfg: RunConfig, widths: Sequence[int], compare: bool) -> dict[str, RunConfig]:
    """Return the configuration with muP and, with `compare`, with the standard parametrization.

    The base of muP is that of the configuration, or else the narrowest of `widths`.
    """
    mup = cfg.scaling
    if not isinstance(mup, MupConfig):
        mup = MupConfig(base_dim=min(widths))
    named = {"mup": mup} | ({"standard": StandardConfig()} if compare else {})
    return {name: cfg.model_copy(update={"scaling": one}) for name, one in named.items()}


def _facts(run: RunConfig, faults: Sequence[str]) -> dict[str, Any]:
    return {"scaling": run.scaling.model_dump(), "passed": not faults, "faults": faults}


def _slopes_table(name: str, slopes: Sequence[Sizes], faults: Sequence[str]) -> list[str]:
    head = f"{name:<8}  slope after step " + "".join(f"{kind:>10}" for kind in KINDS)
    rows = [
        f"{step:>26} " + "".join(f"{sizes[kind]:>10.2f}" for kind in KINDS)
        for step, sizes in enumerate(slopes)
    ]
    return [head, *rows, _verdict(name, faults)]


def _losses_table(
    name: str, losses: Mapping[int, Losses], best: Mapping[int, Optimum], faults: Sequence[str]
) -> list[str]:
    rates = next(iter(losses.values()))
    head = f"{name:<8}  lr {'':<5}" + "".join(f"{lr:>9.2g}" for lr in rates) + "   best lr"
    rows = [
        f"{'width':>14} {width:<5}"
        + "".join(f"{loss:>9.3f}" for loss in _means(losses[width]).values())
        + f"{best[width].lr:>10.2g}"
        for width in losses
    ]
    moved = f"{'':<10}best lr moves by {drift(best):.2f} octaves, as width^{power(best):.2f}"
    return [head, *rows, moved, _verdict(name, faults)]


def _verdict(name: str, faults: Sequence[str]) -> str:
    return f"{name:<8}  {'FAIL: ' + '; '.join(faults) if faults else 'pass'}"


def _drift_faults(best: Mapping[int, Optimum], tolerance: float) -> list[str]:
    faults = [
        f"the best learning rate at width {width} is at the end of the grid"
        for width, one in best.items()
        if not one.bracketed
    ]
    if abs(power(best)) > tolerance:
        faults.append(f"the best learning rate grows as width^{power(best):.2f}")
    return faults


def _means(losses: Losses) -> dict[float, float]:
    return {lr: fmean(of_seeds) for lr, of_seeds in losses.items()}


def _panels(name: str, measured: Mapping[int, Sequence[Sizes]]) -> list[Panel]:
    """Return a panel for each kind of activation: size against width, one curve for each step."""
    widths = list(measured)
    steps = range(len(measured[widths[0]]))
    return [
        Panel(
            f"{name}: {kind}",
            [
                Curve(
                    f"step {step}" if kind == KINDS[0] else "",
                    widths,
                    [measured[width][step][kind] for width in widths],
                )
                for step in steps
            ],
        )
        for kind in KINDS
    ]


def _panel(name: str, losses: Mapping[int, Losses], best: Mapping[int, Optimum]) -> Panel:
    """Return a panel of loss against learning rate.

    It has one curve for each width, with the standard error over the seeds, and one through the
    best rates. Rates with a non-finite mean loss are left out.
    """
    curves = []
    for width, by_rate in losses.items():
        finite = {lr: seeds for lr, seeds in by_rate.items() if math.isfinite(fmean(seeds))}
        errors = [stdev(s) / math.sqrt(len(s)) if len(s) > 1 else 0.0 for s in finite.values()]
        curves.append(Curve(f"width {width}", list(finite), list(_means(finite).values()), errors))
    optima = list(best.values())
    return Panel(name, [*curves, Curve("best", [o.lr for o in optima], [o.loss for o in optima])])


def _finish(results: dict[str, Any], plot_file: Path, *, as_json: bool) -> None:
    """Write the numbers as JSON next to the plot; raise Diverged if muP failed."""
    document = json.dumps(plain(results), indent=1)
    write_atomically(plot_file.with_suffix(".json"), document + "\n")
    print(document if as_json else plot_file)
    if results["mup"]["faults"]:
        raise Diverged(
            "muP check failed: the model depends on its width",
            where=plot_file,
            why="; ".join(results["mup"]["faults"]),
            next="see the plot: narrow models and few steps are noisy; try other --widths, more "
            "train.steps or lower rates (optim.lr, --lrs), and report a failure that persists",
        )


def _widths(cfg: RunConfig, given: str) -> list[int]:
    """Return the widths of `--widths`, after checking that the model can be built at each."""
    widths = _numbers("--widths", given, int, "64,128,256")
    for width in widths:
        at_width(cfg, width)
    return widths


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
