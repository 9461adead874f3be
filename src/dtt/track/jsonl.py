"""metrics.jsonl: the record of a job, one JSON object a line; everything else derives from it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from dtt.runtime.files import write_atomically
from dtt.track.base import Record


class JsonlTracker:
    """Appends records; `flush` makes them durable."""

    def __init__(self, path: Path, resume_step: int | None) -> None:
        """Open `path`; drop records after `resume_step` (None: all), which will be made again."""
        kept = [r for r in read(path) if resume_step is not None and r["step"] <= resume_step]
        write_atomically(path, "".join(_line(record) for record in kept))
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def log(self, record: Record) -> None:
        """Append one line."""
        self._file.write(_line(record))

    def flush(self) -> None:
        """Return when every record so far is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush and close."""
        self.flush()
        self._file.close()


def _line(record: Record) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def read(path: Path, kind: str | None = None) -> Iterator[Record]:
    """The records of a file, or those of a kind; none if it is absent.

    A torn last line (a crash) is left out.
    """
    if not path.exists():
        return
    mark = b"" if kind is None else json.dumps(kind).encode()  # spares parsing most lines
    with path.open("rb") as file:  # bytes: a line may be torn within a character
        for line in file:
            if mark in line and line.endswith(b"\n"):
                record = json.loads(line)
                if kind is None or record["kind"] == kind:
                    yield record
