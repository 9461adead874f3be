"""The data of one optimizer step: its samples and the documents in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dtt.data.samples.dataset import NUMBER_MASK, Dataset
from dtt.data.samples.protocol import Samples
from dtt.data.samples.shuffle import extend_data_hash


@dataclass(frozen=True)
class DocumentExcerpt:
    """The part of one document that a sample contains."""

    file: str
    document: int
    """Number of the document in the file."""
    offset: int
    """Number of tokens of the document before this part."""
    tokens: int
    text: str


@dataclass(frozen=True)
class StepSample:
    """One sequence of the step."""

    position: int
    """Number of samples before it in the run."""
    source: str
    sample: int
    """Number of the sample in its source."""
    epoch: int
    """Epoch of the source, from 1; estimated for a source that is tokenized on the fly."""
    documents: list[DocumentExcerpt]


@dataclass(frozen=True)
class StepSamples:
    """The samples of an optimizer step, of all ranks."""

    first: int
    """Position of the step's first sample in the run."""
    samples: Samples

    @classmethod
    def of(cls, dataset: Dataset, step: int) -> StepSamples:
        """Return step `step`, counted from 1 as in metrics.jsonl."""
        first = dataset.first_sample(step - 1)
        return cls(first, dataset.order(first, dataset.first_sample(step) - first))

    def follows(self, before: bytes, after: bytes) -> bool:
        """Return True if this step's samples extend the sample hash chain `before` to `after`.

        Both are digests recorded by the run: after the previous step, and after this one.
        """
        return extend_data_hash(before, self.samples) == after

    def rows(self, rank: int, ranks: int) -> range:
        """Return the indices of the samples that a rank reads."""
        return range(rank, len(self.samples), ranks)

    def read(self, dataset: Dataset, row: int, decode: Callable[[list[int]], str]) -> StepSample:
        """Read one sample and decode the text of its documents."""
        position = self.first + row
        number = self.samples[row : row + 1]
        _, places = dataset.mixture.places(position, 1)
        source, pieces = dataset.origin(int(number[0]))
        ids = dataset.read(number).ids[0]
        return StepSample(
            position=position,
            source=source.name,
            sample=int((number & NUMBER_MASK)[0]),
            epoch=int(places[0]) // len(source) + 1,
            documents=[
                DocumentExcerpt(
                    file=str(piece.file),
                    document=piece.document,
                    offset=piece.offset,
                    tokens=piece.stop - piece.start,
                    text=decode(ids[piece.start : piece.stop].tolist()),
                )
                for piece in pieces
            ],
        )
