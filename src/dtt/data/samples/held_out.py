"""Held-out text of a corpus without token files, encoded at the start and kept in memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np
import numpy.typing as npt

from dtt.base.log import log
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.document_sampling import held_out
from dtt.data.samples.encoded_documents import (
    Document,
    DocumentMasks,
    Documents,
    EncodedDocuments,
    TextSamples,
)
from dtt.data.samples.protocol import Samples
from dtt.data.text.encoder import Encoder

SEARCHED_BYTES = 2**29
"""Maximum bytes of the corpus to search for held-out text; this takes seconds at each start."""


class HeldOutText(TextSamples):
    """The first held-out documents of a corpus. Implements dtt.data.samples.protocol.Source."""

    def __init__(
        self,
        documents: Documents,
        encoder: Encoder,
        *,
        name: str,
        seq_len: int,
        validation_fraction: float,
        text_bytes: int,
        masks: DocumentMasks,
    ) -> None:
        """Encode about `text_bytes` of UTF-8, or less if the first SEARCHED_BYTES hold less."""
        super().__init__(documents, masks, seq_len)
        self.name = name
        self._row = EncodedDocuments(
            _search(documents, validation_fraction, text_bytes), encoder, seq_len
        )
        self.tokens = len(self._row.ids)
        self.bytes_per_token: float | None = self._row.text_bytes / max(self.tokens, 1)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._row)

    def order(self, first: int, count: int) -> Samples:
        """Return the samples in their stored order, starting over after the last one."""
        return np.arange(first, first + count, dtype=np.uint64) % np.uint64(len(self))

    def _by_row(
        self, samples: Samples
    ) -> Iterator[tuple[EncodedDocuments, npt.NDArray[np.intp], Samples]]:
        """See TextSamples."""
        yield self._row, np.arange(len(samples)), samples


def _search(documents: Documents, fraction: float, text_bytes: int) -> list[Document]:
    found: list[Document] = []
    if fraction == 0:
        return found
    missing, room = text_bytes, SEARCHED_BYTES
    bad = BadDocuments()
    for document in chain.from_iterable(documents.of(unit, bad) for unit in documents.units):
        if document.text and held_out(document.text, fraction):
            found.append(document)
            missing -= len(document.text)
        room -= len(document.text) + 1
        if missing <= 0 or room <= 0:
            break
    if missing > 0 and room <= 0:
        log.info(
            "validation: %.1f MB of held-out text in the first %.0f MB of the corpus, of %.1f "
            "that train.eval_tokens requests; a larger tokenize.validation_fraction holds out more",
            (text_bytes - missing) / 1e6,
            SEARCHED_BYTES / 1e6,
            text_bytes / 1e6,
        )
    return found
