"""Files of configurations: those that are shipped with dtt, and what `-c` names."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from dtt.base.errors import ConfigError, InputError
from dtt.config import source


def shipped_configs() -> Path:
    """Return the folder of the configs shipped with dtt: in the wheel, or in the clone."""
    inside = Path(__file__).parents[1] / "configs"
    return inside if inside.is_dir() else Path(__file__).parents[3] / "configs"


def shipped_file(name: str | Path, kind: str = "") -> Path | None:
    """Return the shipped file of a name in the folder `kind` of the configs; None if there is none.

    A path that leads out of the folder, such as an absolute one, is no name.
    """
    path = shipped_configs() / kind / name
    outside = Path(name).is_absolute() or ".." in Path(name).parts
    # Path.is_file raises OSError for text that is too long for a path.
    return None if outside or not os.path.isfile(path) else path  # noqa: PTH113


def is_job(folder: Path) -> bool:
    """Return True if `folder` is that of a job."""
    return (folder / "config.yaml").is_file()


def find(config: str | Path) -> Path:
    """Return the file of a `-c` argument: a path, or a shipped config by name (`quickstart`)."""
    path = Path(config)
    if path.is_file():
        return path
    folder = shipped_configs()
    if shipped := shipped_file(path) or shipped_file(f"{path}.yaml"):
        return shipped
    if is_job(path):
        raise ConfigError(f"{path} is a job, not a config", next=f"dtt train {path} resumes it")
    if path.is_dir():
        inside = sorted(str(p) for p in path.glob("*") if p.suffix in source.SUFFIXES)
        raise ConfigError(
            f"{path} is a folder, not a config",
            next=f"-c {inside[0]}" if inside else f"-c takes a file; {path} contains no .yaml file",
        )
    found = (p.relative_to(folder).with_suffix("") for p in folder.rglob("*.yaml"))
    names = sorted(str(p) for p in found if p.parent.name not in ("sweeps", "tasks"))
    beside = [str(p) for p in path.parent.glob("*") if p.suffix in source.SUFFIXES]
    close = difflib.get_close_matches(str(path), beside, n=3)
    close += difflib.get_close_matches(str(path.with_suffix("")), names, n=3)
    raise InputError(
        f"no config {str(config)!r}",
        where=path.absolute(),
        why="it is neither a file nor a shipped config",
        next=f"did you mean {' or '.join(close)}?"
        if close
        else f"specify a file, or the name of a shipped config: {', '.join(names)}",
    )
