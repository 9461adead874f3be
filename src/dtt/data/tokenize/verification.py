"""Verification of the units of a token folder: checks which are finished, and hashes their files.

All ranks take part, each with a share of the units. A file whose size and modification time equal
those of its last successful check is not hashed again. These records are stored next to the
markers; losing them costs only time.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from dtt.artifacts.manifests import TokenShard, TokensManifest
from dtt.base.errors import DamagedError, InputError
from dtt.base.files import sha256_file
from dtt.data.token_file import idx_path
from dtt.data.tokenize.markers import (
    Facts,
    Identity,
    facts,
    hashed_files,
    last_hashed,
    marker_path,
    read_marker,
    remember_hashed,
)
from dtt.mesh.comm import Comm

NOT_MADE = "not made yet"
OTHER_MARKER = "its marker is damaged, or its tokenizer is another one"
OTHER_REMOVED = "other documents are removed from it now"


class Fault(NamedTuple):
    """The reason why a unit is not finished."""

    why: str
    intact: bool = False
    """True if the files match the manifest and only the marker is missing."""


def find_faults(
    out: Path,
    identity: Identity,
    removals: Sequence[str | None],
    comm: Comm,
    *,
    remember: bool = True,
) -> dict[int, Fault]:
    """Return the units that are not finished, by index; collective, same on all ranks.

    `removals` has the hash of what is removed from each unit. Files on a node's local disk are
    checked by the ranks of that node. Without `remember`, the results of the checks are not
    recorded, so nothing is written.
    """
    # The name of the node, not of the rank: a local disk is shared by the ranks of a node.
    here = socket.gethostname()
    in_manifest = _by_unit(out, identity.folder_key)
    faults: dict[int, Fault] = {}

    def check(unit: int) -> str | None:
        """Check a unit and record its fault; return the host of its files if it is another node."""
        # A unit whose marker was lost may still be proven complete by the manifest.
        marker = read_marker(out, unit, identity.key)
        if marker is not None and marker.removed != removals[unit]:
            faults[unit] = Fault(OTHER_REMOVED)
            return None
        if marker is None and in_manifest is None:
            there = marker_path(out, unit).exists()
            faults[unit] = Fault(OTHER_MARKER if there else NOT_MADE)
            return None
        shards = (in_manifest or {}).get(unit, []) if marker is None else marker.shards
        # A shard on another node's disk cannot be read here; one of its ranks does it below.
        for shard in shards:
            if _stem(out, shard, here) is None:
                return shard.host
        damage = _damage(out, unit, [(_stem(out, s, here) or out, s) for s in shards], remember)
        if damage is not None:
            faults[unit] = Fault(damage)
        elif marker is None:
            faults[unit] = Fault("its marker is missing", intact=True)
        return None

    # Interleaved, because neighbouring units are often of one size.
    own = range(comm.rank, len(removals), comm.size)
    away = [[unit, host] for unit in own if (host := check(unit)) is not None]
    # All ranks take part in both gathers, also those without units.
    gathered: list[Any] = comm.gather([here, away])
    for unit, host in [found for _, others in gathered for found in others]:
        ranks = [rank for rank, (name, _) in enumerate(gathered) if name == host]
        # One rank of that node, chosen by the unit, so that its ranks share the work.
        if ranks and comm.rank == ranks[unit % len(ranks)]:
            check(unit)
        # Reported once, by rank 0: every rank sees it.
        elif not ranks and comm.rank == 0:
            faults[unit] = Fault(f"on the disk of {host}, which is not part of this run")
    everyone: list[Any] = comm.gather([[unit, *fault] for unit, fault in faults.items()])
    return {unit: Fault(why, intact) for found in everyone for unit, why, intact in sorted(found)}


def sound_manifest(out: Path) -> TokensManifest | None:
    """Return the manifest of `out`; None if it is missing or damaged, as it can be rewritten."""
    try:
        return TokensManifest.read(out)
    except (InputError, DamagedError):
        return None


def _by_unit(out: Path, key: str) -> dict[int, list[TokenShard]] | None:
    """Return the manifest's shards by unit, or None if there is no manifest for `key`."""
    manifest = sound_manifest(out)
    if manifest is None or manifest.key != key:
        return None
    shards: dict[int, list[TokenShard]] = {}
    for shard in manifest.shards:
        number = shard.stem.rpartition("-")[2]
        if not number.isdecimal():
            return None  # not a name that `tokenize` writes
        shards.setdefault(int(number), []).append(shard)
    return shards


def _stem(out: Path, shard: TokenShard, here: str) -> Path | None:
    """Return the path of a shard's files without suffix; None if they are on another node."""
    stem = out / shard.stem
    # The files may have been moved from the local disk into the folder.
    if shard.path is None or idx_path(stem).exists():
        return stem
    return Path(shard.path) if shard.host == here else None


def _damage(
    out: Path, unit: int, shards: list[tuple[Path, TokenShard]], remember: bool
) -> str | None:
    """Return a message about the first bad file of a unit, or None if all files are intact."""
    known = last_hashed(out, unit)
    now: Facts = {}
    for path, sha256 in chain.from_iterable(hashed_files(*shard) for shard in shards):
        try:
            found = facts(out, [path])
            now |= found
            # Size and time first: hashing all files of a large folder takes minutes.
            if not found.items() <= known.items() and sha256_file(path) != sha256:
                return (
                    f"{path} is damaged: its sha256 differs from that of the data that was written"
                )
        except FileNotFoundError:
            return f"{path} is missing"
        except OSError as error:  # such as a failing disk
            return f"{path} cannot be read: {error.strerror}"
    # Only after all files of the unit are intact.
    if remember and now != known:
        remember_hashed(out, unit, now)
    return None
