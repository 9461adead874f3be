"""A corpus as a shuffled stream of encoded rows, resumable from a few integers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np

from dtt.base.errors import InputError
from dtt.base.log import log
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.document_sampling import HELD_OUT_BY, held_out
from dtt.data.corpus.units import Unit
from dtt.data.corpus.usable import nothing_usable
from dtt.data.samples.encoded_documents import UNIT_BYTES, Document, Documents, EncodedDocuments
from dtt.data.samples.shuffle import permutation
from dtt.data.text.encoder import Encoder

PART_BYTES = 2**24
"""Text per part, including held-out documents; bounds the memory."""
ESTIMATE_BYTES = 2**20
UNIT_SHIFT = 26
"""A sample's number is (unit index << UNIT_SHIFT) + index of the sample within the unit."""


@dataclass(frozen=True)
class Cursor:
    """The start of a part in training order, sufficient to resume from there."""

    place: int = 0
    """Number of samples before the part, over all epochs."""
    epoch: int = 0
    unit_place: int = 0
    """Number of units before the part's unit in this epoch."""
    part: int = 0
    """Number of parts before this one in its unit."""
    sample: int = 0
    """Number of samples before this part in its unit."""


@dataclass(frozen=True)
class UnitPart:
    """A group of a unit's documents whose samples are consecutive in training order."""

    begin: Cursor
    first: int
    """Number of the part's first sample."""
    samples: int

    @property
    def end(self) -> int:
        """Position after the part's last sample."""
        return self.begin.place + self.samples


class TextStream:
    """Endless stream of the documents of a corpus that are not held out, in parts."""

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
        """Stream the documents in the order derived from `key`.

        Unreadable documents are skipped and counted; the count is logged when it has more than
        doubled. With `stop_on_bad_document`, the first one raises DamagedError instead.
        """
        self._documents, self._encoder = documents, encoder
        self._key, self._seq_len = key, seq_len
        self._fraction, self._stop = validation_fraction, stop_on_bad_document

    def identity(self) -> dict[str, Any]:
        """Return the facts that determine the samples, besides tokenizer, seq_len and key."""
        return {
            "corpus": self._documents.corpus.manifest.content_key(),
            "validation_fraction": self._fraction,
            "held_out_by": HELD_OUT_BY,
            "unit_bytes": UNIT_BYTES,
            "part_bytes": PART_BYTES,
        }

    def beginning(self) -> tuple[EncodedDocuments, int]:
        """Encode about the first megabyte of text; return it and an estimate of all tokens.

        Skips groups of documents that contain no sample or hold only white space. Raises InputError
        if the corpus has no text to train on, or only white space.
        """
        bad, fraction = BadDocuments(), self._fraction
        corpus = self._documents.corpus
        total = empty = blank = 0
        for unit in self._documents.units:
            for documents in _cut(self._documents.of(unit, bad), ESTIMATE_BYTES):
                row = self._encode(documents)
                if len(row) and not all(document.text.isspace() for document in documents):
                    text_bytes = sum(unit.text_bytes for unit in self._documents.units)
                    train = text_bytes * (1 - fraction)
                    return row, max(int(train * len(row.ids) / row.text_bytes), len(row.ids))
                total += len(documents)
                empty += sum(not document.text for document in documents)
                blank += sum(document.text.isspace() for document in documents)
        if total > empty + blank:
            raise InputError(
                "every document with text is held out for validation",
                where=corpus.folder,
                why=f"{total - empty - blank} of them; tokenize.validation_fraction={fraction:g}",
                next="tokenize.validation_fraction=0 holds out none",
            )
        raise nothing_usable(corpus, bad.count, bad.examples, empty=empty, blank=blank)

    def parts(self, cursor: Cursor) -> Iterator[tuple[UnitPart, EncodedDocuments]]:
        """Yield all non-empty parts from `cursor` on, epoch after epoch, without end."""
        bad, logged = BadDocuments(stop=self._stop), 0
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
                        yield UnitPart(begin, (unit.index << UNIT_SHIFT) + sample, len(row)), row
                    place, sample = place + len(row), sample + len(row)
                skip = sample = 0
                if bad.count > 2 * logged:
                    logged = bad.count
                    log.info("skipped %d documents, such as %s", logged, bad.examples[0])
            if place == before:
                corpus = self._documents.corpus
                raise nothing_usable(corpus, bad.count, bad.examples, empty=0, blank=0)
            unit_places = range(len(units))

    def find(self, sample: int) -> tuple[int, EncodedDocuments]:
        """Return the number of the first sample in the row that contains `sample`, and that row.

        Encodes the sample's unit from its start. Raises IndexError if there is no such sample.
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

    def _rows(self, unit: Unit, skip: int, bad: BadDocuments) -> Iterator[EncodedDocuments]:
        """Yield the rows of a unit; its first `skip` parts are read, but not encoded."""
        parts = _cut(self._documents.of(unit, bad), PART_BYTES)
        return map(self._encode, islice(parts, skip, None))

    def _encode(self, documents: list[Document]) -> EncodedDocuments:
        train = [d for d in documents if d.text and not held_out(d.text, self._fraction)]
        return EncodedDocuments(train, self._encoder, self._seq_len)

    def _check_number(self, samples: int, unit: Unit) -> None:
        if samples > 1 << UNIT_SHIFT:
            raise InputError(
                "a file holds too much text to train from it directly",
                where=self._documents.corpus.path(unit.spans[0].file),
                why=f"more than {1 << UNIT_SHIFT} sequences, and it must be read from its start",
                next="create token files from it: dtt tokenize",
            )


def _cut(documents: Iterator[Document], size: int) -> Iterator[list[Document]]:
    """Yield documents in lists of about `size` bytes of text."""
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
