"""metrics.jsonl: the record of a job, one JSON object a line; everything else derives from it."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dtt.reading import fits, is_kind, read_records, retrying
from dtt.runtime.files import named, write_atomically
from dtt.runtime.log import log
from dtt.track.base import Record

GAP = "gap"
"""Kind of the record that says which steps have none."""


class JsonlTracker:
    """Appends records; `flush` makes them durable.

    What the disk does not take at once is kept and tried again: only `flush` fails.
    """

    def __init__(self, path: Path, resume_step: int | None, *, evaluated: bool = True) -> None:
        """Open `path`; drop the records that will be made again.

        Those are the ones after `resume_step` (None: all), and the evaluation and the sample of
        that very step if it is not `evaluated` yet.
        """
        self._path = path
        self._pending = b""
        self._lock = threading.Lock()  # a checkpoint's thread flushes while training logs
        self._begin(resume_step, evaluated)

    def _begin(self, resume_step: int | None, evaluated: bool) -> None:
        kept = []
        if resume_step is not None:
            for record in read(self._path, timed=True):
                again = record["step"] == resume_step and record["kind"] in ("eval", "sample")
                if record["step"] <= resume_step and (evaluated or not again):
                    kept.append(record)
        if resume_step is not None and (gaps := _gaps(kept, resume_step)):
            told = ", ".join(f"{first} to {last}" for first, last in gaps[:3])
            more = ", …" if len(gaps) > 3 else ""
            log.warning("%s lacks the records of steps %s%s: they are lost", self._path, told, more)
            kept.append({"kind": GAP, "step": resume_step, "steps": gaps})  # it is said once
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
        """Return when every record so far is on the disk."""
        with self._lock:
            self._write()
        with named(self._path):
            os.fsync(self._file.fileno())

    def rewind(self, step: int) -> None:
        """Drop the records after `step`; call when no checkpoint is on its way."""
        self.close()
        self._begin(step, evaluated=True)

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
    """Without what JSON has no number for: null stands for it."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(path: Path, kind: str | None = None, *, timed: bool = False) -> Iterator[Record]:
    """The records of a file, or those of one kind; none if it is absent.

    With `timed`, each has the `time` at which it was written. Without, the records of a resumed run
    equal those of an undisturbed one.

    A torn last line (a crash) is left out; so is, with one warning, what is no record.
    """
    mark = b"" if kind is None else json.dumps(kind).encode()  # spares parsing most lines
    for record in read_records(path, {"kind": str, "step": int}, mark=mark):
        if kind is None or record["kind"] == kind:
            if not timed:
                record.pop("time", None)
            yield record


def _gaps(records: Sequence[Record], step: int) -> list[list[int]]:
    """Return the first and last step of each gap: steps up to `step` that have no record."""
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
