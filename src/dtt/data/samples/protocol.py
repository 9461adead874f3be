"""The interface between training and its data: sources of samples of a fixed length."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dtt.artifacts.corpus import CorpusSource
from dtt.artifacts.manifests import ChatFacts

Samples = npt.NDArray[np.uint64]
"""Sample numbers. The number within a source is below 2**SOURCE_SHIFT.

In a mixture, the higher bits are the index of the source.
"""
SOURCE_SHIFT = 48


@dataclass(frozen=True)
class Rows:
    """Samples read from a source, one per row; N samples of S = seq_len targets.

    The target of position t is `ids[:, t + 1]`. The loader (data/samples/loader.py) derives the
    targets of training from these arrays.
    """

    ids: npt.NDArray[np.int64]
    """[N, S + 1]: token ids. IGNORE_INDEX fills the end of a sample that has fewer tokens."""
    loss_mask: npt.NDArray[np.bool_] | None = None
    """[N, S]: False where the target is excluded from the loss, for example the text of a user in a
    conversation; None if no target is excluded."""
    doc_ids: npt.NDArray[np.int32] | None = None
    """[N, S + 1]: index, from 0, of each token's document within its sample; None if the caller did
    not ask for it."""
    reference_logprobs: npt.NDArray[np.float32] | None = None
    """[N, S]: log-probability of each target in nats by the reference model of DPO, 0 where there
    is no target; None without such a model."""


@dataclass(frozen=True)
class DocumentSpan:
    """The part of one document that a sample contains."""

    file: Path
    """File that was read: a `.bin`, or the document's own file."""
    document: int
    """Index of the document in `file`."""
    offset: int
    """Number of tokens of the document before this span."""
    start: int
    """Index in the sample of the span's first token."""
    stop: int
    """Index in the sample one past the span's last token."""


class Source(Protocol):
    """A body of text as samples of `seq_len + 1` tokens.

    A sample has a number that never changes. The order of samples in training is a function of a
    seed and of the position in the sequence.
    """

    name: str
    tokens: int
    """Tokens in an epoch; an estimate if text is tokenized on the fly."""
    bytes_per_token: float | None
    """UTF-8 bytes of text per token, if known."""

    def __len__(self) -> int:
        """Return the number of samples in an epoch; an estimate for text tokenized on the fly."""

    def samples_at(self, first: int, count: int) -> Samples:
        """Return the samples at positions first … first + count - 1 of the shuffled source.

        Positions are counted across epochs. If text is tokenized on the fly, `first` must not be
        smaller than the position of the last `restore`.
        """

    def read(self, samples: Samples, *, with_doc_ids: bool = False) -> Rows:
        """Return the samples, one per row, with document ids if the caller asks for them."""

    def targets(self, samples: Samples) -> int:
        """Return the number of targets in `samples`, which are neither padding nor masked.

        Every rank calls this for the samples of all ranks at each step, so it must not read them: a
        source with a loss mask keeps the number of targets of each sample in an index.
        """

    def pairs(self, samples: Samples) -> int:
        """Return the number of preference pairs in `samples`; 0 for other data.

        Like `targets`, it must not read the samples.
        """

    def tokens_in(self, samples: Samples) -> int:
        """Return the number of tokens in `samples` without padding, and without reading them."""

    def locate(self, sample: int) -> list[DocumentSpan]:
        """Return the documents in a sample, in order."""

    def state(self, consumed: int) -> Any:
        """Return JSON from which `restore` resumes after `consumed` samples; None if not needed."""

    def restore(self, state: Any) -> None:
        """Resume from a state that `state` returned."""


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
    begin_of_document: int | None = None
    """Id of the token before every document; None if there is none, or it is not known."""


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
    chat: ChatFacts | None = None
    """The conversation format; None for plain text."""
