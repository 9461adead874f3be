"""metrics.jsonl: the metrics of a job, one JSON object per line, from which all reports derive."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dtt.base.files import named, write_atomically
from dtt.base.log import log
from dtt.base.reading import fits, is_kind, read_records, retrying
from dtt.track.base import Record

GAP = "gap"
"""Kind of the record that lists the steps whose records were lost."""


class JsonlTracker:
    """Tracker that appends records to a file; `flush` makes them durable.

    Lines that cannot be written are kept in memory and retried later. `log` only warns about a full
    or failing disk; `flush` raises.
    """

    def __init__(self, path: Path, resume_step: int | None, *, again: Collection[str] = ()) -> None:
        """Open `path`, and drop the records that this attempt will write again.

        These are the records after `resume_step` (None: all), and those of `resume_step` itself
        with a kind in `again`.
        """
        self._path = path
        self._pending = b""
        self._lock = threading.Lock()  # the checkpoint thread flushes while training logs
        self._begin(resume_step, again)

    def _begin(self, resume_step: int | None, again: Collection[str]) -> None:
        kept = []
        if resume_step is not None:
            for record in read(self._path, timed=True):
                repeated = record["step"] == resume_step and record["kind"] in again
                if record["step"] <= resume_step and not repeated:
                    kept.append(record)
        if resume_step is not None and (gaps := _gaps(kept, resume_step)):
            ranges = ", ".join(f"{first} to {last}" for first, last in gaps[:3])
            more = ", …" if len(gaps) > 3 else ""
            log.warning(
                "%s lacks the records of steps %s%s: they are lost", self._path, ranges, more
            )
            kept.append({"kind": GAP, "step": resume_step, "steps": gaps})  # warn only once
        write_atomically(self._path, "".join(_line(record) for record in kept))
        self._file = retrying(lambda: self._path.open("ab", buffering=0))

    def log(self, record: Record) -> None:
        """Append one line."""
        with self._lock:
            waiting = self._pending != b""
            self._pending += _line(record | {"time": round(time.time(), 3)}).encode()
            try:
                self._write()
            except OSError as error:
                if not waiting:
                    log.warning("metrics.jsonl is behind, its lines are kept: %s", error)

    def flush(self) -> None:
        """Write and fsync all records logged so far."""
        with self._lock:
            self._write()
        with named(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush and close."""
        retrying(self.flush)
        self._file.close()

    def _write(self) -> None:
        with named(self._path):
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]


def _line(record: Record) -> str:
    return json.dumps(plain(record), ensure_ascii=False) + "\n"


def plain(value: Any) -> Any:
    """Return `value` with non-finite floats, which JSON cannot represent, replaced by None."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(path: Path, kind: str | None = None, *, timed: bool = False) -> Iterator[Record]:
    """Yield the records of a file, or those of one kind; none if the file does not exist.

    With `timed`, each record has the `time` at which it was written. Without it, the records of a
    resumed run equal those of an uninterrupted one.

    A last line that a crash left incomplete is skipped. So are lines that are not records, with one
    warning.
    """
    mark = b"" if kind is None else json.dumps(kind).encode()  # avoids parsing most lines
    for record in read_records(path, {"kind": str, "step": int}, mark=mark):
        if kind is None or record["kind"] == kind:
            if not timed:
                record.pop("time", None)
            yield record


def _gaps(records: Sequence[Record], step: int) -> list[list[int]]:
    """Return (first, last) of each range of steps up to `step` without a `train` record.

    Ranges that an earlier `gap` record lists are left out.
    """
    known = [[r["step"], r["step"]] for r in records if r["kind"] == "train"]
    for record in records:
        if record["kind"] == GAP and fits(record, {"steps": list}):
            pairs = (p for p in record["steps"] if isinstance(p, list) and len(p) == 2)
            known += [pair for pair in pairs if all(is_kind(n, int) for n in pair)]
    gaps, following = [], 1
    for first, last in sorted(known):
        if first > following:
            gaps.append([following, first - 1])
        following = max(following, last + 1)
    return [*gaps, [following, step]] if following <= step else gaps
