"""What one optimizer step was trained on: its samples, and the documents in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dtt.data.dataset import OWN, Dataset
from dtt.data.order import extend_ledger
from dtt.data.source import Samples


@dataclass(frozen=True)
class Part:
    """What a sample holds of one document."""

    file: str
    document: int
    """Its number in the file."""
    offset: int
    """Tokens of the document before this part."""
    tokens: int
    text: str


@dataclass(frozen=True)
class Sample:
    """One sequence of the step."""

    position: int
    """In the run: samples before it."""
    source: str
    sample: int
    """Its number in the source."""
    epoch: int
    """Of the source, from 1; an estimate where samples are made on the way."""
    documents: list[Part]


@dataclass(frozen=True)
class Step:
    """The samples of an optimizer step, those of all ranks."""

    first: int
    """Position of the first in the run."""
    samples: Samples

    @classmethod
    def of(cls, dataset: Dataset, step: int) -> Step:
        """Step `step`, counted from 1 as in metrics.jsonl."""
        first = dataset.first_sample(step - 1)
        return cls(first, dataset.samples_at(first, dataset.first_sample(step) - first))

    def follows(self, before: bytes, after: bytes) -> bool:
        """Whether the ledger `before` this step becomes the ledger `after` it."""
        return extend_ledger(before, self.samples) == after

    def rows(self, rank: int, ranks: int) -> range:
        """Which of the samples a rank has."""
        return range(rank, len(self.samples), ranks)

    def read(self, dataset: Dataset, row: int, decode: Callable[[list[int]], str]) -> Sample:
        """One sample with its documents."""
        position = self.first + row
        number = self.samples[row : row + 1]
        _, places = dataset.mixture.places(position, 1)
        source, pieces = dataset.locate(int(number[0]))
        ids = dataset.read(number)[0]
        return Sample(
            position=position,
            source=source.name,
            sample=int((number & OWN)[0]),
            epoch=int(places[0]) // len(source) + 1,
            documents=[
                Part(
                    file=str(piece.file),
                    document=piece.document,
                    offset=piece.offset,
                    tokens=piece.stop - piece.start,
                    text=decode(ids[piece.start : piece.stop].tolist()),
                )
                for piece in pieces
            ],
        )
