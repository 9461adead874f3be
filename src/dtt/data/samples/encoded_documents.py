"""Encoded documents of a corpus, concatenated in memory and cut into samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dtt.base.errors import InputError
from dtt.base.targets import IGNORE_INDEX
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.documents import batches, read_unit
from dtt.data.corpus.units import Corpus, Unit
from dtt.data.samples.protocol import (
    Counts,
    DocumentSpan,
    SampleNumbers,
    SampleRows,
    count_targets,
    targets_of,
)
from dtt.data.samples.token_shards import DocumentEnds, spans_in
from dtt.data.text.encoder import Encoder

UNIT_BYTES = 16 * 10**6
ENCODED_BATCH_BYTES = 2**20
"""Text encoded per call; an encoder's return value takes many times the memory of the ids."""


@dataclass(frozen=True)
class Document:
    """A document of a corpus and its location."""

    file: Path
    span_start: int
    """Start of the span of `file` that contains it: a byte, or a row group of Parquet."""
    number: int
    """Number of documents before it in that span."""
    text: bytes
    """UTF-8."""


class CorpusDocuments:
    """The documents of a corpus, divided into units."""

    def __init__(self, corpus: Corpus) -> None:
        """Divide `corpus` into units of UNIT_BYTES, or of its selection, without reading text.

        Only footers of Parquet files are read. Raises InputError if all files are empty.
        """
        self.corpus = corpus
        self._whole = corpus.with_removed()
        self.unit_bytes = UNIT_BYTES if corpus.selection is None else corpus.unit_bytes()
        self.units = corpus.units(self.unit_bytes)
        if not self.units:
            raise InputError("the corpus contains no documents", where=corpus.folder)
        self.before = lru_cache(maxsize=1024)(self._before)

    def of(self, unit: Unit, bad: BadDocuments) -> Iterator[Document]:
        """Yield the readable documents of a unit in file order, including empty ones.

        Those that the selection of the corpus removes are left out.
        """
        documents = self._all(unit, bad)
        if self.corpus.selection is None:
            return documents
        found = batches(documents, ENCODED_BATCH_BYTES, lambda document: len(document.text))
        return chain.from_iterable(self.corpus.selection.keep(unit.index, found))

    def _all(self, unit: Unit, bad: BadDocuments) -> Iterator[Document]:
        # Removed ones as well: whoever looks a document up in its file counts them.
        for span in unit.spans:
            texts = read_unit(self._whole, Unit(unit.index, (span,)), bad)
            for number, text in enumerate(texts):
                yield Document(self.corpus.path(span.file), span.start, number, text)

    def _before(self, file: Path, span_start: int) -> int:
        """Return the number of readable documents of a file before a span, by reading them."""
        spans = tuple(
            span
            for unit in self.units
            for span in unit.spans
            if self.corpus.path(span.file) == file and span.start < span_start
        )
        return sum(1 for _ in self._all(Unit(0, spans), BadDocuments()))


class EncodedDocuments:
    """Concatenated documents, each followed by the end-of-document token.

    Sample i is the T + 1 tokens i*T … i*T + T of the row, T = seq_len. Adjacent samples share one
    token, so every token but the first is a target exactly once. The last sample may be short.
    """

    def __init__(self, documents: Sequence[Document], encoder: Encoder, seq_len: int) -> None:
        """Encode `documents`, without keeping their text."""
        texts = (document.text for document in documents)
        encoded = [encoder.encode(batch) for batch in batches(texts, ENCODED_BATCH_BYTES)]
        none = np.empty(0, dtype=np.int32)
        self.ids = np.concatenate([none, *(ids.astype(np.int32) for ids, _ in encoded)])
        lengths = np.concatenate([none, *(n for _, n in encoded)])
        self.ends = DocumentEnds(np.cumsum(lengths, dtype=np.int64))
        self.places = [(d.file, d.span_start, d.number) for d in documents]
        """File, span and number of each document; see Document."""
        self._seq_len = seq_len
        self.text_bytes = sum(len(document.text) for document in documents)
        """UTF-8 bytes of all documents."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return max(0, -(-(len(self.ids) - 1) // self._seq_len))

    def read(self, samples: SampleNumbers) -> npt.NDArray[np.int64]:
        """Return the ids, [len(samples), seq_len + 1], with IGNORE_INDEX after its end."""
        starts = samples.astype(np.int64) * self._seq_len
        index = starts[:, None] + np.arange(self._seq_len + 1)
        ids = self.ids[np.minimum(index, len(self.ids) - 1)].astype(np.int64)
        return np.where(index < len(self.ids), ids, IGNORE_INDEX)

    def targets(self, samples: SampleNumbers) -> int:
        """Return the number of targets in these samples."""
        rest = len(self.ids) - 1 - samples.astype(np.int64) * self._seq_len
        return int(np.minimum(rest, self._seq_len).sum())


class TextSamples(ABC):
    """The samples of rows of encoded documents: the part of a source that all of text shares."""

    name = "text"

    def __init__(
        self,
        documents: CorpusDocuments,
        encoder: Encoder,
        *,
        seq_len: int,
        doc_ids: bool = True,
        eod_mask_loss: bool = False,
    ) -> None:
        """Take the documents of a corpus; their rows have samples of `seq_len` + 1 tokens.

        With `doc_ids`, samples have the document ids to which attention is restricted. With
        `eod_mask_loss`, the first token of a document is no target.
        """
        self._documents, self._encoder, self._seq_len = documents, encoder, seq_len
        self._with_doc_ids, self._eod_mask_loss = doc_ids, eod_mask_loss

    @abstractmethod
    def _by_row(
        self, samples: SampleNumbers
    ) -> Iterator[tuple[EncodedDocuments, npt.NDArray[np.intp], SampleNumbers]]:
        """Yield each row that has some of `samples`, their indices in `samples` and in the row."""

    def read(self, samples: SampleNumbers) -> SampleRows:
        """See SampleSource."""
        ids = np.empty((len(samples), self._seq_len + 1), dtype=np.int64)
        for row, where, numbers in self._by_row(samples):
            ids[where] = row.read(numbers)
        # No text is encoded as the end-of-document token: each occurrence ends a document.
        ends = ids == self._encoder.end_of_document
        doc_ids = np.asarray(np.cumsum(ends, axis=1) - ends, dtype=np.int32)
        targets = targets_of(ids, doc_ids=doc_ids if self._eod_mask_loss else None)
        return SampleRows(ids, targets, doc_ids if self._with_doc_ids else None)

    def counts(self, samples: SampleNumbers) -> Counts:
        """See SampleSource."""
        followed = sum(row.targets(numbers) for row, _, numbers in self._by_row(samples))
        targets = count_targets(self.read, samples) if self._eod_mask_loss else followed
        return Counts(targets, targets, followed + len(samples))

    def origin(self, sample: int) -> list[DocumentSpan]:
        """Return the documents of a sample, numbered among the readable ones of their file.

        If the file is divided into spans, this reads all earlier spans to count their documents.
        """
        ((row, _, numbers),) = self._by_row(np.array([sample], dtype=np.uint64))
        start = int(numbers[0]) * self._seq_len
        stop = min(start + self._seq_len + 1, len(row.ids))
        found = []
        for document, *part in spans_in(row.ends, start, stop, 0):
            file, span_start, number = row.places[document]
            found.append(
                DocumentSpan(file, number + self._documents.before(file, span_start), *part)
            )
        return found
