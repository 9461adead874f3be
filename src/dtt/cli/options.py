"""Options that several commands share, and the resolution of their values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dtt.config.merging import Resolved
    from dtt.config.run import RunConfig


def option(*names_and_help: str, **settings: Any) -> Any:
    """Return an option for Typer: names, unless that of the parameter is meant, and the help."""
    *names, help = names_and_help
    return typer.Option(*names, help=help, **settings)


def argument(metavar: str, help: str, **settings: Any) -> Any:
    """Return an argument for Typer."""
    return typer.Argument(metavar=metavar, help=help, **settings)


Config = Annotated[
    str | None, option("--config", "-c", "Config file, or name of a shipped config (quickstart).")
]


Cluster = Annotated[str | None, option("Cluster profile: name in configs/clusters/, or file.")]


Overrides = Annotated[
    list[str] | None, argument("[KEY=VALUE]…", "Config keys, such as train.steps=500.")
]


Dataset = Annotated[
    str | None,
    option(
        "--dataset",
        "-d",
        "Dataset: name in configs/datasets/, Hugging Face id (org/name), local file or "
        "folder, URL (s3://, gs://, abfs://, https://, hf://), or python-stdlib.",
    ),
]


Stage = Annotated[str | None, option("Stage to use if the configuration defines several.")]


After = Annotated[
    list[str] | None,
    option("Start when this job, chain or Slurm id has succeeded; repeatable.", metavar="JOB"),
]


AllowChange = Annotated[
    list[str] | None, option("On resume, allow this key to change what is trained; repeatable.")
]


Yes = Annotated[bool, option("--yes", "-y", "Do not ask for confirmation.")]


Json = Annotated[bool, option("--json", "Print the result as JSON.")]


def _set_quiet(requested: bool) -> bool:
    if requested:
        os.environ["DTT_QUIET"] = "1"  # read when `command` sets up logging, also in subprocesses
    return requested


Quiet = Annotated[
    bool, option("--quiet", "-q", "Log only warnings and errors.", callback=_set_quiet)
]


def _set_trust(requested: bool) -> bool:
    if requested:
        os.environ["DTT_TRUST"] = "1"  # read by dtt.config.own, also in the other ranks
    return requested


Trust = Annotated[
    bool, option("--trust", "Run code that another user's job contains.", callback=_set_trust)
]


Checkpoint = Annotated[str, argument("JOB[@STEP]", "Checkpoint; default step: the newest.")]


Job = Annotated[Path, argument("JOB", "Job directory, such as jobs/quickstart.")]


Model = Annotated[
    str, argument("SOURCE", "JOB, JOB@STEP, an exported folder, hf:FOLDER or hf:ORG/NAME.")
]


MaxNewTokens = Annotated[
    int, option("Maximum number of tokens of a text or an answer.", min=1, metavar="N")
]


Temperature = Annotated[
    float | None,
    option(
        "Sampling temperature; 0 takes the most likely token. Default: that of the model's "
        "generation_config.json, with its top_k and top_p, else 0.8.",
        min=0.0,
    ),
]


TopK = Annotated[int | None, option("Sample from the K most likely tokens.", min=1, metavar="K")]


TopP = Annotated[float | None, option("Nucleus sampling: total probability.", min=0.0, max=1.0)]


Seed = Annotated[int | None, option("Random seed, for reproducible text.", metavar="N")]


Port = Annotated[
    int, option("Port of the server; 0 chooses a free one.", min=0, max=65535, metavar="N")
]


Ema = Annotated[bool, option("--ema", "Use the averaged weights (train.ema_decay).")]


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
