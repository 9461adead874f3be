"""Log-probabilities of the reference model of DPO: a file of them for each source and split.

A file holds a row for each sample, in the order of the sample numbers: float32[samples, seq_len],
little-endian, without a header. `train/objectives/reference_pass.py` writes the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from dtt.artifacts.manifest import FileRecord, Manifest
from dtt.data.samples.dataset import Dataset
from dtt.data.samples.protocol import SampleSource
from dtt.data.samples.token_source import TokenSource
from dtt.data.token_file import map_file

DTYPE = np.dtype("<f4")
NAME = "reference_logprobs"
"""Name of the values in `SampleRows.extra`: in nats, 0 where there is no target."""


class ReferenceManifest(Manifest):
    """The manifest of the log-probabilities of the reference model of DPO, in a job directory.

    `dtt train` writes it before the first step.
    """

    holds: ClassVar[str] = "reference log-probabilities"
    made_by: ClassVar[str] = "dtt train"

    format: Literal["dtt-reference-1"] = "dtt-reference-1"
    key: str
    """Hash of everything that determines the values: the reference model, the data and the
    precision."""
    files: tuple[FileRecord, ...]
    """A file for each source and split: float32 of each target of each sample."""

    def names(self) -> Iterable[str]:
        """Return the names of the files."""
        return (file.path for file in self.files)


def reference_files(dataset: Dataset) -> Iterator[tuple[str, SampleSource]]:
    """Yield the file name and the source of each file, training and held-out."""
    for split, sources in (("train", dataset.sources), ("validation", dataset.validation)):
        for number, source in enumerate(sources):
            if source is not None:
                yield f"{split}-{number:05d}.f32", source


def with_reference(dataset: Dataset, folder: Path) -> Dataset:
    """Return the dataset with the log-probabilities in `folder`, whose files must be complete."""
    found = dict[str, TokenSource]()
    for name, source in reference_files(dataset):
        assert isinstance(source, TokenSource), "only token files hold preference pairs"
        values = map_file(folder / name).view(DTYPE).reshape(len(source), -1)
        found[name] = source.with_extra(NAME, values)
    held_out = iter([source for name, source in found.items() if name.startswith("validation")])
    return replace(
        dataset,
        sources=tuple(source for name, source in found.items() if name.startswith("train")),
        validation=tuple(source and next(held_out) for source in dataset.validation),
    )
