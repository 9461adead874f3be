"""`dtt eval`: evaluate a model, or compare two."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ConfigError
from dtt.base.ranks import Ranks
from dtt.checkpoint import store
from dtt.config.load import load_job, resolve
from dtt.evaluate.evaluation import evaluate
from dtt.hf.model_source import find_folder
from dtt.jobs import job_state


def run(arguments: Sequence[str], **options: Any) -> None:
    """Evaluate a model, or compare the results of two: `compare A B`; see `evaluate`."""
    match arguments:
        case ["compare", one, other]:
            from dtt.evaluate import compare

            compare.run(one, other, **options)
        case [source] if source != "compare":
            evaluate(source, **options)
        case _:
            first, *rest = arguments or ["SOURCE"]
            folders = [Path(name.partition("@")[0]).is_dir() for name in rest]
            several = first == "compare" or any(folders)
            raise ConfigError(
                "dtt eval takes one model, or `compare` and two",
                why=f"got {' '.join(arguments)}",
                next="dtt eval SOURCE, or dtt eval compare JOB[@STEP] JOB[@STEP]"
                if several
                else f"dtt eval {first} --tasks {','.join(rest)}",  # --tasks was forgotten
            )


def with_keys(arguments: Sequence[str], tasks: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split arguments into models and `eval.KEY=VALUE`; return the models, and the values by key.

    The values include `tasks`, if there are any. Raises ConfigError for keys of other sections,
    which do not affect an evaluation, and for tasks that are given twice.
    """
    given = [one for one in arguments if re.match(r"[a-z_.]+=", one) and not Path(one).exists()]
    sources = [one for one in arguments if one not in given]
    options: dict[str, Any] = {"tasks": tasks} if tasks else {}
    section = resolve(None, given).config.eval
    for key in dict.fromkeys(one.partition("=")[0] for one in given):
        name = key.removeprefix("eval.")
        if name == key or name == "every":
            raise ConfigError(f"dtt eval does not read {key}", next="dtt config explain eval")
        if name in options:
            raise ConfigError(f"--{name} and {key} are both given")
        options[name] = getattr(section, name)
    return sources, options


def watched_jobs(arguments: Sequence[str], ranks: Ranks, step: str | None) -> list[JobDir]:
    """Return the job to watch, or the stages with tasks.

    Raises ConfigError for arguments that make no sense with --watch.
    """
    stages = job_state.stages(Path(arguments[0])) if len(arguments) == 1 else []
    one = bool(stages) or (len(arguments) == 1 and find_folder(arguments[0]) is None)
    checkpoints, at = store.parse(arguments[0]) if one else (Path(), None)
    if not one or at is not None or step is not None:
        raise ConfigError(
            "--watch takes one job, without a step",
            why=f"it evaluates all checkpoints (got {' '.join(arguments)}"
            + (")" if step is None else f" --step {step})"),
            next=f"dtt eval {checkpoints.parent if one else 'jobs/run'} --watch",
        )
    if ranks.size > 1:
        raise ConfigError(
            f"--watch runs in one process, not in {ranks.size}",
            next="start it without torchrun; torchrun … dtt eval JOB --step all uses several GPUs",
        )
    asked = [stage for stage in stages if load_job(stage.root).eval.tasks]
    return asked or stages[-1:] or [JobDir(checkpoints.parent)]
