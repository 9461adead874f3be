"""Result files: the answer to every question of a task, appended block by block.

    jobs/run/evals/step-000500/hellaswag-0123456789ab.jsonl
      {"format": "dtt-eval-1", "task": "hellaswag", …}     everything that determines the answers
      {"id": …, …}                                          a line per question, in order
      {"block": 1, "questions": 128, "sha256": …}           after each block: hash of what is above
      {"result": …, "sha256": …}                            the last line seals the file

The name contains a hash of the first line. A block is on disk before the next one is computed, so a
process that is killed loses at most one. What follows the last intact block is discarded, and the
content does not depend on when it was written: the file of an evaluation that was killed equals
that of one that was not. In the first line, `weights` is the SHA-256 of the checkpoint's
MANIFEST.json, or a hash of the safetensors files, config.json and generation_config.json of a
Hugging Face folder. The record of a question has its `id` and, by the type of the task,
    multiple_choice, schema, cloze
        gold              index of the right option
        log_likelihoods   of each option, in nats, rounded to 1e-6
        greedy            of each option: true if every token is the most likely one
        characters, bytes lengths of each option, without the delimiter
        answer_bytes      length of the right option, with the delimiter
        tie               true if several options have the largest log-likelihood
        truncated         true if the beginning of an option did not fit into the context
        separate          true if a continuation was encoded without its context
    rolling
        log_likelihood, bytes, words    of the document
    generation
        answer, exact_match             the extracted answer; true if it is an accepted one
        truncated                       true if the beginning of the prompt did not fit
        unfinished                      true if the reply ended within its reasoning: no answer
With eval.keep_samples it also has the texts: contexts, continuations and, for generation, text.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from dtt.artifacts.manifest import fingerprint
from dtt.artifacts.manifests import CheckpointManifest
from dtt.base.errors import DamagedError
from dtt.base.files import exclusive, fsync_folder, named, sha256_file
from dtt.base.log import log
from dtt.base.reading import open_regular, parse, read_small, retrying
from dtt.evaluate.tasks.metrics import AnswerRecord, TaskResult

FORMAT = "dtt-eval-1"
KEY_LENGTH = 12
MOST_BYTES = 2**31
"""Maximum size of a result file whose result is read: 100,000 samples of 10 kB are half of it."""
SCORING_VERSION = 3
"""Part of the key. Increase it when prompts, scores or metrics change."""


@dataclass
class ResultContent:
    """The intact part of a result file, which may be open for appending."""

    header: Mapping[str, Any] = field(default_factory=dict)
    records: list[AnswerRecord] = field(default_factory=list)
    blocks: int = 0
    result: TaskResult | None = None
    """The result, if the file is sealed."""
    end: int = 0
    """Number of bytes up to and including the last intact block."""
    size: int = 0
    """Number of bytes of the file."""
    hash: hashlib._Hash = field(default_factory=sha256)
    """Hash of the first `end` bytes."""
    damaged: bool = False
    """True if what follows the last intact block is not the rest of an interrupted write."""
    fd: int | None = None
    """Descriptor of the open file; without one, nothing is written."""

    def append(self, records: Sequence[AnswerRecord]) -> None:
        """Append a block. On return, it survives a power failure."""
        lines = b"".join(map(_line, records))
        self.records += records
        self.blocks += 1
        digest = self.hash.copy()
        digest.update(lines)
        marker = {"block": self.blocks, "questions": len(self.records)}
        self.write(lines + _sealing(marker, digest))

    def seal(self, result: TaskResult) -> None:
        """Append the last line."""
        self.write(_sealing({"result": result.dump()}, self.hash))
        self.result = result

    def write(self, data: bytes) -> None:
        """Write complete lines behind the intact part."""
        fd = self.fd
        if fd is None:
            return

        def write() -> None:
            os.ftruncate(fd, self.end)
            os.lseek(fd, self.end, os.SEEK_SET)
            left = memoryview(data)
            while left:
                left = left[os.write(fd, left) :]
            os.fsync(fd)

        retrying(write)
        self.hash.update(data)
        self.end += len(data)


@dataclass(frozen=True)
class SealedResult:
    """The first and the last line of a complete result file."""

    path: Path
    header: Mapping[str, Any]
    result: TaskResult


@dataclass(frozen=True)
class ResultFile:
    """The result file of one task, for one model and one set of options."""

    path: Path
    header: Mapping[str, Any]
    """Everything that determines the answers. The name of the file contains its hash."""

    @classmethod
    def of(cls, folder: Path, settings: Mapping[str, Any]) -> ResultFile:
        """Return the file for `settings`, which include the name of the `task`."""
        header = {"format": FORMAT, **settings}
        key = fingerprint(header)[:KEY_LENGTH]
        return cls(folder / f"{settings['task']}-{key}.jsonl", header)

    def result(self) -> TaskResult | None:
        """Return the result if the file is sealed and intact, else None."""
        sealed = read_sealed(self.path)
        return sealed.result if sealed is not None and sealed.header == self.header else None

    @contextmanager
    def writing(self) -> Iterator[ResultContent]:
        """Lock the file, discard what follows its last intact block, and open it for appending.

        Raises InUse if another process writes it.
        """
        with exclusive(self.path.parent, "dtt eval", name=f".{self.path.name}.lock"):
            content = read(self.path)
            if content.header != self.header:
                content = ResultContent(size=content.size, damaged=content.size > 0)
            if content.damaged:
                log.warning(
                    "%s is damaged after %d questions, which are kept; the others are asked again",
                    self.path,
                    len(content.records),
                )
            with named(self.path), self.path.open("r+b" if content.size else "wb") as file:
                content.fd = file.fileno()
                content.write(b"" if content.end else _line(self.header))
                fsync_folder(self.path.parent)
                yield content


def read(path: Path) -> ResultContent:
    """Return the intact part of a result file; an empty one if it does not exist."""
    content = ResultContent()
    try:
        file = open(retrying(lambda: open_regular(path)), "rb")  # noqa: PTH123, SIM115  a descriptor
    except FileNotFoundError:
        return content
    except ValueError as error:
        raise DamagedError(f"cannot read {path}", why=str(error), next=f"rm -r {path}") from None
    with file:
        content.size = os.fstat(file.fileno()).st_size
        content.damaged = not _scan(file, content)
    return content


def read_sealed(path: Path) -> SealedResult | None:
    """Return the result in a file that is sealed and intact, else None.

    The hash is verified; the records are not parsed.
    """
    try:
        data = retrying(lambda: read_small(path, MOST_BYTES))
    except (FileNotFoundError, ValueError):
        return None
    start = data.rfind(b"\n", 0, -1) + 1
    try:
        header, seal = parse(data[: data.find(b"\n") + 1]), parse(data[start:])
    except ValueError:
        return None
    match seal:
        case {"result": dict(result)} if _seals(seal, data[start:], sha256(data[:start])):
            return SealedResult(path, header, TaskResult.parse(result))
    return None


def weights_of(checkpoint: Path) -> str:
    """Return the hash that identifies the weights of a checkpoint; empty if it has no manifest."""
    try:
        return sha256_file(checkpoint / CheckpointManifest.filename)
    except OSError:
        return ""


def of_weights(results: Sequence[SealedResult], weights: str) -> list[SealedResult]:
    """Return the results of a model, of those that a folder has, by the hash of its weights.

    Without a hash, because its files were deleted, they are those of the newest file's weights:
    training that started again from an earlier step replaces the weights of a step.
    """
    if not weights and results:
        newest = max(results, key=lambda sealed: sealed.path.stat().st_mtime_ns)
        weights = newest.header["weights"]
    return [sealed for sealed in results if sealed.header["weights"] == weights]


def _scan(lines: Iterator[bytes], content: ResultContent) -> bool:
    """Fill in `content`; return False if a line is not what dtt wrote.

    A line without an end, and complete lines after the last block, are the rest of a write that was
    interrupted.
    """
    position, digest = 0, content.hash.copy()
    records: list[AnswerRecord] = []
    for number, line in enumerate(lines):
        if content.result is not None:
            return False
        if not line.endswith(b"\n"):
            return True
        try:
            entry = parse(line)
        except ValueError:
            return False
        if not isinstance(entry, dict):
            return False
        match entry:
            case {"format": str(name)} if number == 0 and name == FORMAT:
                content.header = entry
            case _ if number == 0:
                return False
            case {"id": str()}:
                records.append(entry)
            case {"block": int(block)} if _seals(entry, line, digest):
                content.records += records
                content.blocks, records = block, []
            case {"result": dict(result)} if _seals(entry, line, digest) and not records:
                content.result = TaskResult.parse(result)
            case _:
                return False
        position += len(line)
        digest.update(line)
        if not records:
            content.end, content.hash = position, digest.copy()
    return True


def _line(entry: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(entry, ensure_ascii=False, allow_nan=False)}\n".encode()


def _sealing(entry: Mapping[str, Any], above: hashlib._Hash) -> bytes:
    """Return the line of `entry` with the hash of all that is above it and of its own values."""
    digest = above.copy()
    digest.update(_line(entry))
    return _line({**entry, "sha256": digest.hexdigest()})


def _seals(entry: Mapping[str, Any], line: bytes, above: hashlib._Hash) -> bool:
    """Return True if `line`, which contains `entry`, is what `_sealing` has returned."""
    values = {name: value for name, value in entry.items() if name != "sha256"}
    return _sealing(values, above) == line
