"""Inspection of token ids in any format that training reads.

Of large data, a few evenly spread parts are read. A document is counted in the part that contains
its end, so that long documents are sampled with the same probability as short ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dtt.base.errors import DamagedError
from dtt.data.inspect.report import ODDITIES_SHOWN, Sample, spread
from dtt.data.samples.token_shards import DocumentBounds, DocumentEnds, Shard
from dtt.data.token_file import TokenFile, Tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PLACE_TOKENS = 2**20
PLACES = 32
SHOWN_TOKENS = 64


def count(documents: DocumentBounds) -> int:
    """Return the number of documents."""
    match documents:
        case TokenFile():
            return len(documents.documents) - 1
        case DocumentEnds():
            return len(documents.ends)
        case _:
            raise TypeError(type(documents))


def places(sizes: list[int], *, everything: bool) -> Iterator[tuple[int, int, int]]:
    """Yield (file, start, stop) of the tokens to read, given the number of tokens in each file."""
    starts = np.cumsum([0, *sizes], dtype=np.int64)
    total = int(starts[-1])
    if everything or total <= PLACES * PLACE_TOKENS:
        for file, size in enumerate(sizes):
            for start in range(0, max(size, 1), PLACE_TOKENS):
                yield file, start, min(start + PLACE_TOKENS, size)
        return
    for first in np.linspace(0, total - PLACE_TOKENS, PLACES).astype(np.int64).tolist():
        file = int(np.searchsorted(starts, first, side="right")) - 1
        start = first - int(starts[file])
        yield file, start, min(start + PLACE_TOKENS, sizes[file])


@dataclass
class IdStatistics:
    """Running statistics of the ids read so far."""

    vocab_size: int | None
    end: int | None
    """Id that ends documents; None if unknown."""
    tokens: int = 0
    largest: int | None = None
    outside: int = 0
    """Number of ids that are negative or not below `vocab_size`."""
    examples: list[str] = field(default_factory=list)
    """Locations of the first ids outside the vocabulary."""
    measured: list[Tokens] = field(default_factory=list)
    """Lengths of documents."""
    last: Counter[int] = field(default_factory=Counter)
    """Number of documents by their last id."""
    beginnings: list[tuple[str, list[int]]] = field(default_factory=list)
    """Location and first ids of one document per part."""

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[documents]: tokens of each document."""
        return np.concatenate([np.empty(0, dtype=np.int64), *self.measured])

    def read(self, shard: Shard, documents: DocumentBounds | None, start: int, stop: int) -> None:
        """Read tokens start … stop - 1 of a shard, and count the documents that end there.

        `documents` is None if the document boundaries are unknown; then no documents are counted.
        Raises DamagedError if the shard is too short, or its documents are not contiguous.
        """
        ids = _ids(shard, start, stop)
        self.tokens += len(ids)
        if len(ids):
            self.largest = max(self.largest or 0, int(ids.max()))
        if self.vocab_size is not None:
            self._check(shard, start, ids)
        if documents is None:
            where = f"{shard.path.name}, token {start}"
            self.beginnings.append((where, ids[:SHOWN_TOKENS].tolist()))
            return
        # A document ends where the next one starts.
        first = documents.starting_after(start) - 1 if start else 0
        last = count(documents) if stop == shard.tokens else documents.starting_after(stop) - 1
        if last > first:
            self._documents(shard, first, documents.starts(first, last + 1), start, ids)

    def _check(self, shard: Shard, start: int, ids: Tokens) -> None:
        wrong = np.flatnonzero((ids < 0) | (ids >= self.vocab_size))
        self.outside += len(wrong)
        for at in wrong[: ODDITIES_SHOWN - len(self.examples)].tolist():
            self.examples.append(f"{shard.path.name}, token {start + at}: {ids[at]}")

    def _documents(self, shard: Shard, first: int, starts: Tokens, at: int, ids: Tokens) -> None:
        """Count the documents from `first` on.

        `starts` holds their first tokens, then the end of the last one. `ids` are the shard's ids
        from token `at` on and contain the last id of each document.
        """
        lengths = np.diff(starts)
        if lengths.min() < 0 or not at <= starts[1] <= starts[-1] <= at + len(ids):
            raise DamagedError(
                "the index does not match its ids",
                where=shard.path,
                why=f"documents {first} … {first + len(lengths) - 1} do not follow one another",
            )
        self.measured.append(lengths)
        filled = np.flatnonzero(lengths)
        values, counts = np.unique(ids[starts[filled + 1] - 1 - at], return_counts=True)
        self.last.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        if filled.size:
            shown = int(filled[-1])
            begin, end = int(starts[shown]), int(starts[shown + 1])
            where = f"{shard.path.name}, document {first + shown}"
            beginning = _ids(shard, begin, min(end, begin + SHOWN_TOKENS))
            self.beginnings.append((where, beginning.tolist()))

    def samples(self, number: int, decode: Callable[[list[int]], str]) -> list[Sample]:
        """Return the decoded starts of up to `number` documents, spread evenly."""
        found = spread(self.beginnings, number)
        return [{"where": where, "text": decode(ids)} for where, ids in found]

    def end_of_documents(self) -> tuple[int, int] | None:
        """Return the id that ends documents, and the number of documents that end with it.

        If that id is unknown, return the most frequent last id if it ends more than half of the
        documents, otherwise None.
        """
        if not self.last:
            return None
        end = self.last.most_common(1)[0][0] if self.end is None else self.end
        found = self.last[end]
        return (end, found) if self.end is not None or 2 * found > self.last.total() else None

    def end_facts(self, tokenizer: Tokenizer | None) -> dict[str, object] | None:
        """Return the id that ends documents, its token, and how many documents end with it."""
        found = self.end_of_documents()
        if found is None:
            return None
        end, documents = found
        token = None if tokenizer is None else tokenizer.id_to_token(end)
        return {"id": end, "token": token, "documents": documents, "of": self.last.total()}

    def oddities(self) -> Iterator[str]:
        """Yield a line for each anomaly in the ids and documents."""
        if self.outside:
            yield f"ids outside the vocabulary of {self.vocab_size:,}: {self.outside:,}"
            yield from self.examples
        if empty := int((self.lengths == 0).sum()):
            yield f"empty documents: {empty:,}"
        found = self.end_of_documents()
        if found is None and self.last:
            yield "no id ends most documents: training cannot tell where they end"
        elif found is not None and (unended := self.last.total() - found[1]) > 0:
            yield f"documents that do not end with id {found[0]}: {unended:,}"


def _ids(shard: Shard, start: int, stop: int) -> Tokens:
    """Return tokens start … stop - 1 of a shard.

    Reads the file sequentially: the memory map of training is tuned for scattered access.
    """
    dtype = np.dtype(shard.dtype)
    offset = shard.offset + start * dtype.itemsize
    ids: Tokens = np.fromfile(shard.path, dtype=dtype, count=stop - start, offset=offset)
    if len(ids) < stop - start:
        raise DamagedError(
            "a token file is shorter than it should be",
            where=shard.path,
            why=f"{start + len(ids)} tokens, the index says {shard.tokens}",
        )
    return ids
