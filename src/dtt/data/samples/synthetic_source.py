"""Random token ids in place of text: for measuring a run without its data."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from dtt.data.samples.protocol import (
    Counts,
    DocumentSpan,
    SampleNumbers,
    SampleRows,
    targets_of,
)
from dtt.data.samples.shuffle import mix

NAME = "synthetic"
SAMPLES = 2**40
"""Samples in an epoch, more than any run reads."""


class SyntheticSource:
    """Samples of uniformly distributed ids, each a function of seed, sample and position.

    Implements SampleSource. A sample needs no shuffle, and nothing is read, so what a step takes is
    the cost of the model and of the loader alone.
    """

    name = NAME
    bytes_per_token: float | None = None

    def __init__(self, vocab_size: int, seq_len: int, seed: int) -> None:
        """Make samples of `seq_len` + 1 ids below `vocab_size`."""
        self._vocab_size, self._width = vocab_size, seq_len + 1
        self._key = _mixed(np.array([seed % 2**64], dtype=np.uint64))
        self.tokens = SAMPLES * seq_len

    def __len__(self) -> int:
        """See SampleSource."""
        return SAMPLES

    def order(self, first: int, count: int) -> SampleNumbers:
        """See SampleSource."""
        return np.arange(first, first + count, dtype=np.uint64) % np.uint64(SAMPLES)

    def read(self, samples: SampleNumbers) -> SampleRows:
        """See SampleSource. Each sample is one document."""
        places = samples[:, None] * np.uint64(self._width) + np.arange(self._width, dtype=np.uint64)
        ids = _mixed(places.astype(np.uint64) + self._key) % np.uint64(self._vocab_size)
        return SampleRows(ids.astype(np.int64), targets_of(ids.astype(np.int64)))

    def counts(self, samples: SampleNumbers) -> Counts:
        """See SampleSource."""
        targets = len(samples) * (self._width - 1)
        return Counts(targets, targets, targets + len(samples))

    def origin(self, sample: int) -> list[DocumentSpan]:
        """See SampleSource."""
        return [DocumentSpan(Path(NAME), sample, 0, 0, self._width)]


def _mixed(values: SampleNumbers) -> SampleNumbers:
    """Return the output of splitmix64 for each state (Steele, Lea and Flood 2014)."""
    return mix(values + np.uint64(0x9E3779B97F4A7C15))


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder that is deleted when the process ends; the job keeps a copy of its file."""
    return tempfile.TemporaryDirectory(prefix="dtt-")


def numbers_tokenizer(vocab_size: int) -> Path:
    """Write a tokenizer.json whose token i is the number i, and 0 the end of a document."""
    end = "<|endoftext|>"
    vocabulary = {end: 0} | {str(i): i for i in range(1, vocab_size)}
    special = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content = {
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": end, "special": True, **special}],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": end},
    }
    path = Path(_folder().name) / f"{vocab_size}.json"
    path.write_text(json.dumps(content))
    return path
