"""Resolution of a job's relative paths, which start from the folder that contains `jobs/`.

They do not depend on the folder in which dtt is run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from dtt.base.log import log
from dtt.config import explain
from dtt.config.evaluation import EvalConfig
from dtt.config.load import load_job


def home(job: Path) -> Path:
    """Return the folder that relative paths in the configuration of `job` start from.

    It contains `jobs/`, because dtt was run there when the job was created. Returns `Path()` if
    that is the current folder, and for a job that was moved away from its data, whose folder cannot
    be found.
    """
    cfg = load_job(job)
    named = cfg.job_dir.parts
    candidates = [
        Path(*path.parts[: -len(named)])
        # First the path as given, without following links, then the resolved one.
        for path in (Path(os.path.abspath(job)), job.resolve())  # noqa: PTH100
        if path.parts[-len(named) :] == named
    ]
    at_home = cfg.job_dir.exists() and cfg.job_dir.samefile(job)
    candidates.insert(0 if at_home else len(candidates), Path())
    for folder in candidates:
        paths = [folder / path for path in cfg.data.input_paths(cfg)]
        if all(path.exists() or path.with_name(f"{path.name}.idx").exists() for path in paths):
            return folder
    return candidates[0]


def enter(job: Path, arguments: Sequence[str] = ()) -> tuple[Path, list[str]]:
    """Change to the home of `job`; return its path and `key=value` arguments as seen from it.

    The job's relative paths are then valid without being rewritten: its configuration must not
    change, because checkpoints record its hash. Paths among the arguments are relative to the
    previous working directory, so they are made absolute. Nothing changes if `job` is not a job
    directory or if its home is the current folder.
    """
    folder = home(job) if (job / "config.yaml").is_file() else Path()
    if folder in (Path(), Path.cwd()):
        return job, list(arguments)
    here = Path.cwd()
    cleaned = Path(os.path.abspath(job))  # noqa: PTH100  # drops `..`, which is wrong after a link
    path = cleaned if cleaned.exists() and cleaned.samefile(job) else here / job
    log.info("relative paths of %s start from %s", job, folder)
    os.chdir(folder)
    absolute = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        named = key in _path_keys() and value not in ("", "null", "~")
        absolute.append(f"{key}={here / value}" if named else argument)
    return path, absolute


def evaluation(job: Path) -> EvalConfig:
    """Return the section `eval` of a job, with paths as seen from the current folder."""
    cfg, start = load_job(job).eval, home(job)

    def path(task: str) -> str:
        return str(start / task) if Path(task).suffix in (".yaml", ".yml") else task

    files = {"data": start / cfg.data, "tasks": tuple(map(path, cfg.tasks))}
    return cfg.model_copy(update=files)


@cache
def _path_keys() -> frozenset[str]:
    return frozenset(
        ".".join(key)
        for key, cls, name in explain.all_fields()
        if "path" in explain.type_in_words(cls.model_fields[name]).split(" | ")
    )
