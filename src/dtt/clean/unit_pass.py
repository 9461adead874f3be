"""Pass 1: filters, exact keys and band keys of the documents of one unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from dtt.clean.contamination import TaskNgrams
from dtt.clean.filters import Filter, LanguageFilter, QualityRules, WhereFilter
from dtt.clean.removals import RemovedRow, encode
from dtt.clean.shingles import EMPTY, U64, band_keys, bands_and_rows, shingles, sketches
from dtt.clean.steps import Rows, Steps, sorting
from dtt.config.clean import CleanConfig, NearConfig
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.documents import batches, read_batches, read_with_columns
from dtt.data.corpus.units import Corpus, Unit

UNIT_BATCH_BYTES = 2**19
"""Text that is hashed at once: its arrays fit into the processor's cache, which makes it a third
faster than 2 MiB."""
BATCH_DOCUMENTS = 2**11
"""Documents that are hashed at once, for the same reason: a sketch takes 1 kB, however short."""
RUN_ENTRIES = 2**21
"""Band keys that are sorted at once. Units of short documents have several sorted runs of them."""
ENTRY = np.dtype([("key", "<u8"), ("number", "<u8")])
"""A band key and the number of a document in the order of all documents."""
EXACT = np.dtype([("high", "<u8"), ("low", "<u8"), ("number", "<u8")])
"""The xxh3-128 of a text, up to white space, and the number of a document."""
HIT = np.dtype([("document", "<u4"), ("ngram", "<i8")])
"""The number of a document in its unit, and an n-gram of tasks that it contains."""

U32 = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class PlacedUnit:
    """A unit and its results of pass 1."""

    place: int
    """Place in the order of all units, which is in the numbers of its documents."""
    corpus: Corpus
    unit: Unit
    other: int | None = None
    """Number of the corpus in `near.against`; None for the corpus that is cleaned."""

    @property
    def step(self) -> str:
        """Name of its step of pass 1."""
        return f"unit-{self.place:05d}"

    def numbers(self, documents: U32) -> U64:
        """Return the numbers of documents of the unit in the order of all documents."""
        return documents.astype(np.uint64) | np.uint64(self.place << 32)


def make_filters(clean: CleanConfig) -> list[Filter]:
    """Return the filters of the section `clean`, cheap ones first.

    Raises EnvironmentUnfit or ConfigError if the language cannot be identified.
    """
    filters: list[Filter] = list(map(WhereFilter, clean.where))
    if clean.rules:
        filters.append(QualityRules(clean.rules, clean.limits))
    if clean.language is not None:
        filters.append(LanguageFilter(clean.language))
    return filters


def pass_one(
    clean: CleanConfig,
    placed: PlacedUnit,
    filters: Sequence[Filter],
    tasks: TaskNgrams | None,
    steps: Steps,
    bad: BadDocuments,
) -> None:
    """Read a unit once and write its keys, the sizes of its documents and its filtered documents.

    Empty documents, and those of white space, have no keys: they stay, and are nobody's twin.
    """
    files: dict[str, list[Any]] = {name: [] for name in ("sizes", "filtered", "exact", "hits")}
    runs: list[int] = []
    facts: dict[str, Any] = {"runs": runs}

    def read() -> Iterator[Rows]:
        """Yield the band keys of the unit, batch by batch, and fill the other files."""
        exact = [np.empty(0, EXACT)]
        removed: list[RemovedRow] = []
        for numbers, texts in _kept(placed, filters, files, removed, bad):
            if tasks is not None:
                for number, content in zip(numbers.tolist(), texts, strict=True):
                    if len(ngrams := tasks.hits(content.decode())):
                        hits = np.empty(len(ngrams), HIT)
                        hits["document"], hits["ngram"] = number, ngrams
                        files["hits"].append(hits)
            if clean.exact:
                exact.append(_exact_entries(placed.numbers(numbers), texts))
            if clean.near is not None:
                yield _band_entries(placed.numbers(numbers), texts, clean.near)
        entries = np.concatenate(exact)
        files["exact"].append(np.take(entries, sorting(entries["high"])))
        files["filtered"].append(encode(removed))
        facts.update(
            documents=sum(map(len, files["sizes"])), unread=bad.count, problems=bad.examples
        )

    # Runs are written as they come, because the keys of short documents take three times as much
    # space as their text. The order matters: the other files are full when the keys are written.
    steps.write(placed.step, {"keys": _sorted_runs(read(), runs), **files}, facts)


def columns_of(filters: Sequence[Filter]) -> tuple[str, ...]:
    """Return the columns that the filters read."""
    return tuple(dict.fromkeys(name for judge in filters for name in judge.columns))


def _kept(
    placed: PlacedUnit,
    filters: Sequence[Filter],
    files: dict[str, list[Any]],
    removed: list[RemovedRow],
    bad: BadDocuments,
) -> Iterator[tuple[U32, list[bytes]]]:
    """Yield the numbers and texts of documents that have text and that all filters keep.

    Adds the bytes of all documents to `files`, and those that filters remove to `removed`.
    """
    corpus, unit, columns = placed.corpus, placed.unit, columns_of(filters)
    found: Iterator[list[Any]] = (
        read_with_columns(corpus, unit, columns, bad, UNIT_BATCH_BYTES)
        if columns
        else read_batches(corpus, unit, bad, UNIT_BATCH_BYTES)
    )
    first = 0
    for batch in found:
        texts = [content for content, _ in batch] if columns else batch
        size = np.fromiter(map(len, texts), np.uint32, len(texts))
        stays = (size > 0) & ~np.fromiter(map(bytes.isspace, texts), np.bool_, len(texts))
        for place, content in enumerate(texts if filters else ()):
            text, row = content.decode(), batch[place][1] if columns else {}
            removal = next(filter(None, (judge(text, row) for judge in filters)), None)
            if removal is not None:
                removed.append(RemovedRow(first + place, *removal))
                stays[place] = False
        files["sizes"].append(size)
        kept = np.flatnonzero(stays)
        for start in range(0, len(kept), BATCH_DOCUMENTS):
            some = kept[start : start + BATCH_DOCUMENTS]
            yield (first + some).astype(np.uint32), [texts[place] for place in some.tolist()]
        first += len(batch)


_WHITE = bytes.maketrans(b"\t\n\v\f\r", b"     ")


def _exact_entries(numbers: U64, texts: list[bytes]) -> Rows:
    """Return the exact keys of documents.

    A run of ASCII white space counts as a single space. All texts are folded at once, which takes a
    third of the time for short ones.
    """
    texts = [text.strip() for text in texts]
    folded = b" ".join(texts).translate(_WHITE)
    ends = np.cumsum([len(text) + 1 for text in texts])
    content = np.frombuffer(folded, np.uint8)
    again = content == ord(" ")
    again[1:] &= again[:-1].copy()
    if again.any():
        folded = content[~again].tobytes()
        ends -= np.searchsorted(np.flatnonzero(again), ends)
    found = [xxhash.xxh3_128_digest(folded[a : b - 1]) for a, b in pairwise([0, *ends.tolist()])]
    halves = np.frombuffer(b"".join(found), "<u8")
    entries = np.empty(len(texts), EXACT)
    entries["high"], entries["low"], entries["number"] = halves[::2], halves[1::2], numbers
    return entries


def _band_entries(numbers: U64, texts: list[bytes], near: NearConfig) -> Rows:
    """Return the band keys of the documents that have shingles, in the order of documents."""
    bands, rows = bands_and_rows(near.threshold)
    values = sketches(shingles(texts, near.shingle), len(texts), bands * rows)
    has = values[:, 0] != EMPTY
    entries = np.empty((np.count_nonzero(has), bands), ENTRY)
    entries["key"] = band_keys(values[has], bands, rows)
    entries["number"] = numbers[has, None]
    return entries.ravel()


def _sorted_runs(entries: Iterator[Rows], lengths: list[int]) -> Iterator[Rows]:
    """Yield sorted runs of about RUN_ENTRIES entries; add their lengths to `lengths`."""
    for group in batches(entries, RUN_ENTRIES):
        joined = np.concatenate(group)
        lengths.append(len(joined))
        yield np.take(joined, sorting(joined["key"]))  # an index takes twice as long
