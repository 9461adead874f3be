"""Report of a data inspection, with the same fields for text and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dtt.artifacts.token_folders import ShardFile
from dtt.base.errors import DamagedError
from dtt.base.files import sha256_file
from dtt.base.log import progress

T = TypeVar("T")
ODDITIES_SHOWN = 10
"""Maximum number of unreadable documents, and of reasons, that are listed."""
BEGIN, END = "⟦", "⟧"
"""Marks around trained text."""
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


Sample = dict[str, str]
"""The start of a document: `where` it is, and its `text`."""


def summary(lengths: npt.NDArray[np.int64], unit: str) -> dict[str, Any]:
    """Summarize the lengths of documents, in `tokens` or `bytes`."""
    some = lengths if len(lengths) else np.zeros(1, dtype=np.int64)
    median, p90 = np.percentile(some, (50, 90), method="inverted_cdf").tolist()
    return {
        "unit": unit,
        "documents": len(lengths),
        "empty": len(lengths) - int(np.count_nonzero(lengths)),
        "mean": round(float(some.mean()), 1),
        "median": median,
        "p90": p90,
        "max": int(some.max()),
    }


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
    read: dict[str, Any]
    """The `amount` of data read for the statistics on documents and ids, of a `total` of some
    `unit`; the total is estimated for compressed text."""
    lengths: dict[str, Any] | None
    """Document lengths; None if the document boundaries are unknown."""
    samples: list[Sample]
    oddities: list[str]
    damaged: list[str]
    """Damaged or missing files, each with the reason."""
    verified: bool
    """True if the content of every file was compared with its sha256."""

    @property
    def is_exact(self) -> bool:
        """True if all data was read, so that all numbers are exact."""
        return bool(self.read["amount"] >= self.read["total"])


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


def raise_if_damaged(report: Report) -> None:
    """Raise DamagedError if `report` lists damaged files."""
    if report.damaged:
        raise DamagedError(
            f"{report.path} is damaged; damaged files: {len(report.damaged)}",
            where=report.damaged[0],
            next="create them again: dtt tokenize and dtt download repair their own files",
        )
