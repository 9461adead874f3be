"""The data of one optimizer step: its samples and the documents in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

from dtt.data.samples.dataset import NUMBER_MASK, Dataset
from dtt.data.samples.protocol import SampleNumbers
from dtt.data.samples.shuffle import extend_data_hash


class StepSample(TypedDict):
    """One sequence of a step, and the part of each document in it (see DocumentSpan)."""

    position: int
    """Number of samples before it in the run."""
    source: str
    sample: int
    """Number of the sample in its source."""
    epoch: int
    """Epoch of the source, from 1; estimated for a source that is tokenized on the fly."""
    documents: list[dict[str, Any]]


@dataclass(frozen=True)
class StepSamples:
    """The samples of an optimizer step, of all ranks."""

    first: int
    """Position of the step's first sample in the run."""
    samples: SampleNumbers

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
        source, spans = dataset.origin(int(number[0]))
        ids = dataset.read(number).ids[0]
        return StepSample(
            position=position,
            source=source.name,
            sample=int((number & NUMBER_MASK)[0]),
            epoch=int(places[0]) // len(source) + 1,
            documents=[
                {
                    "file": str(span.file),
                    "document": span.document,
                    "offset": span.offset,
                    "tokens": span.stop - span.start,
                    "text": decode(ids[span.start : span.stop].tolist()),
                }
                for span in spans
            ],
        )
