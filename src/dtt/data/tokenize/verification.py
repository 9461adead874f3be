"""Verification of the units of a token folder: finds those to encode, by the hashes of their files.

All ranks take part, each with a share of the units. A file whose size and modification time equal
those of its last successful check, which the marker records, is not hashed again.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtt.artifacts.manifests import TokenShard, TokensManifest
from dtt.base.errors import DamagedError, InputError
from dtt.base.files import sha256_file
from dtt.data.token_file import idx_path
from dtt.data.tokenize.markers import (
    FileStates,
    UnitMarker,
    hashed_files,
    marker_path,
    read_marker,
    states,
    unit_stems,
    write_marker,
)
from dtt.mesh.comm import Comm

NOT_MADE = "not made yet"
OTHER_MARKER = "its marker is damaged, or its tokenizer is another one"
LOST_MARKER = "its marker is missing"
"""The manifest still proves that the files are intact; only the counts of documents are lost."""


def find_pending(
    out: Path,
    key: str,
    manifest: TokensManifest | None,
    units: int,
    comm: Comm,
) -> dict[int, str]:
    """Return why units are not finished, by their index; collective, same on all ranks.

    `key` is that of the markers; `manifest` is one for this content. Files on a node's local disk
    are checked by the ranks of that node.
    """
    # The name of the node, not of the rank: a local disk is shared by the ranks of a node.
    here = socket.gethostname()
    in_manifest = {} if manifest is None else {shard.stem: shard for shard in manifest.shards}
    pending: dict[int, str] = {}

    def check(unit: int) -> str | None:
        """Check a unit; return the host of its files if it is another node."""
        # A unit whose marker was lost may still be proven complete by the manifest.
        marker = read_marker(out, unit, key)
        if marker is None and manifest is None:
            pending[unit] = OTHER_MARKER if marker_path(out, unit).exists() else NOT_MADE
            return None
        named = [in_manifest[stem] for stem in unit_stems(unit) if stem in in_manifest]
        shards = named if marker is None else marker.shards
        # A shard on another node's disk cannot be read here; one of its ranks does it below.
        for shard in shards:
            if _stem(out, shard, here) is None:
                return shard.host
        stems = [(_stem(out, shard, here) or out, shard) for shard in shards]
        damage = _damage(out, unit, stems, marker)
        if damage is not None or marker is None:
            pending[unit] = damage or LOST_MARKER
        return None

    # Interleaved, because neighbouring units are often of one size.
    own = range(comm.rank, units, comm.size)
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
            pending[unit] = f"on the disk of {host}, which is not part of this run"
    everyone: list[Any] = comm.gather(sorted(pending.items()))
    return {unit: why for found in everyone for unit, why in found}


def sound_manifest(out: Path) -> TokensManifest | None:
    """Return the manifest of `out`; None if it is missing or damaged, as it can be rewritten."""
    try:
        return TokensManifest.read(out)
    except (InputError, DamagedError):
        return None


def _stem(out: Path, shard: TokenShard, here: str) -> Path | None:
    """Return the path of a shard's files without suffix; None if they are on another node."""
    stem = out / shard.stem
    # The files may have been moved from the local disk into the folder.
    if shard.path is None or idx_path(stem).exists():
        return stem
    return Path(shard.path) if shard.host == here else None


def _damage(
    out: Path,
    unit: int,
    stems: Sequence[tuple[Path, TokenShard]],
    marker: UnitMarker | None,
) -> str | None:
    """Return a message about the first bad file of a unit, or None if all files are intact."""
    known = {} if marker is None else marker.files
    now: FileStates = {}
    for path, sha256 in [file for stem in stems for file in hashed_files(*stem)]:
        try:
            found = states(out, [path])
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
    if marker is not None and now != known:
        write_marker(out, unit, marker, now)
    return None
