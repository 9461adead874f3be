"""Disk check of a folder: write, fsync, rename and read back a file, and measure the speed."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from dtt.base.errors import EnvironmentUnfit
from dtt.base.files import forget_cached, fsync_folder, sha256_file
from dtt.mesh.process import REMEDIES

if TYPE_CHECKING:
    from dtt.mesh.dist import World

BLOCK, BLOCKS = 2**20, 64
"""Block size in bytes, and number of blocks."""


@dataclass(frozen=True)
class Disk:
    """The file system of a folder, and its measured speed with 64 MiB."""

    path: str
    """The folder, or its nearest existing parent."""
    kind: str
    """Type of the file system, such as `ext4`; `unknown` if the system does not report it."""
    free: int
    """Free bytes."""
    write_mb_s: float
    """Write speed in MB/s (10^6 bytes), fsync included."""
    read_mb_s: float
    """Read speed in MB/s, without the page cache where it can be dropped."""
    fsync_ms: float
    """Milliseconds for a rename and an fsync of the folder."""


def examine(folder: Path) -> Disk:
    """Perform the file operations of a checkpoint in `folder`, and measure them.

    Raises EnvironmentUnfit, which names the step that failed, and why.
    """
    place = _existing(folder)
    kind = _kind(place)
    aside = place / f".dtt-doctor-{secrets.token_hex(4)}.tmp"
    final = aside.with_suffix("")
    # Random, since some file systems compress zeros, and numbered, since some store a block once.
    block, digest = os.urandom(BLOCK), hashlib.sha256()
    try:
        with _step("write", place), aside.open("wb") as file:
            started = time.perf_counter()
            for number in range(BLOCKS):
                numbered = number.to_bytes(8, "little") + block[8:]
                digest.update(numbered)
                file.write(numbered)
            file.flush()
            with _step("fsync", place):
                os.fsync(file.fileno())
        written = time.perf_counter()
        with _step("rename", place):
            aside.replace(final)
            fsync_folder(place)
        renamed = time.perf_counter()
        with _step("read back", place):
            forget_cached(final)
            reading = time.perf_counter()
            same = sha256_file(final) == digest.hexdigest()
        read = time.perf_counter()
    finally:
        for path in (aside, final):
            with suppress(OSError):
                path.unlink()
    if not same:
        raise EnvironmentUnfit(
            "a file reads back differently from what was written",
            where=_where(place),
            next="use a folder on another disk, and report this one to its administrator",
        )
    megabytes = BLOCK * BLOCKS / 1e6
    return Disk(
        path=str(place),
        kind=kind,
        free=shutil.disk_usage(place).free,
        write_mb_s=megabytes / (written - started),
        read_mb_s=megabytes / (read - reading),
        fsync_ms=1e3 * (renamed - written),
    )


def check_shared(world: World, folder: Path) -> None:
    """Raise EnvironmentUnfit if this rank does not see a file that rank 0 creates in `folder`.

    All ranks call it together.
    """
    place = _existing(folder)
    created = place / world.from_first(f".dtt-doctor-{secrets.token_hex(4)}")
    if world.first:
        with suppress(OSError):  # `examine` has reported it
            created.touch()
    # If rank 0 could not create it, that is its problem alone: the others must not report it, too.
    # They look only now: a client of NFS that looks too early remembers for a minute what lacked.
    expected = world.from_first(world.first and _exists(created))
    seen = _exists(created)
    world.barrier()  # without it, rank 0 might delete the file before another rank looks
    if expected and world.first:
        created.unlink()
    if expected and not seen:
        raise EnvironmentUnfit(
            f"rank {world.rank} does not see the files of rank 0",
            where=_where(place),
            next="use a folder on a disk that all nodes share",
        )


@contextmanager
def _step(what: str, place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise EnvironmentUnfit(
            f"the file system does not allow us to {what} a file",
            where=_where(place),
            why=reason[:1].lower() + reason[1:],
            next=REMEDIES.get(error.errno or 0, "use a folder on another disk"),
        ) from None


def _where(place: Path) -> str:
    return f"{place} on node {socket.gethostname()}"


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if _exists(path) and path.is_dir())


def _exists(path: Path) -> bool:
    """Return True if `path` exists; False also without permission to see it."""
    try:
        return path.exists()
    except PermissionError:
        return False


def _kind(place: Path) -> str:
    """Return the type of the file system that `place` is on."""
    # all=True: psutil otherwise leaves out network file systems and tmpfs.
    mounted = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    real = place.resolve()
    return next((mounted[str(p)] for p in (real, *real.parents) if str(p) in mounted), "unknown")
