"""Samples from token files of any supported format, concatenated or packed."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dtt.base.errors import DamagedError, InputError
from dtt.base.log import log
from dtt.base.targets import IGNORE_INDEX
from dtt.config.sources import SourceConfig
from dtt.data.samples.packing import Packing, TooLong
from dtt.data.samples.protocol import (
    Counts,
    DocumentSpan,
    SampleNumbers,
    SampleRows,
    count_targets,
    targets_of,
)
from dtt.data.samples.sample_layout import Bins, ShardPieces, Windows, bins
from dtt.data.samples.shuffle import Order
from dtt.data.samples.token_shards import (
    DocumentBounds,
    Shard,
    TokenFiles,
    documents_in,
    open_files,
    spans_in,
)
from dtt.data.token_file import Tokens, map_file
from dtt.data.tokenize.markers import Split

LOOKED_AT, LOOKED_AT_IDS = 1000, 2**20
"""Number of documents, or of ids without an index, in which the token that ends them must occur."""
# Each map holds a file descriptor. All of them stay below 1,024, whatever the limit is: C libraries
# that call select() write past its table for a higher one. The caches are shared by all sources. A
# shard beyond them is mapped again for each piece of a sample, which takes 20 to 40 µs instead of
# 2: a tenth of the speed, but still 26 million tokens per CPU second.
_LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # -1 if there is none
MAPPED_SHARDS = 256 if _LIMIT < 0 else min(256, _LIMIT // 4)


@lru_cache(MAPPED_SHARDS)
def ids_of(shard: Shard) -> Tokens:
    """Return the ids of a shard, memory-mapped.

    A shard that the cache drops stays mapped as long as a thread reads from it. Raises InputError
    for a missing file, DamagedError for one that is too short or too long.
    """
    try:
        content = map_file(shard.path, random=True)
    except FileNotFoundError:
        raise InputError("a token file is missing", where=shard.path) from None
    # A file that shrank since would end the process with SIGBUS when its pages are read.
    if len(content) != shard.offset + shard.tokens * shard.id_bytes:
        raise DamagedError(
            "a token file is shorter or longer than it should be",
            where=shard.path,
            why=f"{len(content)} bytes for {shard.tokens} tokens of {shard.dtype}",
        )
    return content[shard.offset :].view(shard.dtype)


@lru_cache(MAPPED_SHARDS // 4)
def documents_of(shard: Shard) -> DocumentBounds:
    """Return the document boundaries of a shard."""
    return shard.documents()


def warn_of_missing_ends(files: TokenFiles, end_of_document: int) -> None:
    """Log a warning if most documents of another program's files lack the token that ends them.

    Without it, a model trains on the documents as on one text and never learns to stop. Looks at
    the first documents, or at the first ids of files without an index.
    """
    shard = next(iter(files.shards), None)
    if shard is None or not shard.tokens:
        return
    ids = np.memmap(shard.path, shard.dtype, "r", shard.offset, (shard.tokens,))
    if files.has_index:
        # A document ends where the next one starts; empty ones do not count.
        starts = shard.documents().starts(0, LOOKED_AT + 1)
        ends = np.unique(np.append(starts[starts > 0], shard.tokens))[:LOOKED_AT]
        found, looked = int((ids[ends - 1] == end_of_document).sum()), len(ends)
        what = f"{looked - found:,} of the first {looked:,} documents do not end with id"
        remedy = "data.mask_documents=true keeps them apart all the same"
    else:
        found, looked = int((ids[:LOOKED_AT_IDS] == end_of_document).sum()), 1
        what = f"the first {min(shard.tokens, LOOKED_AT_IDS):,} ids do not have id"
        remedy = "write it behind each document, or dtt tokenize the text"
    if 2 * found < looked:
        log.warning(
            "%s: %s %d, the end-of-document token: documents are trained as one text, and the "
            "model does not learn to end one. If another token ends them, name the tokenizer of "
            "the files in data.tokenizer; else %s",
            files.path, what, end_of_document, remedy,
        )  # fmt: skip


class TokenSource:
    """Source of samples from token files. Implements dtt.data.samples.protocol.SampleSource.

    A shard is opened when one of its samples is first read.
    """

    def __init__(
        self,
        cfg: SourceConfig,
        split: Split,
        *,
        seed: int,
        seq_len: int,
        packing: Packing = "concat",
        too_long: TooLong = "drop",
        vocab_size: int | None = None,
        end_of_document: int | None = None,
        doc_ids: bool = True,
        eod_mask_loss: bool = False,
    ) -> None:
        """Open one split of a source; there are no samples if the source has no such split.

        Samples have `seq_len + 1` tokens. Conversations are never cut into windows, whatever
        `packing` is; `too_long` is what happens to those longer than a sample. `vocab_size` and
        `end_of_document` come from the tokenizer, because files that dtt did not write store
        neither; `read` checks all ids against the former. With `doc_ids`, it returns them. With
        `eod_mask_loss`, the first token of a document is no target.

        Raises InputError if no known format is found, DamagedError if files are inconsistent, and
        ConfigError if `cfg.dtype` is not the dtype of the ids.
        """
        part: Split | None = split
        path = cfg.path
        if split == "validation" and isinstance(cfg.validation, Path):
            path, part = cfg.validation, None  # both splits: all of it is held out
        self.files = files = open_files(
            path,
            part,
            raw_dtype=cfg.dtype,
            end_of_document=end_of_document,
            vocab_size=vocab_size,
        )
        if split == "train" and files.manifest is None and end_of_document is not None:
            warn_of_missing_ends(files, end_of_document)
        self.name = cfg.label
        self.bytes_per_token = files.bytes_per_token
        ends = np.cumsum([shard.tokens for shard in files.shards], dtype=np.int64)
        self.tokens = int(ends[-1]) if len(ends) else 0
        self._masks: list[Shard] | None = None
        self._layout: Windows | Bins = Windows(ends, seq_len)
        if packing != "concat" or files.are_conversations:
            self._layout = bins(files, ends, seq_len + 1, too_long, packing)
        self.packing_counts = self._layout.packing
        """Counts of conversations, packed and left out; None for text."""
        if self.packing_counts is not None:
            self.tokens = self.packing_counts.tokens
            # The loss mask of a shard is read as another one, of bytes.
            masks = [(shard, shard.mask) for shard in files.shards]
            self._masks = [replace(shard, path=mask, dtype="|u1") for shard, mask in masks if mask]
        self._shuffle = Order(f"{seed}/{self.name}", len(self._layout))
        self._width = seq_len + 1
        self._with_doc_ids, self._eod_mask_loss = doc_ids, eod_mask_loss
        self._extra: dict[str, npt.NDArray[Any]] = {}
        self._rows: tuple[str, npt.NDArray[np.int64]] | None = None

    def with_extra(self, name: str, values: npt.NDArray[Any]) -> TokenSource:
        """Return this source with further values of its targets, [samples, S]."""
        return self._with(_extra=self._extra | {name: values})

    def with_doc_ids(self) -> TokenSource:
        """Return this source, whose rows have document ids."""
        return self._with(_with_doc_ids=True)

    def made_from(self, name: str, rows: npt.NDArray[np.int64]) -> TokenSource:
        """Return this source, whose documents are these `rows` [documents] of a user's class."""
        return self._with(_rows=(name, rows))

    def _with(self, **attributes: Any) -> TokenSource:
        source = copy(self)
        vars(source).update(attributes)
        return source

    def __len__(self) -> int:
        """Return the number of samples in an epoch."""
        return len(self._layout)

    def order(self, first: int, count: int) -> SampleNumbers:
        """See SampleSource."""
        return self._shuffle.order(first, count)

    def shards_of(self, samples: SampleNumbers) -> list[Shard]:
        """Return the shards that contain these samples."""
        return [self.files.shards[i] for i in np.unique(self._layout.pieces(samples).shard)]

    def read(self, samples: SampleNumbers) -> SampleRows:
        """See SampleSource. Raises DamagedError for an id outside the vocabulary."""
        pieces = self._layout.pieces(samples)
        ids = np.empty((len(samples), self._width), dtype=np.int64)
        if pieces.length.sum() < ids.size:
            ids.fill(IGNORE_INDEX)
        _copy(self.files.shards, pieces, ids)
        if self.files.vocab_size is not None and ids.size:
            self._check(ids.reshape(-1), pieces, self.files.vocab_size)
        mask = doc_ids = None
        if self._masks is not None:
            marks = np.zeros(ids.shape, dtype=np.uint8)
            _copy(self._masks, pieces, marks)
            # A conversation's first token would be predicted from another one.
            marks.reshape(-1)[pieces.place] = 0
            mask = marks[:, 1:].astype(np.bool_)
        if self._with_doc_ids or self._eod_mask_loss:
            doc_ids = self._doc_ids(ids, pieces)
        return SampleRows(
            ids,
            targets_of(ids, mask, doc_ids if self._eod_mask_loss else None),
            doc_ids if self._with_doc_ids else None,
            {name: values[samples] for name, values in self._extra.items()},
        )

    def counts(self, samples: SampleNumbers) -> Counts:
        """See SampleSource. With `eod_mask_loss`, the samples are read: it depends on their ids."""
        counts = self._layout.counts(samples)
        if not self._eod_mask_loss:
            return counts
        targets = count_targets(self.read, samples)
        return counts._replace(targets=targets, terms=targets)

    def _doc_ids(self, ids: npt.NDArray[np.int64], pieces: ShardPieces) -> npt.NDArray[np.int32]:
        """Return the document ids of samples that consist of `pieces`.

        The token that ends a document belongs to it.
        """
        begins = np.zeros(ids.shape, dtype=np.int32)
        if self.files.end_of_document is not None and not self._layout.whole_documents:
            np.equal(ids[:, :-1], self.files.end_of_document, out=begins[:, 1:], casting="unsafe")
        else:
            flat = begins.reshape(-1)
            flat[pieces.place] = 1
            begins[:, 0] = 0
            if not self._layout.whole_documents:
                for shard, start, place, length in zip(*(x.tolist() for x in pieces), strict=True):
                    _, starts = documents_in(
                        documents_of(self.files.shards[shard]), start, start + length
                    )
                    flat[starts[1:] + (place - start)] = 1
        return np.cumsum(begins, axis=1, dtype=np.int32)

    def origin(self, sample: int) -> list[DocumentSpan]:
        """See SampleSource."""
        pieces = self._layout.pieces(np.array([sample], dtype=np.uint64))
        found = []
        for shard, start, place, length in zip(*(x.tolist() for x in pieces), strict=True):
            opened = self.files.shards[shard]
            parts = spans_in(documents_of(opened), start, start + length, place)
            found += [DocumentSpan(opened.path, *part) for part in parts]
        if self._rows is None:
            return found
        name, rows = self._rows
        return [s._replace(file=Path(name), document=int(rows[s.document])) for s in found]

    def _check(self, ids: npt.NDArray[np.int64], pieces: ShardPieces, vocab_size: int) -> None:
        if ids.view(np.uint64).max() < vocab_size:  # as uint64, negative ids are large
            return
        wrong = np.flatnonzero((ids >= vocab_size) | ((ids < 0) & (ids != IGNORE_INDEX)))
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


def _copy(shards: Sequence[Shard], pieces: ShardPieces, rows: npt.NDArray[Any]) -> None:
    """Copy each piece to its place in `rows` [samples, tokens], which must be contiguous."""
    flat = rows.reshape(-1)
    for shard, start, place, length in zip(*(x.tolist() for x in pieces), strict=True):
        flat[place : place + length] = ids_of(shards[shard])[start : start + length]
