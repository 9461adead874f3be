"""Data of tasks: rows from the Hub at a pinned commit, or from local files, as questions."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count as counting
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from dtt.artifacts.corpus import CorpusManifest, FileFormat
from dtt.artifacts.manifest import fingerprint
from dtt.base.errors import ConfigError, DamagedError, InputError
from dtt.base.files import exclusive, sha256_file
from dtt.config.data import DownloadConfig
from dtt.data.corpus.bad_documents import BadDocuments, raise_if_refused
from dtt.data.corpus.download import download
from dtt.data.corpus.formats import FORMATS, file_format, read_rows_of
from dtt.data.corpus.parquet import MAX_ROWS, rows_at_once
from dtt.data.corpus.streams import MAX_DOCUMENT_BYTES, Span
from dtt.evaluate.tasks.definition import Task, TaskSource
from dtt.evaluate.tasks.prompts import Question, example_of, question_id, question_of

MAX_BYTES = 2**31
"""Maximum size of the rows of a split, decompressed."""
TASK_BATCH_BYTES = 2**24
PATIENCE = 3600.0
"""Seconds to wait for another process that downloads the same dataset."""


@dataclass(frozen=True)
class TaskData:
    """The questions of a task."""

    task: Task
    questions: Sequence[Question]
    sha256: str
    """Hash of the files that the questions and the examples come from."""
    revision: str | None
    """Commit of the Hub dataset; None for a local file."""
    shots: int
    """Number of examples in front of each question."""


@dataclass(frozen=True)
class Split:
    """The rows of a split, and the files that they come from."""

    rows: list[dict[str, Any]]
    files: tuple[Path, ...]
    starts: tuple[int, ...]
    """Number of the first row of each file."""
    hashes: tuple[str, ...]
    revision: str | None

    def where(self, row: int) -> str:
        """Return the location of a row: `file, row N`, with N counted from 0 in its file."""
        file = max(i for i, start in enumerate(self.starts) if start <= row)
        return f"{self.files[file]}, row {row - self.starts[file]}"


class Examples:
    """The few-shot examples of the questions of a task."""

    def __init__(self, task: Task, split: Split | None, count: int, ids: list[str] | None) -> None:
        """`split` has the rows of the examples.

        `ids` are theirs, where equal rows have equal ids, if some of them are also questions.
        """
        self.task, self.split, self.count = task, split, count
        self._ids = ids
        self._texts: dict[int, str] = {}
        available = 0 if split is None else len(split.rows)
        if ids is not None:  # without the question itself, however often it occurs
            available -= max(Counter(ids).values())
        if count > available:
            raise ConfigError(
                f"{task.name} has {available} examples, fewer than {count}",
                where=split.files[0] if split is not None else None,
            )

    def text(self, question: str, row_id: str) -> str:
        """Return the text of the examples in front of a question with this id, and of its row.

        The first n examples are the same for any larger number of them.
        """
        if self.count == 0:
            return ""
        assert self.split is not None
        key = "" if self.task.shots.fixed else question
        rows: list[int] = []
        for attempt in counting():
            if len(rows) == self.count:
                break
            row = _hash(f"{key}/{attempt}") % len(self.split.rows)
            own = self._ids is not None and self._ids[row] == row_id
            if row in rows or own:
                continue
            rows.append(row)
            if row not in self._texts:
                with _located(self.task, self.split, row):
                    self._texts[row] = example_of(self.task, self.split.rows[row])
        return "".join(self._texts[row] for row in rows)


def open_task(task: Task, folder: Path, *, limit: int | None, shots: int | None) -> TaskData:
    """Return the questions of a task; download its data into `folder` if they are not there.

    The first download pins the commit and records the hash of each file. Later calls verify the
    files and need no network. `limit` selects that number of questions by the hashes of their ids,
    so those of a smaller limit are among those of a larger one. `shots` overrides the number of
    examples that the task defines; rolling tasks have none.

    Raises ConfigError if the task needs examples but does not name where they come from, or if a
    row does not fit the task; InputError or EnvironmentUnfit if the data cannot be had;
    DamagedError if a file has changed since it was downloaded.
    """
    count = task.shots.count if shots is None else shots
    if task.type == "rolling":
        count = 0
    origin: TaskSource | None = None  # of the examples
    if count and task.shots.file is not None:
        origin = TaskSource(file=task.shots.file)
    elif count and task.shots.split is not None:
        origin = task.data.model_copy(update={"split": task.shots.split})
    elif count:
        raise ConfigError(
            f"{task.name} names no examples for {count} shots",
            why="examples from the questions themselves would give answers away",
            next="set shots.split or shots.file in the task, or evaluate it with shots=0",
        )
    split = _open(task, task.data, folder)
    examples = split if origin == task.data else None
    if origin is not None and examples is None:
        examples = _open(task, origin, folder)
    row_ids, ids, seen = _row_ids(task, split), list[str](), Counter[str]()
    for id in row_ids:  # those of equal rows get a number
        seen[id] += 1
        ids.append(id if seen[id] == 1 else f"{id}-{seen[id]}")
    chosen = list(range(len(ids)))
    if limit is not None:
        chosen = sorted(sorted(chosen, key=lambda row: (_hash(ids[row]), row))[:limit])
    example_ids = None
    if examples is not None and not {*split.hashes}.isdisjoint(examples.hashes):
        example_ids = row_ids if examples is split else _row_ids(task, examples)
    prefixes = Examples(task, examples, count, example_ids)
    questions = []
    for row in chosen:
        prefix = prefixes.text(ids[row], row_ids[row])
        with _located(task, split, row):
            questions.append(question_of(task, split.rows[row], ids[row], prefix))
    hashes = [split.hashes, examples.hashes if examples else ()]
    return TaskData(task, questions, fingerprint(hashes), split.revision, count)


def _row_ids(task: Task, split: Split) -> list[str]:
    """Return the ids of all rows; those of equal rows are equal."""
    ids = []
    for number, row in enumerate(split.rows):
        with _located(task, split, number):
            ids.append(question_id(task, row))
    return ids


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


@contextmanager
def _located(task: Task, split: Split, row: int) -> Iterator[None]:
    """Turn a ValueError into a ConfigError with the location of the row."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(
            f"a row does not fit the task {task.name}", where=split.where(row), why=str(error)
        ) from None


def _open(task: Task, origin: TaskSource, folder: Path) -> Split:
    """Return the verified rows of a split of the Hub or of a local file."""
    if origin.file is not None:
        if not origin.file.is_file():
            raise InputError(
                f"there is no file for the task {task.name}",
                where=origin.file,
                next="fix `file` in its definition; it is relative to the definition",
            )
        return _split([origin.file], [sha256_file(origin.file)], None)
    out = _hub_folder(origin, folder)
    if not CorpusManifest.exists(out):
        # Ranks and jobs share the folder: one downloads, and the others wait.
        with exclusive(out.parent, "dtt eval", PATIENCE):
            if not CorpusManifest.exists(out):
                cfg = DownloadConfig(
                    dataset=origin.hub,
                    name=origin.name,
                    split=origin.split,
                    revision=origin.revision,
                )
                try:
                    download(cfg, out, rows=True)
                except ConfigError as error:
                    raise ConfigError(
                        f"the data of the task {task.name} cannot be downloaded",
                        where=f"{origin.hub}, subset {origin.name}, split {origin.split}",
                        why=" ".join(str(error).partition("\n  next:")[0].split()),
                        next="fix `data` in its definition",
                    ) from None
    manifest = CorpusManifest.read(out)
    paths = [out / file.path for file in manifest.files]
    hashes = []
    for path, file in zip(paths, manifest.files, strict=True):
        hashes.append(sha256_file(path) if path.is_file() else None)
        if hashes[-1] != file.sha256:
            raise DamagedError(
                f"the data of the task {task.name} have changed since they were downloaded",
                where=path,
                why="the file is missing" if hashes[-1] is None else "its sha256 differs",
                next=f"delete {out}, and run the command again",
            )
    return _split(paths, [file.sha256 for file in manifest.files], manifest.source.revision)


def _hub_folder(origin: TaskSource, folder: Path) -> Path:
    """Return the folder of a split; each requested revision has its own.

    Different names may become equal without the characters that a folder cannot have, so the hash
    tells them apart.
    """
    revision = f"@{origin.revision}" if origin.revision else ""
    parts = (origin.hub, origin.name, origin.split, origin.revision)
    name = f"{origin.name or 'default'}--{origin.split}{revision}-{fingerprint(parts)[:8]}"
    return folder / str(origin.hub).replace("/", "--") / re.sub(r"[^\w.@-]", "_", name)


def _split(paths: list[Path], hashes: list[str], revision: str | None) -> Split:
    rows: list[dict[str, Any]] = []
    starts = []
    room = MAX_BYTES
    for path in paths:
        starts.append(len(rows))
        found, room = _rows(path, room)
        rows += found
    if not rows:
        raise InputError("a task has no questions", where=paths[0])
    return Split(rows, tuple(paths), tuple(starts), tuple(hashes), revision)


def _rows(path: Path, room: int) -> tuple[list[dict[str, Any]], int]:
    """Return all rows of a file, of at most `room` bytes, and the bytes that are left of it.

    Unlike those of a corpus, none may be damaged.
    """
    kind = file_format(path)
    if kind is None or kind == "txt":
        why = "use JSON lines, Parquet or CSV"
        raise InputError("dtt cannot read this file", where=path, next=why)
    bad, found, left = BadDocuments(), list[dict[str, Any]](), room
    try:
        for size, rows in _sized_rows(kind, path, bad):
            left -= size
            if left < 0:
                raise InputError(
                    "the rows of a task are too large",
                    where=path,
                    why=f"at most {MAX_BYTES // 2**30} GiB, and "
                    f"{MAX_DOCUMENT_BYTES // 2**20} MiB for a row",
                )
            found += rows
    except Exception as error:  # noqa: BLE001  files of others raise anything
        raise_if_refused(error)
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise DamagedError("cannot read the rows of a task", where=path, why=why) from None
    if bad.count:
        raise DamagedError("cannot read the rows of a task", where=path, why=bad.examples[0])
    return found, left


def _sized_rows(
    kind: FileFormat, path: Path, bad: BadDocuments
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield rows, a batch or one, and their size in bytes; record unreadable ones in `bad`."""
    if FORMATS[kind].has_row_groups:
        with pq.ParquetFile(path) as file:
            for group in range(file.metadata.num_row_groups):
                at_once = rows_at_once(path, file, group, None, MAX_ROWS, TASK_BATCH_BYTES)
                for batch in file.iter_batches(at_once, row_groups=[group], use_threads=False):
                    yield batch.nbytes, batch.to_pylist()
        return
    for _, text, row in read_rows_of(kind, path, Span(0, 0, path.stat().st_size, 0), bad):
        if text is None or b"\\u" in text:  # a lone surrogate has no UTF-8
            json.dumps(row, ensure_ascii=False).encode()
        yield sum(map(len, row.values())) if text is None else len(text), [row]
