"""A corpus as a stream of encoded rows, in an order that a few integers can go on from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np

from dtt.data.corpus import Unit
from dtt.data.documents import BadDocuments
from dtt.data.encoder import Encoder
from dtt.data.order import permutation
from dtt.data.sampling import HELD_OUT_BY, held_out
from dtt.data.sources.row import UNIT_BYTES, Document, Documents, Row
from dtt.errors import InputError
from dtt.runtime.log import log

PART_BYTES = 2**24
"""Of text in a part, documents that are held out included: bounds the memory."""
ESTIMATE_BYTES = 2**20
UNIT_SHIFT = 26
"""A sample's number is its unit's << UNIT_SHIFT, plus its own among the samples of the unit."""


@dataclass(frozen=True)
class Cursor:
    """Where in the order a part begins: all that is needed to go on from it."""

    place: int = 0
    """Samples before it, over all epochs."""
    epoch: int = 0
    unit_place: int = 0
    """Units before its unit in this epoch."""
    part: int = 0
    """Parts before it in its unit …"""
    sample: int = 0
    """… and samples."""


@dataclass(frozen=True)
class Part:
    """Documents of a unit whose samples follow one another in the order."""

    begin: Cursor
    first: int
    """Number of its first sample."""
    samples: int

    @property
    def end(self) -> int:
        """Place after its last sample."""
        return self.begin.place + self.samples


class TextStream:
    """The documents of a corpus that are not held out, part by part, epoch by epoch."""

    def __init__(
        self,
        documents: Documents,
        encoder: Encoder,
        *,
        key: str,
        seq_len: int,
        validation_fraction: float,
        stop_on_bad_document: bool,
    ) -> None:
        """`key` names the order. A document that cannot be read is counted and logged now and then,
        or raises DamagedError where `stop_on_bad_document` is set.
        """
        self._documents, self._encoder = documents, encoder
        self._key, self._seq_len = key, seq_len
        self._fraction, self._stop = validation_fraction, stop_on_bad_document

    def identity(self) -> dict[str, Any]:
        """What decides the samples, beside tokenizer, seq_len and key."""
        return {
            "corpus": self._documents.corpus.manifest.content_key(),
            "validation_fraction": self._fraction,
            "held_out_by": HELD_OUT_BY,
            "unit_bytes": UNIT_BYTES,
            "part_bytes": PART_BYTES,
        }

    def beginning(self) -> tuple[Row, int]:
        """About the first megabyte that is a sample at least, and an estimate of all tokens.

        Raises InputError when the corpus has no text to train on, or nothing but white space.
        """
        bad = BadDocuments()
        blank = False
        for unit in self._documents.units:
            for documents in _cut(self._documents.of(unit, bad), ESTIMATE_BYTES):
                row = self._encode(documents)
                if len(row) and not all(document.text.isspace() for document in documents):
                    text_bytes = sum(unit.text_bytes for unit in self._documents.units)
                    train = text_bytes * (1 - self._fraction)
                    return row, max(int(train * len(row.ids) / row.text_bytes), len(row.ids))
                blank |= len(row) > 0
        raise self._no_documents(bad, blank=blank)

    def parts(self, cursor: Cursor) -> Iterator[tuple[Part, Row]]:
        """All parts that have samples from `cursor` on, for ever."""
        bad, told = BadDocuments(stop=self._stop), 0
        units = self._documents.units
        place, skip, sample = cursor.place, cursor.part, cursor.sample
        unit_places = range(cursor.unit_place, len(units))
        for epoch in count(cursor.epoch):
            before = place
            for unit_place in unit_places:
                unit = self._unit_at(epoch, unit_place)
                for part, row in enumerate(self._rows(unit, skip, bad), skip):
                    self._check_number(sample + len(row), unit)
                    if len(row):
                        begin = Cursor(place, epoch, unit_place, part, sample)
                        yield Part(begin, (unit.index << UNIT_SHIFT) + sample, len(row)), row
                    place, sample = place + len(row), sample + len(row)
                skip = sample = 0
                if bad.count > 2 * told:
                    told = bad.count
                    log.info("skipped %d documents, such as %s", told, bad.examples[0])
            if place == before:
                raise self._no_documents(bad)
            unit_places = range(len(units))

    def find(self, sample: int) -> tuple[int, Row]:
        """The number of the first sample in the row of `sample`, and that row.

        Encodes the sample's unit from its start.
        """
        unit = self._documents.units[sample >> UNIT_SHIFT]
        first = unit.index << UNIT_SHIFT
        for row in self._rows(unit, 0, BadDocuments()):
            if sample < first + len(row):
                return first, row
            first += len(row)
        raise IndexError(f"there is no sample {sample}")

    def _unit_at(self, epoch: int, place: int) -> Unit:
        units = self._documents.units
        index = np.array([place], dtype=np.uint64)
        (image,) = permutation(index, len(units), f"{self._key}/{epoch}".encode())
        return units[int(image)]

    def _rows(self, unit: Unit, skip: int, bad: BadDocuments) -> Iterator[Row]:
        """The rows of a unit; its first `skip` parts are read, but not encoded."""
        parts = _cut(self._documents.of(unit, bad), PART_BYTES)
        return map(self._encode, islice(parts, skip, None))

    def _encode(self, documents: list[Document]) -> Row:
        train = [d for d in documents if d.text and not held_out(d.text, self._fraction)]
        return Row(train, self._encoder, self._seq_len)

    def _check_number(self, samples: int, unit: Unit) -> None:
        if samples > 1 << UNIT_SHIFT:
            raise InputError(
                "a file holds too much text to train from it directly",
                where=self._documents.corpus.path(unit.spans[0].file),
                why=f"more than {1 << UNIT_SHIFT} sequences, and it must be read from its start",
                next="make token files of it: dtt tokenize",
            )

    def _no_documents(self, bad: BadDocuments, *, blank: bool = False) -> InputError:
        unread = f"{bad.count} could not be read, such as {bad.examples[0]}" if bad.count else None
        if blank:
            unread = "; ".join(filter(None, ["there is nothing but white space", unread]))
        return InputError(
            "the corpus holds no documents to train on",
            where=self._documents.corpus.folder,
            why=unread,
            next="dtt download -d DATASET",
        )


def _cut(documents: Iterator[Document], size: int) -> Iterator[list[Document]]:
    """Documents in lists of about so many bytes."""
    part: list[Document] = []
    room = size
    for document in documents:
        part.append(document)
        room -= len(document.text) + 1
        if room <= 0:
            yield part
            part, room = [], size
    if part:
        yield part
