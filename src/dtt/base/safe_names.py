"""Checks of file names that come from manifests, which may have been written by someone else."""

from __future__ import annotations

import os
from pathlib import Path

from dtt.base.errors import DamagedError


def checked_name(name: str, where: Path) -> str:
    """Return `name` if it is a relative path that stays in the folder of the manifest `where`.

    A manifest may come from an untrusted source, and its names decide which files are read and
    written. Raises DamagedError for an empty or absolute name, for one with `.` or `..` or an empty
    part, and for one with a non-printable character, which could forge a line of a message.
    """
    parts = name.split("/")
    if not name.isprintable():
        why = f"{name!r} contains a non-printable character"
    elif name.startswith("/"):
        why = f"{name!r} is an absolute path"
    elif not {"", ".", ".."}.isdisjoint(parts):
        why = f"{name!r} is not a plain path below the folder"
    else:
        return name
    raise _unsafe(where, why)


def checked_file(name: str, where: Path) -> Path:
    """Check `name` and return the path of that file in the folder of the manifest `where`.

    Raises DamagedError for an unsafe name (see `checked_name`) and for a symbolic link that leads
    out of the folder. The file need not exist.
    """
    folder = where.parent
    path = folder / checked_name(name, where)
    # Check only the parts of `name`, one lstat each: a folder may hold ten thousand files on a
    # network file system, where every further lstat is a round trip.
    through = [path, *path.parents][: name.count("/") + 1]
    if any(map(os.path.islink, through)):
        target = Path(os.path.realpath(path))  # unlike Path.resolve, raises no error for a loop
        if not target.is_relative_to(os.path.realpath(folder)):
            raise _unsafe(where, f"{name!r} is a link to {target}, outside the folder")
    return path


def _unsafe(where: Path, why: str) -> DamagedError:
    return DamagedError(
        "a manifest names a file outside its folder",
        where=where,
        why=why,
        next="create or fetch the folder again; do not use one from a source you do not trust",
    )
