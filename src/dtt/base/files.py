"""Atomic file writes (temporary file, fsync, rename), locks, and disk space."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from dtt.base.errors import DiskFull, InUse
from dtt.base.log import log
from dtt.base.reading import retrying

if TYPE_CHECKING:
    from filelock import BaseFileLock


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file's content in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def has_sha256(path: Path, sha256: str) -> bool:
    """Return True if the file exists and its content has this sha256."""
    return path.is_file() and sha256_file(path) == sha256


def forget_cached(path: Path) -> None:
    """Drop `path` from the page cache if possible, so that the next read comes from the disk."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fsync_file(path: Path) -> None:
    """Wait until the content of `path` has reached the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def fsync_folder(path: Path) -> None:
    """Wait until the directory entries of `path` have reached the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `content` atomically: after a crash, `path` holds either the old or the new content."""

    def write() -> None:
        with replacing(path) as file:
            file.write(content.encode() if isinstance(content, str) else content)

    with named(path):
        retrying(write)


@contextmanager
def replacing(path: Path, *, synced: bool = True) -> Iterator[BinaryIO]:
    """Yield a file that takes the place of `path` if the body raises nothing.

    With `synced`, a power failure leaves the old or the new content. Without, it may leave any:
    for files whose content is verified before it is used.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Random, not the pid: on a shared file system two nodes may have the same pid.
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with named(path), aside.open("wb") as file:
            yield file
            if synced:
                file.flush()
                os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    if synced:
        fsync_folder(path.parent)


def append(path: Path, line: str) -> None:
    """Append a line to a file; replace a FIFO or device at `path`, which would block forever."""

    def write() -> None:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.unlink()
        with named(path), path.open("a", encoding="utf-8") as file:
            file.write(line)

    retrying(write)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Set the file name of an OSError that is raised inside to `path`.

    The system does not report a name once the file is open, or reports that of the temporary file.
    """
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        if error.filename2 is not None:
            del error.filename2  # None would be printed: 'path' -> None
        raise


def remove(path: Path) -> None:
    """Delete a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def in_size(size: float) -> str:
    """Return a number of bytes in words, with three digits: `1.40 GB`, `12.3 MB`, `0.012 MB`."""
    if size >= 1e9:
        return f"{size / 1e9:,.2f} GB"
    return f"{size / 1e6:.1f} MB" if size >= 1e6 or size == 0 else f"{size / 1e6:.3f} MB"


def free_space(path: Path) -> int:
    """Return the free bytes on the file system of `path`, which need not exist."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def check_space(folder: Path, needed: int, what: str) -> None:
    """Raise DiskFull unless the file system of `folder` has `needed` bytes free for `what`."""
    free = free_space(folder)
    if free < needed:
        raise DiskFull(
            f"not enough disk space for {what}",
            where=folder,
            why=f"{in_size(needed)} needed, {in_size(free)} free",
            next="free some space, or use a folder on another disk",
        )


def patience_of_step() -> float:
    """Return how many seconds a step on data waits for the folder that another process uses.

    Without end in a batch job of Slurm: two chains that share a corpus meet in it, and the one that
    comes second finds the work done. A refusal would end it, as nobody is there to try again. At a
    terminal and elsewhere it does not wait: a person reads the message.
    """
    return float("inf") if "SLURM_JOB_ID" in os.environ and not sys.stderr.isatty() else 0.0


@contextmanager
def exclusive(
    folder: Path, what: str, patience: float = 0.0, *, name: str = ".lock"
) -> Iterator[None]:
    """Lock `folder` for this process; raise InUse if another process holds it.

    Waits up to `patience` seconds for a predecessor that is about to end. `name` is that of the
    lock file: under another name, only one file in the folder is locked, or one watch of it.
    """
    import filelock  # slow import, and most ranks lock nothing

    retrying(lambda: folder.mkdir(parents=True, exist_ok=True))
    path = folder / name
    lock = filelock.FileLock(path)
    holder = _holder(path)  # read first: some versions of filelock truncate the file
    try:
        try:
            retrying(lambda: lock.acquire(timeout=0))
        except filelock.Timeout:
            if patience == 0:
                raise
            log.info("waiting for %s, which %s is using", folder, holder or "another process")
            retrying(lambda: lock.acquire(timeout=patience))
    except filelock.Timeout:
        raise InUse(
            f"{folder} is in use",
            where=_holder(path) or holder or "another process, which did not record its name",
            why=f"another process is running {what} there",
            next="wait for it to end, or specify another folder",
        ) from None
    try:
        _note_holder(lock, path, _me() + "\n")
        yield
    finally:
        _note_holder(lock, path, "")  # otherwise the next holder might be taken for this one
        lock.release()


def _note_holder(lock: BaseFileLock, path: Path, text: str) -> None:
    """Write the holder of a lock into its file; errors do not matter, as the lock holds anyway."""
    from filelock import SoftFileLock

    if not isinstance(lock, SoftFileLock):  # SoftFileLock writes into the file itself
        with suppress(OSError):
            path.write_text(text)


def _me() -> str:
    """Return a description of this process: its id, its node, its Slurm job."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"process {os.getpid()} on {socket.gethostname()}" + (f", Slurm job {job}" * bool(job))


def _holder(path: Path) -> str:
    """Return the description of a lock's holder; empty if there is none."""
    try:
        return ", ".join(path.read_text(errors="replace").splitlines())
    except OSError:
        return ""
