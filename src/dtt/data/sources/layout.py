"""How samples are made of shards: pieces of theirs, one after another."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dtt.data.source import Samples

Ints = npt.NDArray[np.int64]


class Pieces(NamedTuple):
    """Tokens start … start + length - 1 of a shard, for place … of a batch's ids in a row."""

    shard: Ints
    start: Ints
    place: Ints
    length: Ints


class Layout(Protocol):
    """What each sample is made of."""

    whole_documents: bool
    """Whether no piece reaches beyond one document."""

    def __len__(self) -> int:
        """Number of samples."""

    def pieces(self, samples: Samples) -> Pieces:
        """What `samples` are made of."""

    def targets(self, samples: Samples) -> int:
        """Their tokens that have one before them in the sample."""


class Windows:
    """Windows over all shards as one long stream of documents.

    Sample i is tokens i*T … i*T + T of the stream: neighbours share one token, and every token but
    the first is a target exactly once, up to the end of the last whole window.
    """

    whole_documents = False

    def __init__(self, ends: Ints, seq_len: int) -> None:
        """`ends` [shards]: where each shard ends in the stream."""
        self._ends = ends
        self._starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
        self._seq_len = seq_len

    def __len__(self) -> int:
        """Number of whole windows."""
        tokens = int(self._ends[-1]) if len(self._ends) else 0
        return max(0, (tokens - 1) // self._seq_len)

    def pieces(self, samples: Samples) -> Pieces:
        """See Layout."""
        width = self._seq_len + 1
        order = np.argsort(samples)  # ascending positions are searched in a fifth of the time
        position = samples[order].astype(np.int64) * self._seq_len
        place = order * width
        missing = np.full(len(samples), width, dtype=np.int64)
        found = []
        while True:
            shard = self._ends.searchsorted(position, side="right")
            length = np.minimum(missing, self._ends[shard] - position)
            found.append((shard, position - self._starts[shard], place, length))
            more = length < missing  # goes on in the next shard
            if not more.any():
                return Pieces(*(np.concatenate(column) for column in zip(*found, strict=True)))
            position, place = (position + length)[more], (place + length)[more]
            missing = (missing - length)[more]

    def targets(self, samples: Samples) -> int:
        """See Layout."""
        return len(samples) * self._seq_len
