"""Distribution of document lengths, in memory independent of the number of documents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

STEPS = 256
"""Bins per power of two; lengths below this are exact, others have a relative error of 1/256."""
OCTAVES = 48
_SHIFT = 52 - (STEPS.bit_length() - 1)
_FIRST = 1023 * STEPS  # the bin of length 1: 1023 is the biased exponent of 1.0


@dataclass(frozen=True)
class LengthSummary:
    """Summary statistics of document lengths."""

    unit: str
    """`tokens` or `bytes`."""
    documents: int
    """Number of documents measured."""
    empty: int
    mean: float
    median: int
    p90: int
    max: int


class Lengths:
    """Histogram of lengths with bins of constant relative width, like HdrHistogram."""

    def __init__(self) -> None:
        """Create an empty histogram."""
        self._bins = np.zeros(OCTAVES * STEPS, dtype=np.int64)
        self.empty = 0
        """Number of documents of length zero."""
        self._total = self._max = 0

    def add(self, lengths: npt.NDArray[np.int64]) -> None:
        """Count documents by length; lengths must be in 0 … 2**48 - 1."""
        some = lengths[lengths > 0]
        self.empty += len(lengths) - len(some)
        self._total += int(some.sum())
        self._max = max(self._max, int(some.max(initial=0)))
        # The exponent and the leading mantissa bits of the length as float64 give the bin.
        bins = (some.astype(np.float64).view(np.int64) >> _SHIFT) - _FIRST
        self._bins += np.bincount(bins, minlength=len(self._bins))

    def summary(self, unit: str) -> LengthSummary:
        """Return summary statistics of the lengths counted so far."""
        documents = self.empty + int(self._bins.sum())
        return LengthSummary(
            unit=unit,
            documents=documents,
            empty=self.empty,
            mean=round(self._total / max(documents, 1), 1),
            median=self._quantile(0.5),
            p90=self._quantile(0.9),
            max=self._max,
        )

    def _quantile(self, share: float) -> int:
        """Return the `share` quantile of the lengths, rounded up to the end of its bin."""
        counts = np.cumsum(self._bins) + self.empty
        if counts[-1] == 0 or self.empty >= share * counts[-1]:
            return 0
        octave, step = divmod(int(np.searchsorted(counts, share * counts[-1])) + 1, STEPS)
        return min(self._max, int(np.ceil(2.0**octave * (1 + step / STEPS))) - 1)
