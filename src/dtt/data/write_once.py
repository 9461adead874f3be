"""A folder that one process writes, and all others find complete."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import filelock

from dtt.base.files import fsync_file, fsync_folder


def write_once(place: Path, write: Callable[[Path], None]) -> None:
    """Call `write` with a temporary folder, which is renamed to `place`, unless that is there.

    One process of a node writes, while the others wait on a file lock.
    """
    if place.is_dir():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(place.with_name(f"{place.name}.lock")):
        if place.is_dir():  # another process has finished meanwhile
            return
        # On some file systems, locks work within one node only. Each node then writes its own copy,
        # and the first rename wins.
        aside = place.with_name(f".{place.name}.{socket.gethostname()}")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        write(aside)
        # Flushed before the rename, or a power failure could leave a complete name with empty
        # files.
        for path in aside.iterdir():
            fsync_file(path)
        try:
            aside.rename(place)
        except OSError:
            # Another node won. Its content is equal, as it depends on the name alone.
            if not place.is_dir():
                raise
            shutil.rmtree(aside)
        fsync_folder(place.parent)
