"""What a look at data gives: the same fields for text and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dtt.data.inspect.lengths import Summary
from dtt.errors import DamagedError
from dtt.runtime.files import sha256_file
from dtt.runtime.log import progress

SHOWN = 10
"""Oddities of one kind that are named; more are counted."""


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """How to look."""

    samples: int
    """Documents to show the beginning of."""
    everything: bool
    """Read all of it, however large."""
    hashes: bool
    """Compare every file with the sha256 in its manifest."""
    tokenizer: Path | None
    """A tokenizer.json; None: the one beside the ids, if any."""
    dtype: str
    """Of raw ids."""


@dataclass(frozen=True)
class Sample:
    """The beginning of one document."""

    where: str
    text: str


@dataclass(frozen=True)
class Read:
    """How much was read to tell what is told of documents and ids."""

    amount: int
    total: int
    """An estimate for text that is compressed."""
    unit: str

    @property
    def everything(self) -> bool:
        """Whether nothing was left out, so that all numbers are exact."""
        return self.amount >= self.total


@dataclass(kw_only=True)
class Report:
    """What lies at a path."""

    path: str
    kind: str
    files: int
    file_bytes: int
    documents: int | None
    """None: not known without reading it all."""
    documents_estimated: bool = False
    tokens: int | None = None
    text_bytes: int | None = None
    """UTF-8 bytes of text; an estimate for files that are compressed, until everything is read."""
    facts: dict[str, object] = field(default_factory=dict)
    """What only this kind of data has, by name."""
    read: Read
    lengths: Summary | None
    """None: nothing tells where documents begin."""
    samples: list[Sample]
    oddities: list[str]
    damaged: list[str]
    """Files that are not what they should be, each with the reason."""
    verified: bool
    """Whether the content of every file was compared with its sha256."""


@dataclass(frozen=True)
class Expected:
    """A file as a manifest names it."""

    path: Path
    sha256: str
    bytes: int


Damages = dict[Path, str]
"""What is wrong with files."""


def damages(files: Sequence[Expected], *, hashes: bool) -> Damages:
    """Files that differ from their manifest: by size, with `hashes` by content.

    The latter reads every file to its end.
    """
    found = {file.path: _by_size(file) for file in files}
    if hashes:
        whole = [file for file in files if found[file.path] is None]
        with progress("verifying", sum(file.bytes for file in whole)) as advance:
            for file in whole:
                found[file.path] = _by_content(file)
                advance(file.bytes)
    return {path: problem for path, problem in found.items() if problem is not None}


def told(damaged: Damages) -> list[str]:
    """A line for each file."""
    return [f"{path}: {problem}" for path, problem in damaged.items()]


def _by_size(file: Expected) -> str | None:
    try:
        size = file.path.stat().st_size
    except FileNotFoundError:
        return "missing"
    return None if size == file.bytes else f"{size} bytes, the manifest says {file.bytes}"


def _by_content(file: Expected) -> str | None:
    found = sha256_file(file.path)
    if found == file.sha256:
        return None
    return f"its sha256 is {found[:16]}…, the manifest says {file.sha256[:16]}…"


def raise_if_damaged(report: Report) -> None:
    """DamagedError that counts what `report` names."""
    if report.damaged:
        raise DamagedError(
            f"{report.path} is damaged; files not as they should be: {len(report.damaged)}",
            where=report.damaged[0],
            next="make or fetch them again: dtt tokenize and dtt download mend what they made",
        )
