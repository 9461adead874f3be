"""Markers of finished units, and records of the state of their files when they were last hashed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import Field

from dtt.artifacts.manifest import Record, fingerprint
from dtt.artifacts.manifests import LostText, TokenShard, TokensManifest
from dtt.base.errors import DamagedError
from dtt.base.files import write_atomically
from dtt.base.reading import LARGE, read_json, read_small
from dtt.base.safe_names import checked_name
from dtt.data.token_file import bin_path, idx_path, mask_path

WORK = TokensManifest.work
"""Name of the folder for markers and for shards that are being written."""

Facts = dict[str, list[int]]
"""Size in bytes and modification time in ns of files, by name."""


class Identity(Record):
    """Identity of the token files that a folder is for; written before the first unit."""

    key_parts: dict[str, Any]
    """Everything that determines the content of the token files, except for `removed`."""
    tokenizer_sha256: str
    removed: str | None = None
    """Hash of the numbers of all documents that the selection removes; None: it removes none."""

    @property
    def key(self) -> str:
        """Fingerprint of the content, stored in markers, which also have what is removed."""
        return fingerprint([self.key_parts, self.tokenizer_sha256])

    @property
    def folder_key(self) -> str:
        """Fingerprint of the content with what is removed, stored in the manifest."""
        return self.key if self.removed is None else fingerprint([self.key, self.removed])


class UnitMarker(Record):
    """The marker file of a finished unit: its shards and document counts."""

    key: str
    """Fingerprint of corpus, tokenizer and options; with any other key the marker is ignored."""
    removed: str | None = None
    """Hash of the numbers of the documents that the selection removes from the unit; None: it
    removes none."""
    shards: tuple[TokenShard, ...]
    """One per split with at least one document."""
    skipped: int
    """Documents that could not be read."""
    empty: int
    """Documents without any text, which are left out."""
    refused: dict[str, int] = Field(default_factory=dict)
    """Number of rows that are not valid conversations, by reason."""
    unread: dict[str, int] = Field(default_factory=dict)
    """Number of rows by key that dtt does not use."""
    replaced: int = 0
    """Documents in which U+FFFD replaces lone surrogates."""
    nulls: int = 0
    """Number of rows whose tools have keys with null."""
    blank: int = 0
    """Documents that consist of white space only, which are kept."""
    lost_bytes: int = 0
    """Approximate bytes of damaged files that were lost with the skipped documents."""
    lost: LostText | None = None
    """What the tokenizer has no token for; None if it has one for each byte."""
    problems: tuple[str, ...]
    """`file:line: why` of the first documents that were skipped."""


def marker_path(out: Path, unit: int) -> Path:
    """Return the path of the marker of a unit."""
    return out / WORK / f"{unit:05d}.json"


def hashed_files(stem: Path, shard: TokenShard) -> Iterator[tuple[Path, str]]:
    """Yield the files of a shard at `stem`, each with its sha256."""
    yield bin_path(stem), shard.bin_sha256
    yield idx_path(stem), shard.idx_sha256
    if shard.mask_sha256 is not None:
        yield mask_path(stem), shard.mask_sha256


def changed_files(out: Path, stem: Path, shard: TokenShard) -> Iterator[tuple[Path, str]]:
    """Yield the files of a shard that may have changed since they were last hashed.

    Each comes with the sha256 that it must have.
    """
    unit = shard.stem.rpartition("-")[2]
    known = last_hashed(out, int(unit)) if unit.isdecimal() else {}
    for path, sha256 in hashed_files(stem, shard):
        if not facts(out, [path]).items() <= known.items():
            yield path, sha256


def read_marker(out: Path, unit: int, key: str) -> UnitMarker | None:
    """Return the marker of a unit, or None if the unit was not finished for `key`.

    Neither the shards nor what is removed from the unit are checked.
    """
    try:
        marker = UnitMarker.model_validate_json(read_small(marker_path(out, unit), LARGE))
        for shard in marker.shards:
            # A marker is read from a folder that others can write to: its names must stay in it.
            checked_name(shard.stem, marker_path(out, unit))
    except (FileNotFoundError, ValueError, DamagedError):
        return None
    return marker if marker.key == key else None


def write_marker(out: Path, unit: int, place: Path, marker: UnitMarker) -> None:
    """Write the marker of a unit, after its shards have been written to `place` and synced."""
    stems = [(place / shard.stem, shard) for shard in marker.shards]
    files = [path for stem, shard in stems for path, _ in hashed_files(stem, shard)]
    # Before the marker, so that a finished unit is not hashed again.
    remember_hashed(out, unit, facts(out, files))
    write_atomically(marker_path(out, unit), marker.model_dump_json(indent=1) + "\n")


def facts(out: Path, files: Iterable[Path]) -> Facts:
    """Return the current size and modification time of files.

    Files in `out` are keyed by their name, others by their full path, so that `out` can be moved.
    """
    # Both change if a file is replaced, in all but deliberate cases.
    stats = {path.name if path.parent == out else str(path): path.stat() for path in files}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def remember_hashed(out: Path, unit: int, facts: Facts) -> None:
    """Record the sizes and times of a unit's files, whose hashes have just been found correct."""
    path = _seen_path(out, unit)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(facts))  # need not be atomic: a partial file is not valid JSON


def last_hashed(out: Path, unit: int) -> Facts:
    """Return what `remember_hashed` recorded for a unit; empty if the record is missing."""
    with suppress(OSError, ValueError):
        return read_json(_seen_path(out, unit))
    return {}


def _seen_path(out: Path, unit: int) -> Path:
    return out / WORK / f"{unit:05d}.seen"
