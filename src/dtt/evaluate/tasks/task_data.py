"""Data of tasks: rows from the Hub at a pinned commit, or from local files, as questions."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
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
        return "".join(map(self._example, self._rows(question, row_id))) if self.count else ""

    def _rows(self, question: str, row_id: str) -> list[int]:
        assert self.split is not None
        key = "" if self.task.shots.fixed else question
        rows: list[int] = []
        attempt = 0
        while len(rows) < self.count:
            row = _hash(f"{key}/{attempt}") % len(self.split.rows)
            attempt += 1
            own = self._ids is not None and self._ids[row] == row_id
            if row not in rows and not own:
                rows.append(row)
        return rows

    def _example(self, row: int) -> str:
        assert self.split is not None
        if row not in self._texts:
            with _located(self.task, self.split, row):
                self._texts[row] = example_of(self.task, self.split.rows[row])
        return self._texts[row]


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
    origin = _examples_source(task, count)
    split = _open(task, task.data, folder)
    examples = split if origin == task.data else None
    if origin is not None and examples is None:
        examples = _open(task, origin, folder)
    row_ids = _row_ids(task, split)
    ids = _numbered(row_ids)
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


def _examples_source(task: Task, count: int) -> TaskSource | None:
    """Return where the examples come from; raise ConfigError if the task does not name it."""
    shots = task.shots
    if count == 0:
        return None
    if shots.file is not None:
        return TaskSource(file=shots.file)
    if shots.split is not None:
        return task.data.model_copy(update={"split": shots.split})
    raise ConfigError(
        f"{task.name} names no examples for {count} shots",
        why="examples from the questions themselves would give answers away",
        next="set shots.split or shots.file in the task, or evaluate it with shots=0",
    )


def _row_ids(task: Task, split: Split) -> list[str]:
    """Return the ids of all rows; those of equal rows are equal."""
    ids = []
    for number, row in enumerate(split.rows):
        with _located(task, split, number):
            ids.append(question_id(task, row))
    return ids


def _numbered(ids: Sequence[str]) -> list[str]:
    """Return ids with a number behind each that occurred before."""
    seen = Counter[str]()
    numbered = []
    for id in ids:
        seen[id] += 1
        numbered.append(id if seen[id] == 1 else f"{id}-{seen[id]}")
    return numbered


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
                _download(task, origin, out)
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


def _download(task: Task, origin: TaskSource, out: Path) -> None:
    cfg = DownloadConfig(
        dataset=origin.hub, name=origin.name, split=origin.split, revision=origin.revision
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


def _split(paths: list[Path], hashes: list[str], revision: str | None) -> Split:
    rows: list[dict[str, Any]] = []
    starts = []
    room = MAX_BYTES
    for path in paths:
        starts.append(len(rows))
        found, size = _rows(path, room)
        rows += found
        room -= size
    if not rows:
        raise InputError("a task has no questions", where=paths[0])
    return Split(rows, tuple(paths), tuple(starts), tuple(hashes), revision)


def _rows(path: Path, room: int) -> tuple[list[dict[str, Any]], int]:
    """Return all rows of a file and their size in bytes, which is at most `room`.

    Unlike those of a corpus, none may be damaged.
    """
    kind = file_format(path)
    if kind is None or kind == "txt":
        why = "use JSON lines, Parquet or CSV"
        raise InputError("dtt cannot read this file", where=path, next=why)
    bad = BadDocuments()
    try:
        read = _parquet_rows if FORMATS[kind].has_row_groups else partial(_line_rows, kind, bad)
        found = read(path, room)
    except Exception as error:  # noqa: BLE001  files of others raise anything
        raise_if_refused(error)
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise DamagedError("cannot read the rows of a task", where=path, why=why) from None
    if bad.count:
        raise DamagedError("cannot read the rows of a task", where=path, why=bad.examples[0])
    return found


def _parquet_rows(path: Path, room: int) -> tuple[list[dict[str, Any]], int]:
    with pq.ParquetFile(path) as file:
        rows: list[dict[str, Any]] = []
        size = 0
        for group in range(file.metadata.num_row_groups):
            at_once = rows_at_once(path, file, group, None, MAX_ROWS, TASK_BATCH_BYTES)
            for batch in file.iter_batches(at_once, row_groups=[group], use_threads=False):
                size += batch.nbytes
                if size > room:
                    raise _too_large(path)
                rows += batch.to_pylist()
        return rows, size


def _line_rows(
    kind: FileFormat, bad: BadDocuments, path: Path, room: int
) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of a file without row groups; record unreadable ones in `bad`."""
    rows: list[dict[str, Any]] = []
    size = 0
    for _, text, row in read_rows_of(kind, path, Span(0, 0, path.stat().st_size, 0), bad):
        size += sum(map(len, row.values())) if text is None else len(text)
        if size > room:
            raise _too_large(path)
        if text is None or b"\\u" in text:  # a lone surrogate has no UTF-8
            json.dumps(row, ensure_ascii=False).encode()
        rows.append(row)
    return rows, size


def _too_large(path: Path) -> InputError:
    return InputError(
        "the rows of a task are too large",
        where=path,
        why=f"at most {MAX_BYTES // 2**30} GiB, and {MAX_DOCUMENT_BYTES // 2**20} MiB for a row",
    )
