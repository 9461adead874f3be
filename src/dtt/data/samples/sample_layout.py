"""Layouts of samples: the pieces of shards that each sample consists of.

`Windows` are cut from the concatenated shards. `Bins` are packed documents, computed once and
cached next to the token files:

    .packing/<key>/first    int64[bins + 1]: index of each bin's first piece; the last entry is
                            the number of pieces
                   start    int64[pieces]: first token of each piece, counted over all shards as
                            one concatenated stream
                   length   int32[pieces]: number of tokens in each piece

and, of conversations (dtt.data.samples.packing),

                   targets  int32[bins]: number of targets in each bin
                   facts.json  PackingCounts: what was packed, and what was left out and why

A piece is a document, or part of one that is longer than a bin; no conversation is divided. The
folder is renamed into place when it is complete. If the folder of the token files is not writable,
the packing is stored in the user's cache folder instead ($XDG_CACHE_HOME or ~/.cache).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dtt.artifacts.manifest import fingerprint
from dtt.base.files import named
from dtt.base.log import log
from dtt.base.reading import read_small
from dtt.data.samples.packing import (
    VERSION,
    Ints,
    Packed,
    Packing,
    PackingCounts,
    TooLong,
    document_bounds,
    pack,
    pack_conversations,
)
from dtt.data.samples.protocol import Counts, SampleNumbers
from dtt.data.samples.token_shards import TokenFiles
from dtt.data.token_file import map_file
from dtt.data.write_once import write_once

COLUMNS = {"first": "<i8", "start": "<i8", "length": "<i4"}
TARGETS, FACTS = "targets", "facts.json"


class ShardPieces(NamedTuple):
    """Pieces of shards and their positions in a batch, one array element per piece.

    Tokens start … start + length - 1 of `shard` go to place … place + length - 1 of the batch's
    flattened ids.
    """

    shard: Ints
    start: Ints
    place: Ints
    length: Ints


class Windows:
    """Fixed-length windows over the concatenation of all shards.

    Sample i is tokens i*T … i*T + T of the stream, T = seq_len. Adjacent samples share one token,
    so every token but the first is a target exactly once, up to the end of the last full window.
    """

    whole_documents = False
    """True if no piece extends beyond one document."""
    packing: PackingCounts | None = None
    """See Bins."""

    def __init__(self, ends: Ints, seq_len: int) -> None:
        """Take `ends` [shards], the end of each shard in the token stream."""
        self._ends = ends
        self._starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
        self._seq_len = seq_len

    def __len__(self) -> int:
        """Return the number of full windows."""
        tokens = int(self._ends[-1]) if len(self._ends) else 0
        return max(0, (tokens - 1) // self._seq_len)

    def pieces(self, samples: SampleNumbers) -> ShardPieces:
        """Return the pieces that make up `samples`."""
        width = self._seq_len + 1
        order = np.argsort(samples)  # searchsorted is five times faster on sorted input
        position = samples[order].astype(np.int64) * self._seq_len
        place = order * width
        missing = np.full(len(samples), width, dtype=np.int64)
        found = []
        while True:
            shard = self._ends.searchsorted(position, side="right")
            length = np.minimum(missing, self._ends[shard] - position)
            found.append((shard, position - self._starts[shard], place, length))
            more = length < missing  # the window continues in the next shard
            if not more.any():
                return ShardPieces(*(np.concatenate(column) for column in zip(*found, strict=True)))
            position, place = (position + length)[more], (place + length)[more]
            missing = (missing - length)[more]

    def counts(self, samples: SampleNumbers) -> Counts:
        """Return the sizes of `samples` without reading them; see `SampleSource.counts`."""
        targets = len(samples) * self._seq_len
        return Counts(targets, targets, targets + len(samples))


class Bins:
    """Documents packed into bins, read from disk."""

    whole_documents = True
    """See Windows."""

    def __init__(self, folder: Path, ends: Ints, capacity: int) -> None:
        """Map the bins in `folder`; `ends` [shards] is the end of each shard in the stream."""
        self._first, self._start, self._length = (
            map_file(folder / column).view(dtype) for column, dtype in COLUMNS.items()
        )
        self._ends, self._capacity = ends, capacity
        self.packing: PackingCounts | None = None
        """Counts of conversations, packed and left out; None for text."""
        if (folder / FACTS).is_file():
            self.packing = PackingCounts.model_validate_json(read_small(folder / FACTS, 2**16))
            self._targets = map_file(folder / TARGETS).view("<i4")

    def __len__(self) -> int:
        """Return the number of bins."""
        return len(self._first) - 1

    def pieces(self, samples: SampleNumbers) -> ShardPieces:
        """See Windows."""
        first = self._first[samples]
        counts = self._first[samples + np.uint64(1)] - first
        # Array arithmetic instead of a loop: a batch has thousands of pieces.
        before = np.cumsum(counts) - counts  # pieces in the rows above
        row = np.repeat(np.arange(len(samples)), counts)
        piece = np.arange(len(row)) + (first - before)[row]
        start, length = self._start[piece], self._length[piece].astype(np.int64)
        place = np.cumsum(length) - length
        place += row * self._capacity - place[before][row]
        shard = self._ends.searchsorted(start, side="right")
        # A piece belongs to the first shard that ends behind its start.
        shard_starts = np.concatenate([[0], self._ends])
        return ShardPieces(shard, start - shard_starts[shard], place, length)

    def counts(self, samples: SampleNumbers) -> Counts:
        """See Windows."""
        tokens = int(self.pieces(samples).length.sum())
        if self.packing is None:
            # Each sample is one token longer than its targets.
            targets = tokens - len(samples)
            return Counts(targets, targets, tokens)
        targets = int(self._targets[samples].sum(dtype=np.int64))
        if not self.packing.pairs:
            return Counts(targets, targets, tokens)
        conversations = self._first[samples + np.uint64(1)] - self._first[samples]
        return Counts(targets, int(conversations.sum()) // 2, tokens)


def bins(files: TokenFiles, ends: Ints, capacity: int, too_long: TooLong, how: Packing) -> Bins:
    """Return the documents of all shards packed into bins of `capacity` tokens.

    `ends` [shards] is the end of each shard in the token stream. Text is packed shard by shard,
    with best fit; conversations, of which there are fewer, over all shards together; with "none",
    each document has a bin of its own. The first process of a node to call this packs the
    documents while the others wait on a file lock.

    Raises ConfigError if `too_long` is `stop` and a conversation is longer than a bin.
    """
    # Versions of shards, not their content, which would have to be read: other files with the same
    # sizes get another packing.
    shards = [(shard.tokens, shard.version) for shard in files.shards]
    parts: list[object] = ["best-fit", capacity, shards]
    if files.are_conversations:
        kind = "pairs" if files.are_pairs else "conversations"
        parts = [kind, VERSION, capacity, too_long, shards]
    if how == "none":
        parts.append(how)  # not in the other keys, which older versions have written

    def write(folder: Path) -> None:
        if files.are_conversations:
            packed, targets, counts = pack_conversations(files, capacity, too_long, how)
            _write_columns(folder, [(packed, 0)])
            # int32: a sample has fewer than 2**31 targets. Half the bytes of int64 are read per
            # step.
            targets.astype("<i4").tofile(folder / TARGETS)
            (folder / FACTS).write_text(counts.model_dump_json(indent=1) + "\n")
            return
        packings = (pack(document_bounds(shard), capacity, how) for shard in files.shards)
        made = _write_columns(folder, zip(packings, [0, *ends.tolist()], strict=False))
        if made:
            full = 100 * int(ends[-1]) / (made * capacity)
            message = "packed %d tokens of %s into %d sequences, %.2f %% full"
            log.info(message, ends[-1], files.path, made, full)

    key = fingerprint(parts)[:16]
    beside = files.path if files.path.is_dir() else files.path.parent
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # Beside the tokens first, where all nodes find it; else in the home of the user.
    places = [beside / ".packing" / key, cache / "dtt" / "packing" / key]
    place = next((one for one in places if one.is_dir()), None)
    if place is None:
        try:
            places[0].parent.mkdir(exist_ok=True)
            writable = os.access(places[0].parent, os.W_OK)
        except OSError:
            writable = False
        place = places[0] if writable else places[1]
        write_once(place, write)
    return Bins(place, ends, capacity)


def _write_columns(folder: Path, packings: Iterable[tuple[Packed, int]]) -> int:
    """Write packings, each with the position of its tokens in the stream; return the bins."""
    bins = pieces = 0
    with named(folder), ExitStack() as stack:
        first, start, length = (stack.enter_context((folder / c).open("wb")) for c in COLUMNS)
        for packed, base in packings:
            first.write((packed.first[:-1] + pieces).astype("<i8").tobytes())
            start.write((packed.start + base).astype("<i8").tobytes())
            length.write(packed.length.astype("<i4").tobytes())
            bins, pieces = bins + len(packed.first) - 1, pieces + len(packed.start)
        first.write(pieces.to_bytes(8, "little"))
    return bins
