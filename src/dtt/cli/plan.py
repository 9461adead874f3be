"""The command `dtt plan`."""

from __future__ import annotations

from typing import Annotated

from dtt.cli.app import cli
from dtt.cli.options import Config, Dataset, Json, Overrides, Stage, option, resolve_each


@cli.command(
    "dtt plan -c run.yaml",
    "dtt plan -c run.yaml --gpu H100 --price 2.5 launch.nodes=8 launch.gpus_per_node=8",
)
def plan(
    overrides: Overrides = None,
    config: Config = None,
    dataset: Dataset = None,
    gpu: Annotated[
        str | None,
        option(
            "GPU model, such as H100 or A100-40, or cpu; default: the type in "
            "launch.gpus_per_node, or that of this machine; without either, GPUs are compared."
        ),
    ] = None,
    price: Annotated[float | None, option("Price of a device hour.", min=0.0)] = None,
    stage: Stage = None,
    json: Json = False,
) -> None:
    """Estimate the memory, time, communication, disk space and cost of a run.

    Reads the configuration, and the sizes of the token files if they exist. Needs no GPU. Prints a
    line for each stage of training, if the configuration describes several, and their sum.
    """
    from dtt.estimate import plan as body

    if config is None and dataset is None and not overrides:
        raise body.missing_configuration()
    options = {"download.dataset": dataset}
    found = resolve_each(config, overrides, options, stage=stage)
    configs = [resolved.config for resolved in found.values()]
    if stage in found:  # one stage, or a configuration without stages
        body.run(configs[0], gpu, price, as_json=json)
    else:
        body.run_stages(configs, gpu, price, as_json=json)
