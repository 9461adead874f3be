"""The command `dtt verify`."""

from __future__ import annotations

from typing import Annotated

from dtt.cli.app import cli
from dtt.cli.options import Config, Json, Overrides, Stage, option, resolve_each


@cli.command(
    "dtt verify -c run.yaml",
    "dtt verify --model hf:LiquidAI/LFM2-350M",
)
def verify(
    overrides: Overrides = None,
    config: Config = None,
    stage: Stage = None,
    model: Annotated[
        str | None, option("Check the model of a Hugging Face folder instead.", metavar="FOLDER")
    ] = None,
    device: Annotated[
        str,
        option(
            "cpu: in fp64; cuda: in the precision of the run, on this node's GPUs; "
            "cuda:0: with all processes on one."
        ),
    ] = "cpu",
    json: Json = False,
) -> None:
    """Check that every layout of a run computes what one process computes.

    Shrinks the configuration, runs each layout in processes on this machine, and compares data,
    losses, gradients, norms, updates, replicas, resumes and the export. Needs no data and no GPU.
    Exits with 1 if something differs, and names it.

    With --model: compares logits, losses and gradients of a model with those of transformers, and
    checks gradients, documents in one row, and the export, with the weights of the folder if it has
    some. It runs on the CPU in fp32, and takes the memory of three models.
    """
    if model is not None:
        from dtt.verify import folder

        folder.run(model, as_json=json)
        return
    from dtt.verify import run as body

    if config is None and not overrides:
        raise body.missing_configuration()
    found = resolve_each(config, overrides, {}, stage=stage)
    named = [(name or config or "run", each.config) for name, each in found.items()]
    body.run(named, device, as_json=json)
