"""The order of all documents: the corpora of `near.against` first, then the corpus itself.

A document's number in it is `place of its unit << 32 | number in the unit`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dtt.clean.shingles import U64
from dtt.clean.steps import Steps
from dtt.clean.unit_pass import PlacedUnit
from dtt.mesh.comm import Comm

UNIT_BITS = np.uint64(32)
IN_UNIT = np.uint64(2**32 - 1)


class DocumentOrder:
    """All units in order, after pass 1."""

    def __init__(self, units: Sequence[PlacedUnit], steps: Steps, comm: Comm) -> None:
        """Read the number of documents of each unit; collective."""
        self.units = units
        # Each marker is read by one rank: all of them by each would be ranks × units opens.
        mine = [steps.facts(unit.step) for unit in units[comm.rank :: comm.size]]
        shares = comm.gather(mine)
        self.facts = [shares[i % comm.size][i // comm.size] for i in range(len(units))]
        self.counts = [int(facts["documents"]) for facts in self.facts]
        self.starts = np.cumsum([0, *self.counts])
        self.own = sum(unit.other is not None for unit in units)
        """Place of the first unit of the corpus that is cleaned."""

    def is_own(self, numbers: U64) -> npt.NDArray[np.bool_]:
        """Return which documents belong to the corpus that is cleaned."""
        return numbers >= np.uint64(self.own << 32)

    def twin(self, number: int) -> tuple[int, int]:
        """Return `twin_unit` and `twin` of a document, as the file of a unit has them."""
        place, document = number >> 32, number & (2**32 - 1)
        other = self.units[place].other
        if other is None:
            return self.units[place].unit.index, document
        first = next(i for i, unit in enumerate(self.units) if unit.other == other)
        return -1 - other, int(self.starts[place] - self.starts[first]) + document


class DocumentSet:
    """A set of documents, one bit for each."""

    def __init__(self, order: DocumentOrder) -> None:
        self._starts = order.starts
        self._bits = np.zeros(int(order.starts[-1]) // 8 + 1, np.uint8)

    def _positions(self, numbers: U64) -> npt.NDArray[np.int64]:
        places = (numbers >> UNIT_BITS).astype(np.int64)
        return self._starts[places] + (numbers & IN_UNIT).astype(np.int64)

    def add(self, numbers: U64) -> None:
        """Add documents."""
        at = self._positions(numbers)
        np.bitwise_or.at(self._bits, at >> 3, np.left_shift(1, at & 7).astype(np.uint8))

    def contains(self, numbers: U64) -> npt.NDArray[np.bool_]:
        """Return which documents are in the set."""
        at = self._positions(numbers)
        found: npt.NDArray[np.bool_] = (self._bits[at >> 3] >> (at & 7) & 1).astype(np.bool_)
        return found

    def add_one(self, number: int) -> None:
        """Add a document; for one, this is ten times as fast as `add`."""
        at = self._position(number)
        self._bits[at >> 3] |= 1 << (at & 7)

    def has(self, number: int) -> bool:
        """Return True if the document is in the set."""
        at = self._position(number)
        return bool(self._bits[at >> 3] >> (at & 7) & 1)

    def _position(self, number: int) -> int:
        return int(self._starts[number >> 32]) + (number & (2**32 - 1))
