"""Pass 1: filters, exact keys and band keys of the documents of one unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from dtt.artifacts.manifest import fingerprint
from dtt.clean.contamination import TaskNgrams
from dtt.clean.filters import Filter, Removal
from dtt.clean.removals import RemovedRow, encode
from dtt.clean.shingles import shingles
from dtt.clean.sketches import band_keys, bands_and_rows, sketches
from dtt.clean.steps import Steps
from dtt.config.clean import CleanConfig
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.document_columns import read_with_columns
from dtt.data.corpus.documents import read_batches
from dtt.data.corpus.selection import VERSION, Selection
from dtt.data.corpus.units import Corpus, Unit

BATCH_BYTES = 2**19
"""Text that is hashed at once: its arrays fit into the processor's cache, which makes it a third
faster than 2 MiB."""
RUN_ENTRIES = 2**21
"""Band keys that are sorted at once. Units of short documents have several sorted runs of them."""


@dataclass(frozen=True)
class PlacedUnit:
    """A unit and its results of pass 1."""

    corpus: Corpus
    unit: Unit
    key: str
    """Fingerprint of what pass 1 computes of it."""
    other: int | None = None
    """Number of the corpus in `near.against`; None for the corpus that is cleaned."""
    selection: Selection | None = None
    """Removed documents of another corpus, which are nobody's twins."""

    @property
    def step(self) -> str:
        """Name of its step of pass 1: units of the same content share it."""
        return f"unit-{self.key[:24]}"


@dataclass
class UnitKeys:
    """Results of pass 1 for a unit."""

    sizes: list[int] = field(default_factory=list)
    """Bytes of each document."""
    texts: list[bytes] = field(default_factory=list)
    """xxh3-128 of each document. A pair of documents is compared again if one of them changes."""
    removed: list[RemovedRow] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    """xxh3-128 of the documents `numbered`, up to white space."""
    numbered: list[int] = field(default_factory=list)
    keys: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    """Sorted runs of band keys, and the documents that have them."""
    documents: list[npt.NDArray[np.uint32]] = field(default_factory=list)
    hits: list[npt.NDArray[np.int64]] = field(default_factory=list)
    """N-grams of tasks in each of the documents `hit`."""
    hit: list[int] = field(default_factory=list)


def unit_key(
    clean: CleanConfig,
    corpus: Corpus,
    unit: Unit,
    *,
    filtered: bool,
    tasks: str | None = None,
    gone: str | None = None,
) -> str:
    """Return a fingerprint of everything that determines the result of pass 1 for a unit.

    `tasks` is the hash of the tasks of `clean.decontaminate`, `gone` that of the documents of
    another corpus that its selection removes.

    It contains hashes of the files, so another selection of the corpus, or of a later version of
    it, finds the results of the units that did not change.
    """
    files = [
        [corpus.manifest.files[span.file].sha256, span.start, span.stop] for span in unit.spans
    ]
    section = clean.model_dump(mode="json")
    near = clean.near and [clean.near.shingle, *bands_and_rows(clean.near.threshold)]
    filters = {name: section[name] for name in section.keys() - {"exact", "near"}}
    manifest = corpus.manifest
    reading = [manifest.file_format, manifest.text_column, manifest.txt_documents]
    judged = [filters, tasks] if filtered else None
    return fingerprint([VERSION, files, reading, clean.exact, near, judged, gone])


def pass_one(
    clean: CleanConfig,
    placed: PlacedUnit,
    filters: Sequence[Filter],
    tasks: TaskNgrams | None,
    steps: Steps,
    bad: BadDocuments,
) -> None:
    """Read a unit once and write its keys, the sizes of its documents and its filtered documents.

    Empty documents, and those of white space, have no keys: they stay, and are nobody's twin. Nor
    have those that a selection of another corpus removes.
    """
    found = UnitKeys()
    entries: list[npt.NDArray[np.uint64]] = []
    numbers: list[npt.NDArray[np.uint32]] = []
    for documents in _kept(placed, filters, found, bad):
        texts = [text for _, text in documents]
        index = np.array([number for number, _ in documents], np.uint32)
        if tasks is not None:
            _add_hits(documents, tasks, found)
        if clean.exact:
            found.digests.extend(map(_digest, texts))
            found.numbered.extend(index.tolist())
        if clean.near is not None:
            bands, rows = bands_and_rows(clean.near.threshold)
            cut = shingles(texts, clean.near.shingle)
            has = np.unique(cut.document)
            entries.append(band_keys(sketches(cut, len(texts), bands * rows), bands, rows)[has])
            numbers.append(index[has])
            if sum(keys.size for keys in entries) >= RUN_ENTRIES:
                _sort_run(entries, numbers, found)
    _sort_run(entries, numbers, found)
    halves = np.frombuffer(b"".join(found.digests), "<u8").reshape(-1, 2)
    order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable
    steps.write(
        placed.step,
        placed.key,
        {
            "sizes": [np.array(found.sizes, np.uint32)],
            "texts": found.texts,
            "filtered": [encode(found.removed)],
            "exact": [halves[order, 0]],
            "exact-low": [halves[order, 1]],
            "exact-documents": [np.array(found.numbered, np.uint32)[order]],
            "keys": found.keys,
            "documents": found.documents,
            "hits": found.hits,
            "hit": [np.repeat(np.array(found.hit, np.uint32), list(map(len, found.hits)))],
        },
        documents=len(found.sizes),
        runs=[len(run) for run in found.keys],
        unread=bad.count,
        problems=bad.examples,
    )


def _add_hits(documents: list[tuple[int, bytes]], tasks: TaskNgrams, found: UnitKeys) -> None:
    """Add the n-grams of tasks that the documents contain."""
    for number, content in documents:
        hits = tasks.hits(content.decode())
        if len(hits):
            found.hits.append(hits)
            found.hit.append(number)


def columns_of(filters: Sequence[Filter]) -> tuple[str, ...]:
    """Return the columns that the filters read."""
    return tuple(dict.fromkeys(name for judge in filters for name in judge.columns))


def _kept(
    placed: PlacedUnit, filters: Sequence[Filter], found: UnitKeys, bad: BadDocuments
) -> Iterator[list[tuple[int, bytes]]]:
    """Yield the numbers and texts of documents that have text and that all filters keep."""
    corpus, unit, selection = placed.corpus, placed.unit, placed.selection
    gone = set() if selection is None else set(selection.removed(unit.index).tolist())
    columns = columns_of(filters)
    batches: Iterator[list[tuple[bytes, dict[str, Any]]]]
    if columns:
        batches = read_with_columns(corpus, unit, columns, bad, BATCH_BYTES)
    else:
        plain = read_batches(corpus, unit, bad, BATCH_BYTES)
        batches = ([(text, {}) for text in batch] for batch in plain)
    for batch in batches:
        kept = []
        for content, row in batch:
            number = len(found.sizes)
            found.sizes.append(len(content))
            found.texts.append(xxhash.xxh3_128_digest(content))
            removal = _judged(content, row, filters) if filters else None
            if removal is not None:
                found.removed.append(RemovedRow(number, *removal))
            elif content and not content.isspace() and number not in gone:
                kept.append((number, content))
        if kept:
            yield kept
    if selection is not None:
        selection.check_documents(unit.index, len(found.sizes))


def _judged(content: bytes, row: dict[str, Any], filters: Sequence[Filter]) -> Removal | None:
    text = content.decode()
    return next((found for judge in filters if (found := judge(text, row)) is not None), None)


_WHITE = bytes.maketrans(b"\t\n\v\f\r", b"     ")


def _digest(text: bytes) -> bytes:
    """Return the xxh3-128 of a text, in which each run of ASCII white space is a single space."""
    folded = text.translate(_WHITE).strip(b" ")
    if b"  " not in folded:
        return xxhash.xxh3_128_digest(folded)
    content = np.frombuffer(folded, np.uint8)  # four times as fast as split and join
    space = content == ord(" ")
    space[1:] &= space[:-1].copy()
    space[0] = False
    return xxhash.xxh3_128_digest(content[~space].tobytes())


def _sort_run(
    entries: list[npt.NDArray[np.uint64]], numbers: list[npt.NDArray[np.uint32]], found: UnitKeys
) -> None:
    """Move the collected band keys to a sorted run."""
    if not entries:
        return
    keys = np.concatenate([keys.ravel() for keys in entries])
    bands = entries[0].shape[1]
    documents = np.repeat(np.concatenate(numbers), bands)
    order = np.argsort(keys, kind="stable")  # documents with equal keys stay in their order
    found.keys.append(keys[order])
    found.documents.append(documents[order])
    entries.clear()
    numbers.clear()
