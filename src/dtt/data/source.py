"""The interface between training and its data: sources of samples of a fixed length."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dtt.artifacts import CorpusSource

Samples = npt.NDArray[np.uint64]
"""Sample numbers. The number within a source is below 2**SOURCE_SHIFT.

In a mixture, the higher bits are the index of the source.
"""
SOURCE_SHIFT = 48
PADDING = -100
"""Value that marks a missing token; the loss ignores targets with this value."""


@dataclass(frozen=True)
class Piece:
    """A part of one document inside a sample, to show which documents a step was trained on."""

    file: Path
    """File that was read: a `.bin`, or the document's own file."""
    document: int
    """Index of the document in `file`."""
    offset: int
    """Number of tokens of the document before this piece."""
    start: int
    """Index in the sample of the piece's first token."""
    stop: int
    """Index in the sample one past the piece's last token."""


class Source(Protocol):
    """A body of text as samples of `seq_len + 1` tokens; targets are the inputs shifted by one.

    A sample has a number that never changes. The order of samples in training is a function of a
    seed and of the place in the sequence.
    """

    name: str
    tokens: int
    """Tokens in an epoch; an estimate if text is tokenized on the fly."""
    bytes_per_token: float | None
    """UTF-8 bytes of text per token, if known."""

    def __len__(self) -> int:
        """Return the number of samples in an epoch; an estimate for text tokenized on the fly."""

    def samples_at(self, first: int, count: int) -> Samples:
        """Return the samples at places first … first + count - 1 of this source's shuffled order.

        Places are counted across epochs. If text is tokenized on the fly, `first` must not be
        smaller than the place of the last `restore`.
        """

    def read(self, samples: Samples) -> npt.NDArray[np.int64]:
        """Return token ids [len(samples), seq_len + 1].

        PADDING fills the rest of a sample that is shorter than seq_len + 1.
        """

    def documents(self, samples: Samples, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Return the document index, within its sample, of each id of `read(samples)`, from 0."""

    def targets(self, samples: Samples) -> int:
        """Return the number of targets that are not PADDING, without reading the samples."""

    def locate(self, sample: int) -> list[Piece]:
        """Return the pieces of documents in a sample, in order."""

    def state(self, consumed: int) -> Any:
        """Return JSON from which `restore` resumes after `consumed` samples; None if not needed."""

    def restore(self, state: Any) -> None:
        """Resume from what `state` returned."""


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary of a source: its tokenizer, size and end-of-document token."""

    tokenizer: Path
    """Path of the tokenizer.json."""
    sha256: str
    """sha256 of the tokenizer.json."""
    size: int
    """Largest id + 1."""
    end_of_document: int
    """Id of the token after every document."""


@dataclass(frozen=True)
class Opened:
    """A configured source that has been opened for reading."""

    train: Source
    validation: Source | None
    """Held-out text; None if there is none, or too little for one sample."""
    key: str
    """Fingerprint of the content, independent of its location."""
    vocabulary: Vocabulary
    corpus: CorpusSource | None
    """Origin of the documents, if known."""
