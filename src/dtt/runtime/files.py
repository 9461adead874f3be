"""Files that cannot tear: written aside, flushed to the disk, then renamed into place."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dtt.errors import DiskFull, EnvironmentUnfit
from dtt.reading import retrying

if TYPE_CHECKING:
    from filelock import BaseFileLock


def sha256_file(path: Path) -> str:
    """sha256 of a file's content, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def forget_cached(path: Path) -> None:
    """Let the next reader of `path` get it from the disk, not from memory, where possible."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


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
    with named(path):
        retrying(lambda: _write_aside(path, content))


def _write_aside(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not the pid: on a shared file system two nodes may have the same.
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with named(path), aside.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    fsync_folder(path.parent)


def write_once(path: Path, content: str) -> None:
    """Write `content` unless somebody already has: of several writers the first one wins.

    The file server decides who that is, not a look that it may answer from memory.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with named(path):
        try:
            write_atomically(aside, content)
            with suppress(FileExistsError):
                retrying(lambda: os.link(aside, path))
        finally:
            aside.unlink(missing_ok=True)
        fsync_folder(path.parent)


def append(path: Path, line: str) -> None:
    """Append a line to a file; a FIFO in its place, which would block us for ever, is removed."""

    def write() -> None:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.unlink()
        with named(path), path.open("a", encoding="utf-8") as file:
            file.write(line)

    retrying(write)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Let an OSError name `path`: the system says nothing of it after the file is open, and else
    the name that the file has until it is complete."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def remove(path: Path) -> None:
    """Delete what stands there, a file or a folder; nothing is fine, too."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def free_space(path: Path) -> int:
    """Return the bytes that are free on the file system of `path`, which need not exist."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def check_space(folder: Path, needed: int, what: str) -> None:
    """DiskFull if the file system of `folder` has less than `needed` bytes free for `what`."""
    free = free_space(folder)
    if free < needed:
        raise DiskFull(
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
    import filelock  # slow, and most ranks lock nothing

    retrying(lambda: folder.mkdir(parents=True, exist_ok=True))
    path = folder / ".lock"
    lock = filelock.FileLock(path)
    holder = _holder(path)  # before the attempt: some versions of filelock truncate the file
    try:
        retrying(lambda: lock.acquire(timeout=patience))
    except filelock.Timeout:
        raise EnvironmentUnfit(
            f"{folder} is in use",
            where=_holder(path) or holder or "another process, which did not say who it is",
            why=f"another process is running {what} there",
            next="wait for it to end, or name another folder",
        ) from None
    try:
        _note_holder(lock, path, _me() + "\n")
        yield
    finally:
        _note_holder(lock, path, "")  # else the next holder could pass for this one
        lock.release()


def _note_holder(lock: BaseFileLock, path: Path, text: str) -> None:
    """Write who holds a lock into its file; where the disk is full the lock holds all the same."""
    from filelock import SoftFileLock

    if not isinstance(lock, SoftFileLock):  # that one writes into the file itself
        with suppress(OSError):
            path.write_text(text)


def _me() -> str:
    """Return how another process may name this one: its id, its node, its Slurm job."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"process {os.getpid()} on {socket.gethostname()}" + (f", Slurm job {job}" * bool(job))


def _holder(path: Path) -> str:
    """Return what the holder of a lock wrote into its file; empty if nothing."""
    try:
        return ", ".join(path.read_text(errors="replace").splitlines())
    except OSError:
        return ""
