"""Commands of `dtt mup`."""

from __future__ import annotations

from typing import Annotated

from dtt.cli.app import cli
from dtt.cli.options import Config, Json, Overrides, Stage, option, resolve

mup_cli = cli.group("mup", "Check that hyperparameters transfer across model widths (muP).")


def _take_steps(overrides: list[str], default: int) -> tuple[list[str], int]:
    """Return the other overrides, and `train.steps` if the command line sets it, or the default.

    That of a configuration file is for training, which is too long for many runs.
    """
    given = [one for one in overrides if one.startswith("train.steps=")]
    others = [one for one in overrides if one not in given]
    if not given:
        return others, default
    return others, resolve(None, [*given, "schedule.warmup=0"], {}).train.steps


@mup_cli.command(
    "dtt mup coord-check -c run.yaml",
    "dtt mup coord-check -c run.yaml --widths 128,256,512 optim.type=adamw",
)
def mup_coord_check(
    overrides: Overrides = None,
    config: Config = None,
    widths: Annotated[str, option("Comma-separated values of model.dim.")] = "64,128,256,512",
    stage: Stage = None,
    json: Json = False,
) -> None:
    """Check that the size of activations does not depend on the model width.

    Trains small models of several widths for train.steps, by default 5. Reads the token files of
    the run. Exits with 76 if the check fails. The base is scaling.base_dim, or the smallest width.
    """
    from dtt.mup import run as mup

    # Train at the peak rate without warm-up: that of the run may be longer than `steps`.
    others, steps = _take_steps(overrides or [], 5)
    options = {"train.steps": steps, "schedule.warmup": 0}
    cfg = resolve(config, others, options, stage=stage)
    mup.coord_check(cfg, widths, as_json=json)


@mup_cli.command(
    "dtt mup transfer -c run.yaml",
    "dtt mup transfer -c run.yaml --lrs 1e-3,2e-3,4e-3 train.steps=200",
)
def mup_transfer(
    overrides: Overrides = None,
    config: Config = None,
    widths: Annotated[str, option("Comma-separated values of model.dim.")] = "64,128,256",
    lrs: Annotated[
        str | None,
        option("Comma-separated values of optim.lr; default: 1/8 to 8 times that of the config."),
    ] = None,
    stage: Stage = None,
    json: Json = False,
) -> None:
    """Check that the best learning rate does not depend on the model width.

    Trains a small model for each width and rate, one after the other, for train.steps, by default
    60; all other learning rates are scaled in proportion. Reads the token files of the run. Exits
    with 76 if the check fails.
    """
    from dtt.mup import run as mup

    others, steps = _take_steps(overrides or [], 60)
    options: dict[str, object] = {"train.steps": steps}
    options |= mup.short_warmup(resolve(config, others, {}, stage=stage), steps)
    cfg = resolve(config, others, options, stage=stage)
    mup.transfer(cfg, widths, lrs, as_json=json)
