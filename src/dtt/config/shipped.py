"""Files of configurations: those that are shipped with dtt, and what `-c` names."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from dtt.base.errors import ConfigError, InputError
from dtt.config.layers import SUFFIXES


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


def find(name: str | Path, kind: str = "") -> Path:
    """Return the file of a configuration, or of a sweep if that is the `kind`.

    `name` is a path, or that of a shipped file, such as `quickstart`.
    """
    path, what = Path(name), "sweep" if kind else "config"
    for one in (path, shipped_file(path, kind), shipped_file(f"{path}.yaml", kind)):
        if one is not None and one.is_file():
            return one
    if is_job(path):
        raise ConfigError(f"{path} is a job, not a {what}", next=f"dtt train {path} resumes it")
    if path.is_dir():
        inside = sorted(str(p) for p in path.glob("*") if p.suffix in SUFFIXES)
        example = f"-c {inside[0]}" if inside and not kind else "specify a file"
        raise ConfigError(f"{path} is a folder, not a {what}", next=example)
    folder = shipped_configs() / kind
    found = (p.relative_to(folder).with_suffix("") for p in folder.rglob("*.yaml"))
    names = sorted(str(p) for p in found if p.parent.name not in ("sweeps", "tasks"))
    beside = [p for p in sorted(path.parent.glob("*")) if p.suffix in SUFFIXES]
    close = [str(p) for p in beside if p.stem == path.stem]
    close += difflib.get_close_matches(str(path), map(str, beside), n=3)
    close += difflib.get_close_matches(str(path.with_suffix("")), names, n=3)
    raise InputError(
        f"no {what} {str(name)!r}",
        where=path.absolute(),
        why=f"it is neither a file nor a shipped {what}",
        next=f"did you mean {' or '.join(dict.fromkeys(close))}?"
        if close
        else f"specify a file, or the name of a shipped {what}: {', '.join(names)}",
    )
