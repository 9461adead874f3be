"""What training reads from: samples of a fixed length, whatever lies behind them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dtt.artifacts import CorpusSource

Samples = npt.NDArray[np.uint64]
"""Numbers of samples: a source's own below 2**SOURCE_SHIFT, a mixture's with the source above."""
SOURCE_SHIFT = 48
PADDING = -100
"""In place of an id: no token. As a target it is ignored by the loss."""


@dataclass(frozen=True)
class Piece:
    """A part of one document inside a sample, for people who ask what a step saw."""

    file: Path
    """What was read: a `.bin`, or the document's own file."""
    document: int
    """Number of the document in `file`."""
    offset: int
    """Tokens of the document before this piece."""
    start: int
    """Place in the sample of the piece's first token …"""
    stop: int
    """… and one past its last."""


class Source(Protocol):
    """One body of text as samples of `seq_len + 1` tokens: inputs, and targets one further on.

    A sample is named by a number that stays the same for ever; the order in which training sees
    them is a function of a seed and of how many came before.
    """

    name: str
    tokens: int
    """Tokens in an epoch; an estimate where they are made on the way."""
    bytes_per_token: float | None
    """UTF-8 bytes of text per token, where known."""

    def __len__(self) -> int:
        """Samples in an epoch; an estimate where they are made on the way."""

    def samples_at(self, first: int, count: int) -> Samples:
        """The samples at places first … first + count - 1 of this source's order, epoch by epoch.

        Where samples are made on the way, `first` never goes back behind the last `restore`.
        """

    def read(self, samples: Samples) -> npt.NDArray[np.int64]:
        """Ids [len(samples), seq_len + 1]; PADDING after the last token of a short sample."""

    def documents(self, samples: Samples, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Which document of its sample each id of `read(samples)` is in, counted from 0."""

    def targets(self, samples: Samples) -> int:
        """How many targets that are not PADDING these samples have, without reading them."""

    def locate(self, sample: int) -> list[Piece]:
        """The documents of a sample, in order."""

    def state(self, consumed: int) -> Any:
        """JSON from which `restore` goes on after `consumed` samples; None where none is needed."""

    def restore(self, state: Any) -> None:
        """Go on where `state` was taken."""


@dataclass(frozen=True)
class Vocabulary:
    """What the numbers of tokens mean."""

    tokenizer: Path
    """A tokenizer.json."""
    sha256: str
    size: int
    end_of_document: int
    """Id of the token after every document."""


@dataclass(frozen=True)
class Opened:
    """A configured source, ready to be read."""

    train: Source
    validation: Source | None
    """None when nothing is held out, or too little for one sample."""
    key: str
    """Identity of the content, wherever it lies."""
    vocabulary: Vocabulary
    corpus: CorpusSource | None
    """Where the documents came from, where known."""
