"""What says that a unit is finished: its marker, and beside it what is known of its files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dtt.artifacts import Record, TokenShard, TokensManifest, checked_name
from dtt.data.tokenfile import bin_path, idx_path
from dtt.errors import DamagedError
from dtt.runtime.files import write_atomically

WORK = TokensManifest.work
"""Folder of markers and of shards that are being written."""

Facts = dict[str, list[int]]
"""Size and time of last change of files, by name."""


class UnitMarker(Record):
    """Says that a unit is finished, and what it gave."""

    key: str
    """Of corpus, tokenizer and options: the marker is worth nothing to any other."""
    shards: tuple[TokenShard, ...]
    """One per split that got a document."""
    skipped: int
    empty: int
    blank: int = 0
    """Documents of nothing but white space."""
    lost_bytes: int = 0
    """About how much of damaged files went with what was skipped."""
    problems: tuple[str, ...]
    """`file:line: why` of the first documents that were skipped."""


def marker_path(out: Path, unit: int) -> Path:
    """Where the marker of a unit lies."""
    return out / WORK / f"{unit:05d}.json"


def read_marker(out: Path, unit: int, key: str) -> UnitMarker | None:
    """What a unit gave, if it was finished for `key`; its shards are not looked at."""
    try:
        marker = UnitMarker.model_validate_json(marker_path(out, unit).read_bytes())
        for shard in marker.shards:
            checked_name(shard.stem, marker_path(out, unit))
    except (FileNotFoundError, ValidationError, DamagedError):
        return None
    return marker if marker.key == key else None


def write_marker(out: Path, unit: int, place: Path, marker: UnitMarker) -> None:
    """Finish a unit whose shards are on the disk, in `place`."""
    stems = [place / shard.stem for shard in marker.shards]
    files = [path for stem in stems for path in (bin_path(stem), idx_path(stem))]
    remember_hashed(out, unit, facts(out, files))
    write_atomically(marker_path(out, unit), marker.model_dump_json(indent=1) + "\n")


def facts(out: Path, files: Iterable[Path]) -> Facts:
    """How the files are now; those in `out` by their name alone, so that it can be moved."""
    stats = {path.name if path.parent == out else str(path): path.stat() for path in files}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def remember_hashed(out: Path, unit: int, facts: Facts) -> None:
    """Note how the files of a unit were when their hashes were right."""
    path = _seen_path(out, unit)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(facts))  # half written, it is no JSON and worth nothing


def last_hashed(out: Path, unit: int) -> Facts:
    """What was noted; nothing if that is lost."""
    noted: Any = None
    with suppress(OSError, ValueError):
        noted = json.loads(_seen_path(out, unit).read_bytes())
    return noted if isinstance(noted, dict) else {}


def _seen_path(out: Path, unit: int) -> Path:
    return out / WORK / f"{unit:05d}.seen"
