"""Report of a data inspection, with the same fields for text and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from dtt.artifacts.shard_files import ShardFile
from dtt.base.errors import DamagedError
from dtt.base.files import sha256_file
from dtt.base.log import progress

T = TypeVar("T")
ODDITIES_SHOWN = 10
"""Maximum number of oddities of one kind listed by name; the rest are only counted."""
SHOWN_CHARACTERS = 300
"""Characters of a document that are shown."""


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Options of an inspection."""

    samples: int
    """Number of documents whose start is shown."""
    everything: bool
    """True to read all data, regardless of its size."""
    hashes: bool
    """True to compare every file with the sha256 in its manifest."""
    tokenizer: Path | None
    """A tokenizer.json; None for the one next to the ids, if any."""
    dtype: str
    """dtype of raw ids."""


@dataclass(frozen=True)
class DocumentSample:
    """The start of one document."""

    where: str
    text: str

    @classmethod
    def of(cls, where: str, content: bytes) -> DocumentSample:
        """Return the first SHOWN_CHARACTERS characters of a document."""
        start = content[: 4 * SHOWN_CHARACTERS]
        # `ignore`: the cut may be within a character.
        return cls(where, start.decode(errors="ignore")[:SHOWN_CHARACTERS])


@dataclass(frozen=True)
class Read:
    """The amount of data read for the statistics on documents and ids."""

    amount: int
    total: int
    """Estimated for compressed text."""
    unit: str

    @property
    def everything(self) -> bool:
        """True if all data was read, so that all numbers are exact."""
        return self.amount >= self.total


@dataclass(frozen=True)
class LengthSummary:
    """Summary statistics of document lengths."""

    unit: str
    """`tokens` or `bytes`."""
    documents: int
    """Number of documents measured."""
    empty: int
    mean: float
    median: int
    p90: int
    max: int

    @classmethod
    def of(cls, lengths: npt.NDArray[np.int64], unit: str) -> LengthSummary:
        """Summarize the lengths of documents, which take 8 bytes each."""
        some = lengths if len(lengths) else np.zeros(1, dtype=np.int64)
        median, p90 = np.percentile(some, (50, 90), method="inverted_cdf").tolist()
        return cls(
            unit=unit,
            documents=len(lengths),
            empty=len(lengths) - int(np.count_nonzero(lengths)),
            mean=round(float(some.mean()), 1),
            median=median,
            p90=p90,
            max=int(some.max()),
        )


@dataclass(kw_only=True)
class Report:
    """The result of inspecting a path."""

    path: str
    kind: str
    files: int
    file_bytes: int
    documents: int | None
    """None if unknown without reading everything."""
    documents_estimated: bool = False
    tokens: int | None = None
    text_bytes: int | None = None
    """UTF-8 bytes of text; estimated for compressed files unless everything was read."""
    facts: dict[str, object] = field(default_factory=dict)
    """Facts specific to this kind of data, by name."""
    read: Read
    lengths: LengthSummary | None
    """Document lengths; None if the document boundaries are unknown."""
    samples: list[DocumentSample]
    oddities: list[str]
    damaged: list[str]
    """Damaged or missing files, each with the reason."""
    verified: bool
    """True if the content of every file was compared with its sha256."""


def spread(items: Sequence[T], count: int) -> list[T]:
    """Return up to `count` items, spread evenly."""
    places = np.linspace(0, len(items) - 1, min(count, len(items))).round()
    return [items[int(place)] for place in places]


Damages = dict[Path, str]
"""Problems of files, by path."""


def damages(files: Sequence[ShardFile], *, hashes: bool) -> Damages:
    """Return the files that differ from their manifest in size or, with `hashes`, in content.

    With `hashes`, every file is read completely.
    """
    found: Damages = {}
    whole = []
    for file in files:
        if not file.path.is_file():
            found[file.path] = "missing"
        elif (size := file.path.stat().st_size) != file.bytes:
            found[file.path] = f"{size} bytes, the manifest records {file.bytes}"
        else:
            whole.append(file)
    if hashes:
        with progress("verifying", sum(file.bytes for file in whole)) as advance:
            for file in whole:
                sha256 = sha256_file(file.path)
                if sha256 != file.sha256:
                    then = f"the manifest records {file.sha256[:16]}…"
                    found[file.path] = f"its sha256 is {sha256[:16]}…, {then}"
                advance(file.bytes)
    return found


def damage_lines(damaged: Damages) -> list[str]:
    """Return a line for each damaged file."""
    return [f"{path}: {problem}" for path, problem in damaged.items()]


def raise_if_damaged(report: Report) -> None:
    """Raise DamagedError if `report` lists damaged files."""
    if report.damaged:
        raise DamagedError(
            f"{report.path} is damaged; damaged files: {len(report.damaged)}",
            where=report.damaged[0],
            next="create them again: dtt tokenize and dtt download repair their own files",
        )
