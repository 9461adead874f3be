"""Files that cannot tear: written aside, flushed to the disk, then renamed into place."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from dtt.errors import EnvironmentUnfit, StorageError


def sha256_file(path: Path) -> str:
    """sha256 of a file's content, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_file(path: Path) -> None:
    """Return when the content of `path` has reached the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def fsync_folder(path: Path) -> None:
    """Return when the names in `path` have reached the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `content` so that `path` holds, after any crash, either the old or the new whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not the pid: on a shared file system two nodes may have the same.
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with aside.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    fsync_folder(path.parent)


def check_space(folder: Path, needed: int, what: str) -> None:
    """StorageError if the file system of `folder` has less than `needed` bytes free for `what`."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise StorageError(
            f"not enough disk space for {what}",
            where=folder,
            why=f"{needed / 1e9:.2f} GB needed, {free / 1e9:.2f} GB free",
            next="free some space, or name a folder on another disk",
        )


@contextmanager
def exclusive(folder: Path, what: str, patience: float = 0.0) -> Iterator[None]:
    """Hold `folder` for this process; EnvironmentUnfit when another one already does.

    Waits up to `patience` seconds for a predecessor that is just stopping.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=patience)
    except filelock.Timeout:
        raise EnvironmentUnfit(
            f"{folder} is in use",
            why=f"another process is running {what} there",
            next="wait for it to end, or name another folder",
        ) from None
    try:
        yield
    finally:
        lock.release()
