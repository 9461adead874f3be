"""Options that several commands share, and the resolution of their values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dtt.config.merging import Resolved
    from dtt.config.run import RunConfig


Config = Annotated[
    str | None,
    typer.Option("--config", "-c", help="Config file, or name of a shipped config (quickstart)."),
]


Cluster = Annotated[
    str | None, typer.Option(help="Cluster profile: name in configs/clusters/, or file.")
]


Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]…", help="Config keys, such as train.steps=500."),
]


Dataset = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        "-d",
        help="Dataset: name in configs/datasets/, Hugging Face id (org/name), local file or "
        "folder, URL (s3://, gs://, abfs://, https://, hf://), or python-stdlib.",
    ),
]


Stage = Annotated[
    str | None, typer.Option(help="Stage to use if the configuration defines several.")
]


RedoFrom = Annotated[
    str | None,
    typer.Option(
        metavar="STAGE",
        help="Train this stage and the later ones again; their old jobs are renamed, not deleted.",
    ),
]


After = Annotated[
    list[str] | None,
    typer.Option(
        metavar="JOB", help="Start when this job, chain or Slurm id has succeeded; repeatable."
    ),
]


Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def _set_quiet(requested: bool) -> bool:
    if requested:
        os.environ["DTT_QUIET"] = "1"  # read when `command` sets up logging, also in subprocesses
    return requested


Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", callback=_set_quiet, help="Log only warnings and errors.")
]


def _set_trust(requested: bool) -> bool:
    if requested:
        os.environ["DTT_TRUST"] = "1"  # read by dtt.config.own, also in the other ranks
    return requested


Trust = Annotated[
    bool,
    typer.Option("--trust", callback=_set_trust, help="Run code that another user's job contains."),
]


Checkpoint = Annotated[
    str, typer.Argument(metavar="JOB[@STEP]", help="Checkpoint; default step: the newest.")
]


Job = Annotated[Path, typer.Argument(metavar="JOB", help="Job directory, such as jobs/quickstart.")]


Model = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE", help="JOB, JOB@STEP, an exported folder, hf:FOLDER or hf:ORG/NAME."
    ),
]


MaxNewTokens = Annotated[
    int, typer.Option(min=1, metavar="N", help="Maximum number of tokens of a text or an answer.")
]


Temperature = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="Sampling temperature; 0 takes the most likely token. Default: that of the model's "
        "generation_config.json, with its top_k and top_p, else 0.8.",
    ),
]


TopK = Annotated[
    int | None, typer.Option(min=1, metavar="K", help="Sample from the K most likely tokens.")
]


TopP = Annotated[
    float | None, typer.Option(min=0.0, max=1.0, help="Nucleus sampling: total probability.")
]


Seed = Annotated[int | None, typer.Option(metavar="N", help="Random seed, for reproducible text.")]


Port = Annotated[
    int,
    typer.Option(min=0, max=65535, metavar="N", help="Port of the server; 0 chooses a free one."),
]


Ema = Annotated[bool, typer.Option("--ema", help="Use the averaged weights (train.ema_decay).")]


def resolve(
    config: str | None,
    overrides: list[str] | None,
    options: Mapping[str, object],
    *,
    stage: str | None = None,
) -> RunConfig:
    """Return the configuration, or that of one `stage` of it.

    `options` maps keys to the values of named options, or None.
    """
    from dtt.config import load

    named = {key: value for key, value in options.items() if value is not None}
    return load.resolve(config, overrides or [], named, stage=stage).config


def resolve_each(
    config: str | None,
    overrides: list[str] | None,
    options: Mapping[str, object],
    *,
    stage: str | None = None,
) -> dict[str | None, Resolved]:
    """Return the configurations of all stages by name, or that of one `stage`, as `resolve`.

    Without stages, the name is None. Reads the `model` section of released weights (`init.from`).
    """
    from dtt.config import load
    from dtt.train.find_job import model_of

    given = overrides or []
    named = {key: value for key, value in options.items() if value is not None}
    names = load.stage_names(config, given) if stage is None else ()
    return {
        name: load.resolve(config, given, named, model_of=model_of, stage=name)
        for name in names or (stage,)
    }
