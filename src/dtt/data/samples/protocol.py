"""The interface between training and its data: sources of samples of a fixed length."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from dtt.artifacts.corpus import CorpusSource
from dtt.artifacts.manifests import ChatFacts
from dtt.base.errors import InputError
from dtt.base.files import sha256_file
from dtt.base.reading import read_whole
from dtt.base.targets import IGNORE_INDEX
from dtt.data.text.encoder import Encoder

SampleNumbers = npt.NDArray[np.uint64]
"""Sample numbers. The number within a source is below 2**SOURCE_SHIFT.

In a mixture, the higher bits are the index of the source.
"""
SOURCE_SHIFT = 48


@dataclass(frozen=True)
class SampleRows:
    """Samples read from a source, one per row; N samples of S = seq_len targets."""

    ids: npt.NDArray[np.int64]
    """[N, S + 1]: token ids. IGNORE_INDEX fills the end of a sample that has fewer tokens."""
    targets: npt.NDArray[np.int64]
    """[N, S]: the id to predict after each token but the last: the next one, or IGNORE_INDEX where
    it is padding or excluded from the loss, for example the text of a user in a conversation."""
    doc_ids: npt.NDArray[np.int32] | None = None
    """[N, S + 1]: index, from 0, of each token's document within its sample; None if attention
    crosses document boundaries."""
    extra: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """[N, S] each: further values of the targets that an objective needs, by name."""


class Counts(NamedTuple):
    """Sizes of some samples."""

    targets: int
    """Targets of the loss, which are neither padding nor masked."""
    terms: int
    """Terms that the loss is the mean of: the targets, or the pairs of preference data."""
    tokens: int
    """Tokens without padding."""


class DocumentSpan(NamedTuple):
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


class SampleSource(Protocol):
    """A body of text as samples of `seq_len + 1` tokens.

    A sample has a number that never changes. The order of samples in training is a function of a
    seed and of the position in the sequence. `tests/contracts/test_samples.py` checks each source.
    """

    name: str
    tokens: int
    """Tokens in an epoch; an estimate if text is tokenized on the fly."""
    bytes_per_token: float | None
    """UTF-8 bytes of text per token, if known."""

    def __len__(self) -> int:
        """Return the number of samples in an epoch; an estimate for text tokenized on the fly."""

    def order(self, first: int, count: int) -> SampleNumbers:
        """Return the samples at positions first … first + count - 1 of the shuffled source.

        Positions are counted across epochs. In a Streamed source, `first` must not be smaller than
        the position of the last `restore`.
        """

    def read(self, samples: SampleNumbers) -> SampleRows:
        """Return the samples, one per row."""

    def counts(self, samples: SampleNumbers) -> Counts:
        """Return what counting the result of `read` would return.

        Every rank calls this for the samples of all ranks at each step, so it should not read them:
        a source with a loss mask keeps the number of targets of each sample in an index.
        """

    def origin(self, sample: int) -> list[DocumentSpan]:
        """Return the documents in a sample, in order. They cover its tokens."""


@runtime_checkable
class Streamed(Protocol):
    """A source whose order depends on text that it has read, so that resuming needs a state."""

    def state(self, consumed: int) -> Any:
        """Return JSON from which `restore` resumes after `consumed` samples."""

    def restore(self, state: Any) -> None:
        """Resume from a state that `state` returned."""


def targets_of(
    ids: npt.NDArray[np.int64],
    mask: npt.NDArray[np.bool_] | None = None,
    doc_ids: npt.NDArray[np.int32] | None = None,
) -> npt.NDArray[np.int64]:
    """Return the targets [N, S] of `ids` [N, S + 1].

    Excluded are those where `mask` [N, S] is False and, with `doc_ids` [N, S + 1], the first tokens
    of documents.
    """
    targets = ids[:, 1:]  # padding is IGNORE_INDEX already
    if mask is not None:
        targets = np.where(mask, targets, IGNORE_INDEX)
    if doc_ids is not None:
        targets = np.where(doc_ids[:, 1:] == doc_ids[:, :-1], targets, IGNORE_INDEX)
    return targets


def count_targets(read: Callable[[SampleNumbers], SampleRows], samples: SampleNumbers) -> int:
    """Return the number of targets of samples by reading them, a few at a time."""
    parts = (read(samples[first : first + 16]) for first in range(0, len(samples), 16))
    return sum(int((rows.targets != IGNORE_INDEX).sum()) for rows in parts)


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

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the vocabulary of a tokenizer.json that the configuration names.

        Raises InputError if the file does not exist, and ConfigError if it has no end-of-document
        token.
        """
        try:
            encoder = Encoder(read_whole(path), None, path)
        except FileNotFoundError:
            raise InputError(
                "there is no tokenizer", where=path.absolute(), next="data.tokenizer=FILE"
            ) from None
        return cls(path, sha256_file(path), encoder.vocab_size, encoder.end_of_document)


@dataclass(frozen=True)
class OpenedSource:
    """A configured source that has been opened for reading."""

    train: SampleSource
    validation: SampleSource | None
    """Held-out text; None if there is none, or too little for one sample."""
    key: str
    """Fingerprint of the content, independent of its location."""
    vocabulary: Vocabulary
    corpus: CorpusSource | None
    """Origin of the documents, if known."""
    chat: ChatFacts | None = None
    """The conversation format; None for plain text."""
