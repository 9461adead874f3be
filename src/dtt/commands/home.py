"""Relative paths of a job start from the folder that holds `jobs/`, wherever dtt is run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from dtt.config import explain
from dtt.config.load import load_job
from dtt.config.run import RunConfig
from dtt.runtime.log import log


def home(job: Path) -> Path:
    """Return the folder that relative paths in the configuration of `job` start from.

    It holds `jobs/`: dtt was run there when the job was made. `Path()` if that is the current
    folder, and for a job that was moved away from its data, as nothing else is known of it.
    """
    cfg = load_job(job)
    named = cfg.job_dir.parts
    candidates = [
        Path(*path.parts[: -len(named)])
        # By the name it has, links kept, then by the place where it is.
        for path in (Path(os.path.abspath(job)), job.resolve())  # noqa: PTH100
        if path.parts[-len(named) :] == named
    ]
    at_home = cfg.job_dir.exists() and cfg.job_dir.samefile(job)
    candidates.insert(0 if at_home else len(candidates), Path())
    return next((folder for folder in candidates if _has_data(folder, cfg)), candidates[0])


def enter(job: Path, arguments: Sequence[str] = ()) -> tuple[Path, list[str]]:
    """Change to the home of `job`; return its path and `key=value` arguments as seen from there.

    So a job's own relative paths mean there what they always meant, and none has to be rewritten:
    its configuration, which checkpoints hold a hash of, stays as it is. Paths among the arguments
    were given relative to the folder left. Nothing changes if `job` is none, or is at home here.
    """
    folder = home(job) if (job / "config.yaml").is_file() else Path()
    if folder in (Path(), Path.cwd()):
        return job, list(arguments)
    here = Path.cwd()
    tidy = Path(os.path.abspath(job))  # noqa: PTH100  # without `..`, unless a link is in the way
    path = tidy if tidy.exists() and tidy.samefile(job) else here / job
    log.info("relative paths of %s start from %s", job, folder)
    os.chdir(folder)
    return path, [_seen_from(here, argument) for argument in arguments]


def _has_data(folder: Path, cfg: RunConfig) -> bool:
    paths = [folder / path for path in cfg.token_paths or (cfg.corpus_dir,)]
    return all(path.exists() or path.with_name(f"{path.name}.idx").exists() for path in paths)


def _seen_from(here: Path, argument: str) -> str:
    key, _, value = argument.partition("=")
    if key not in _path_keys() or value in ("", "null", "~"):
        return argument
    return f"{key}={here / value}"


@cache
def _path_keys() -> frozenset[str]:
    found = ((key, explain.describe(cls, name, None)) for key, cls, name in explain.all_fields())
    return frozenset(".".join(key) for key, knob in found if "path" in knob.type.split(" | "))
