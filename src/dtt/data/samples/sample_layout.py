"""Layouts of samples: the pieces of shards that each sample consists of."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dtt.data.samples.protocol import Counts, SampleNumbers

Ints = npt.NDArray[np.int64]


class ShardPieces(NamedTuple):
    """Pieces of shards and their positions in a batch, one array element per piece.

    Tokens start … start + length - 1 of `shard` go to place … place + length - 1 of the batch's
    flattened ids.
    """

    shard: Ints
    start: Ints
    place: Ints
    length: Ints


class SampleLayout(Protocol):
    """Mapping from samples to pieces of shards."""

    whole_documents: bool
    """True if no piece extends beyond one document."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def pieces(self, samples: SampleNumbers) -> ShardPieces:
        """Return the pieces that make up `samples`."""

    def counts(self, samples: SampleNumbers) -> Counts:
        """Return the sizes of `samples` without reading them; see `SampleSource.counts`."""


class Windows:
    """Fixed-length windows over the concatenation of all shards.

    Sample i is tokens i*T … i*T + T of the stream, T = seq_len. Adjacent samples share one token,
    so every token but the first is a target exactly once, up to the end of the last full window.
    """

    whole_documents = False

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
        """See SampleLayout."""
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
        """See SampleLayout."""
        targets = len(samples) * self._seq_len
        return Counts(targets, targets, targets + len(samples))
