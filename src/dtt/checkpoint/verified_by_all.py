"""Verification of the checkpoint to resume from by all ranks, each a part of its files.

A checkpoint of a thousand ranks has thousands of files and terabytes. One rank would hash for an
hour what all of them hash in seconds, and if each rank read the headers of all files, a file server
would have to open a million. Here every file is read by one rank, and ranks exchange the headers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from dtt.artifacts.manifests import CheckpointManifest
from dtt.base.errors import DamagedError
from dtt.checkpoint import store
from dtt.checkpoint.saver import on_all
from dtt.checkpoint.store import Checkpoint, Headers, Verify
from dtt.mesh.dist import World

DOING = "verified a checkpoint"


def find(world: World, choose: Callable[[Verify], Checkpoint | None]) -> Checkpoint | None:
    """Return on all ranks the checkpoint that `choose` returns on rank 0; a collective.

    Rank 0 decides, and all ranks take part in each verification that it calls for. An error of rank
    0 ends it, and the others report it as that of a lost rank.
    """
    if not world.first:
        return _follow(world)
    found = choose(partial(_lead, world))
    world.from_first(_Message(found is not None))
    return found


class _Message(NamedTuple):
    """What rank 0 tells the others."""

    taken: bool
    """True if the last checkpoint that was verified is the one to resume from."""
    path: Path | None = None
    """The next one to verify; None: rank 0 has decided."""
    manifest: CheckpointManifest | None = None


def _lead(world: World, path: Path) -> Checkpoint:
    manifest = store.read_manifest(path)
    world.from_first(_Message(False, path, manifest))
    checkpoint = Checkpoint(path, manifest, _verify(world, path, manifest))
    store.check_readable(checkpoint)
    return checkpoint


def _follow(world: World) -> Checkpoint | None:
    """Verify parts of what rank 0 names until it has decided; return the last one if it took it."""
    last = None
    while True:
        taken, path, manifest = world.from_first(_Message(False))
        if path is None or manifest is None:
            return last if taken else None
        with suppress(DamagedError):  # which rank 0 has as well, and names the next one
            last = Checkpoint(path, manifest, _verify(world, path, manifest))


def _verify(world: World, path: Path, manifest: CheckpointManifest) -> Headers:
    """Verify each file on one rank; return all headers, or raise DamagedError on all ranks."""
    # The largest first, so that each rank has about as many bytes as the others.
    files = sorted(manifest.files, key=lambda file: (-file.bytes, file.path))
    own = files[world.rank :: world.size]
    headers: Headers = {}
    for part in on_all(world, lambda: store.verify_files(path, own), DOING):
        headers |= part
    on_all(world, lambda: store.check_headers(path, headers, world.rank, world.size), DOING)
    return headers
