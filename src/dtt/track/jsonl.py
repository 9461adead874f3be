"""metrics.jsonl: the metrics of a job, one JSON object per line, from which all reports derive."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from dtt.base.files import named, write_atomically
from dtt.base.log import log
from dtt.base.reading import Kind, fits, read_records, retrying
from dtt.track.base import Record

NEEDED: dict[str, dict[str, Kind]] = {
    "train": {"tokens": int},
    "eval": {"loss": (float, type(None))},
    "task": {"task": str},
    "perf": {"tokens_per_second": float},
}
"""Fields that the records of a summary need, by kind, with their types."""


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
        kept = []
        if resume_step is not None:
            for record in read(path, timed=True):
                repeated = record["step"] == resume_step and record["kind"] in again
                if record["step"] <= resume_step and not repeated:
                    kept.append(record)
            known = {record["step"] for record in kept if record["kind"] == "train"}
            if lost := resume_step - len(known):
                log.warning("%s lacks the records of %d steps: they are lost", path, lost)
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


@dataclass(frozen=True)
class RunSummary:
    """Key figures of a run; None for figures that were not measured."""

    steps: int
    tokens: int
    tokens_per_second: float | None
    """Median over the run, of all devices together."""
    first_eval: Record | None
    last_eval: Record | None
    last_tasks: tuple[Record, ...]
    """Scores of the newest evaluation of benchmark tasks, one record per task."""
    first_sample: str | None
    last_sample: str | None
    sample_prompt: str | None
    """Prompt of the samples; None in records of earlier versions."""

    def facts(self) -> dict[str, Any]:
        """Return the fields that `--json` prints: all except the samples."""
        return {name: value for name, value in asdict(self).items() if "sample" not in name}


def summarize(metrics: Path) -> RunSummary:
    """Summarize the metrics file of a job."""
    by_kind: dict[str, list[Record]] = defaultdict(list)
    for record in read(metrics):
        if fits(record, NEEDED.get(record["kind"], {})):
            by_kind[record["kind"]].append(record)
    train, evals, tasks = by_kind["train"], by_kind["eval"], by_kind["task"]
    # `fits` rejects NUL, which an untrained byte-level model generates.
    samples = [r["text"] for r in by_kind["sample"] if isinstance(r.get("text"), str)]
    prompts = [record.get("prompt") for record in reversed(by_kind["sample"])]
    rates = [record["tokens_per_second"] for record in by_kind["perf"]]
    return RunSummary(
        steps=train[-1]["step"] if train else 0,
        tokens=train[-1]["tokens"] if train else 0,
        tokens_per_second=median(rates) if rates else None,
        first_eval=evals[0] if evals else None,
        last_eval=evals[-1] if evals else None,
        last_tasks=tuple(r for r in tasks if r["step"] == tasks[-1]["step"]),
        first_sample=samples[0] if samples else None,
        last_sample=samples[-1] if samples else None,
        sample_prompt=next((p for p in prompts if isinstance(p, str)), None),
    )
