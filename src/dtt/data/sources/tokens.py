"""Samples from token files of any supported format, concatenated or packed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dtt.config.data import SourceConfig
from dtt.data.order import Order
from dtt.data.source import PADDING, Piece, Samples
from dtt.data.sources.bins import bins
from dtt.data.sources.files import Documents, Split, TokenFiles, documents_in, open_files
from dtt.data.sources.ids import MAPPED_SHARDS, ShardIds
from dtt.data.sources.layout import Layout, Pieces, Windows
from dtt.errors import DamagedError


def open_tokens(
    cfg: SourceConfig,
    split: Split,
    *,
    seq_len: int,
    seed: int,
    packing: Literal["concat", "best-fit"] = "concat",
    vocab_size: int | None = None,
    end_of_document: int | None = None,
) -> TokenSource:
    """Open one split of a source; the result has no samples if the source has no such split.

    `vocab_size` and `end_of_document` come from the tokenizer, because files that dtt did not write
    store neither. Raises InputError if no known format is found, DamagedError if files are
    inconsistent or one of their first ids is outside the vocabulary, and ConfigError if `cfg.dtype`
    is not the dtype of the ids.
    """
    if split == "validation" and cfg.validation is not None:
        path, part = cfg.validation, None  # both splits: all of it is held out
    else:
        path, part = cfg.path, split
    files = open_files(
        path,
        part,
        raw_dtype=cfg.dtype,
        end_of_document=end_of_document,
        vocab_size=vocab_size,
    )
    return TokenSource(
        cfg.label,
        files,
        seq_len=seq_len,
        key=f"{seed}/{cfg.label}",
        packing=packing,
        vocab_size=vocab_size if files.manifest is None else files.manifest.vocab_size,
        end_of_document=end_of_document,
    )


class TokenSource:
    """Source of samples from token files. Implements dtt.data.source.Source.

    A shard is opened when one of its samples is first read.
    """

    def __init__(
        self,
        name: str,
        files: TokenFiles,
        *,
        seq_len: int,
        key: str,
        packing: Literal["concat", "best-fit"] = "concat",
        vocab_size: int | None = None,
        end_of_document: int | None = None,
    ) -> None:
        """Prepare samples of `seq_len + 1` tokens, in the order derived from `key`.

        If `vocab_size` is given, `read` checks all ids against it.
        """
        self.name, self.files = name, files
        self.bytes_per_token = files.bytes_per_token
        ends = np.cumsum([shard.tokens for shard in files.shards], dtype=np.int64)
        self.tokens = int(ends[-1]) if len(ends) else 0
        self._layout: Layout = (
            Windows(ends, seq_len) if packing == "concat" else bins(files, ends, seq_len + 1)
        )
        self._order = Order(key, len(self._layout))
        self._width = seq_len + 1
        self._vocab_size = vocab_size
        self._end = _end_in_the_ids(files, end_of_document)
        self._ids = ShardIds(files.shards)
        self._documents: dict[int, Documents] = {}

    def __len__(self) -> int:
        """Return the number of samples in an epoch."""
        return len(self._layout)

    def samples_at(self, first: int, count: int) -> Samples:
        """See Source."""
        return self._order.samples_at(first, count)

    def read(self, samples: Samples) -> npt.NDArray[np.int64]:
        """See Source. Raises DamagedError for an id outside the vocabulary."""
        pieces = self._layout.pieces(samples)
        rows = np.empty((len(samples), self._width), dtype=np.int64)
        if pieces.length.sum() < rows.size:
            rows.fill(PADDING)
        self._ids.read(pieces, rows)
        if self._vocab_size is not None and rows.size:
            self._check(rows.reshape(-1), pieces, self._vocab_size)
        return rows

    def documents(self, samples: Samples, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """See Source. The token that ends a document belongs to it."""
        begins = np.zeros(ids.shape, dtype=np.int32)
        if self._end is not None and not self._layout.whole_documents:
            np.equal(ids[:, :-1], self._end, out=begins[:, 1:], casting="unsafe")
        else:
            pieces, flat = self._layout.pieces(samples), begins.reshape(-1)
            flat[pieces.place] = 1
            begins[:, 0] = 0
            if not self._layout.whole_documents:
                for shard, start, place, length in zip(*(x.tolist() for x in pieces), strict=True):
                    _, starts = documents_in(self._documents_of(shard), start, start + length)
                    flat[starts[1:] + (place - start)] = 1
        return np.cumsum(begins, axis=1, dtype=np.int32)

    def targets(self, samples: Samples) -> int:
        """See Source."""
        return self._layout.targets(samples)

    def locate(self, sample: int) -> list[Piece]:
        """See Source."""
        pieces = self._layout.pieces(np.array([sample], dtype=np.uint64))
        found = []
        for shard, start, place, length in zip(*(x.tolist() for x in pieces), strict=True):
            first, starts = documents_in(self._documents_of(shard), start, start + length)
            file, bounds = self.files.shards[shard].path, [*starts.tolist(), start + length]
            for document, (begin, end) in enumerate(pairwise(bounds), first):
                at = max(begin, start)
                if at < end:
                    to = place - start
                    found.append(Piece(file, document, at - begin, to + at, to + end))
        return found

    def state(self, consumed: int) -> Any:
        """Return None, because the order depends on the place alone."""

    def restore(self, state: Any) -> None:
        """Do nothing: there is no state."""

    def _documents_of(self, shard: int) -> Documents:
        found = self._documents.get(shard)
        if found is None:
            if len(self._documents) >= MAPPED_SHARDS:
                del self._documents[next(iter(self._documents))]
            found = self._documents[shard] = self.files.shards[shard].documents()
        return found

    def _check(self, ids: npt.NDArray[np.int64], pieces: Pieces, vocab_size: int) -> None:
        if ids.view(np.uint64).max() < vocab_size:  # as uint64, negative ids are large
            return
        wrong = np.flatnonzero((ids >= vocab_size) | ((ids < 0) & (ids != PADDING)))
        if not len(wrong):
            return
        place = int(wrong[0])
        piece = int(np.argmax((pieces.place <= place) & (place < pieces.place + pieces.length)))
        raise DamagedError(
            f"a token id lies outside the vocabulary of {vocab_size}",
            where=f"{self.files.shards[int(pieces.shard[piece])].path}, "
            f"token {int(pieces.start[piece]) + place - int(pieces.place[piece])}",
            why=f"it is {ids[place]}",
            next="check that data.tokenizer made these files, and that their dtype is right",
        )


def _end_in_the_ids(files: TokenFiles, end_of_document: int | None) -> int | None:
    """Return the id that ends each document; None if it is unknown.

    None also stands for files of other programs with an index, which stores the boundaries.
    """
    if files.manifest is not None:
        return files.manifest.end_of_document
    return None if files.has_index else end_of_document
