"""The commands `dtt doctor`, `dtt plan` and `dtt verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dtt.cli.app import cli
from dtt.cli.options import Config, Dataset, Json, Overrides, Stage, examples, resolve
from dtt.mesh.process import command


@cli.command(
    epilog=examples(
        "dtt doctor",
        "dtt doctor --processes 8 --path jobs",
        "torchrun --standalone --nproc_per_node 8 -m dtt.main doctor",
        "MASTER_ADDR=n1 MASTER_PORT=29500 srun dtt doctor --path jobs",
    )
)
def doctor(
    path: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder on the disk to check.")
    ] = Path("jobs"),
    processes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Start N processes on this machine.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device to check: auto, cpu or cuda.")] = "auto",
    json: Json = False,
) -> None:
    """Check that this machine, or every node of a job, is fit for training.

    Checks versions, devices and the disk. With several processes, also verifies and times every
    collective that training uses, and the links between neighbouring ranks. Writes a temporary file
    to --path. Exits with 78 on a problem.
    """
    with command():
        from dtt.doctor import run as doctor

        doctor.run(path, device=device, processes=processes, as_json=json)


@cli.command(
    epilog=examples(
        "dtt plan -c run.yaml",
        "dtt plan -c run.yaml --gpu H100 --price 2.5 launch.nodes=8 launch.gpus_per_node=8",
        "dtt plan -c run.yaml --gpu cpu --probe     # compare with three measured steps",
    )
)
def plan(
    overrides: Overrides = None,
    config: Config = None,
    dataset: Dataset = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="GPU model, such as H100 or A100-40, or cpu; default: the type in "
            "launch.gpus_per_node, or that of this machine; without either, GPUs are compared."
        ),
    ] = None,
    price: Annotated[float | None, typer.Option(min=0.0, help="Price of a device hour.")] = None,
    stage: Stage = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Train three steps here and print the error.")
    ] = False,
    json: Json = False,
) -> None:
    """Estimate the memory, time, communication, disk space and cost of a run.

    Reads the configuration, and the sizes of the token files if they exist. Needs no GPU. Prints a
    line for each stage of training, if the configuration describes several, and their sum.
    """
    with command():
        from dtt.config.load import stage_names
        from dtt.estimate import plan as body
        from dtt.train.initial import model_of

        if config is None and dataset is None and not overrides:
            raise body.missing_configuration()
        options = {"download.dataset": dataset}
        names = stage_names(config, overrides or []) if stage is None else ()
        found = [
            resolve(config, overrides, options, model_of=model_of, stage=name)
            for name in names or (stage,)
        ]
        if names:
            body.run_stages(found, gpu, price, probe=probe, as_json=json)
        else:
            body.run(found[0], gpu, price, probe=probe, as_json=json)


@cli.command(
    epilog=examples(
        "dtt verify -c run.yaml",
        "dtt verify --fuzz 1 --minutes 60    # random configurations",
    )
)
def verify(
    overrides: Overrides = None,
    config: Config = None,
    stage: Stage = None,
    fuzz: Annotated[
        int | None,
        typer.Option(metavar="SEED", min=0, help="Verify random configurations instead."),
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.0, help="Duration of --fuzz.")] = 1.0,
    device: Annotated[
        str,
        typer.Option(help="cpu: in fp64; cuda: in the precision of the run, on this node's GPUs."),
    ] = "cpu",
    json: Json = False,
) -> None:
    """Check that every layout of a run computes what one process computes.

    Shrinks the configuration, runs each layout in processes on this machine, and compares data,
    losses, gradients, norms, updates, replicas, resumes and the export. Needs no data and no GPU.
    Exits with 1 if something differs, and names the features that it takes.
    """
    with command():
        from dtt.config.load import stage_names
        from dtt.train.initial import model_of
        from dtt.verify import run as body

        if fuzz is not None:
            body.fuzz(fuzz, minutes, as_json=json)
            return
        if config is None and not overrides:
            raise body.missing_configuration()
        names = stage_names(config, overrides or []) if stage is None else ()
        found = [
            (name or config or "run", resolve(config, overrides, {}, model_of=model_of, stage=name))
            for name in names or (stage,)
        ]
        body.run(found, device, as_json=json)
