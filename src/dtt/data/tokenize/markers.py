"""Markers of finished units of work, which also record the state of their files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import Field

from dtt.artifacts.manifest import Record
from dtt.artifacts.manifests import LostText, TokenShard, TokensManifest
from dtt.base.errors import DamagedError
from dtt.base.files import write_atomically
from dtt.base.reading import LARGE, read_json, read_small
from dtt.base.safe_names import checked_name
from dtt.data.token_file import bin_path, idx_path, mask_path

WORK = TokensManifest.work
"""Name of the folder for markers and for shards that are being written."""

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")

FileStates = dict[str, tuple[int, int]]
"""Size in bytes and modification time in ns of files, by name."""


class UnitMarker(Record):
    """The marker file of a finished unit: its shards and document counts."""

    key: str
    """Fingerprint of corpus, tokenizer and options; with any other key the marker is ignored."""
    removed: None = None
    """Part of the key now. Earlier versions wrote it: null, unless documents were removed."""
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
    files: FileStates = Field(default_factory=dict)
    """The files when their hashes were last correct; {} in markers of earlier versions."""


def marker_path(out: Path, unit: int) -> Path:
    """Return the path of the marker of a unit."""
    return out / WORK / f"{unit:05d}.json"


def unit_stems(unit: int) -> list[str]:
    """Return the names of the shards that a unit may have, without suffix."""
    return [f"{split}-{unit:05d}" for split in SPLITS]


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
    known: object = {}
    if unit.isdecimal():
        with suppress(OSError, ValueError):
            # Not validated as a marker: this runs for every shard that training opens.
            known = read_json(marker_path(out, int(unit)), LARGE).get("files")
    for path, sha256 in hashed_files(stem, shard):
        ((name, state),) = states(out, [path]).items()
        if not isinstance(known, dict) or known.get(name) != [*state]:
            yield path, sha256


def read_marker(out: Path, unit: int, key: str) -> UnitMarker | None:
    """Return the marker of a unit, or None if the unit was not finished for `key`.

    The shards are not checked.
    """
    try:
        marker = UnitMarker.model_validate_json(read_small(marker_path(out, unit), LARGE))
        for shard in marker.shards:
            # A marker is read from a folder that others can write to: its names must stay in it.
            checked_name(shard.stem, marker_path(out, unit))
    except (FileNotFoundError, ValueError, DamagedError):
        return None
    return marker if marker.key == key else None


def write_marker(out: Path, unit: int, marker: UnitMarker, files: FileStates) -> None:
    """Write the marker of a unit, whose files are on disk in these states."""
    # In the marker, not in a file beside it: a folder with 100,000 units has enough files.
    content = marker.model_copy(update={"files": files}).model_dump_json(indent=1)
    write_atomically(marker_path(out, unit), content + "\n")


def states(out: Path, files: Iterable[Path]) -> FileStates:
    """Return the current size and modification time of files.

    Files in `out` are keyed by their name, others by their full path, so that `out` can be moved.
    """
    # Both change if a file is replaced, in all but deliberate cases.
    stats = {path.name if path.parent == out else str(path): path.stat() for path in files}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}
