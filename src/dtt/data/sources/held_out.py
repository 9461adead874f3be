"""Held-out text of a corpus without token files, encoded at the start and kept in memory."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from dtt.data.documents import BadDocuments
from dtt.data.encoder import Encoder
from dtt.data.sampling import held_out
from dtt.data.source import Piece, Samples
from dtt.data.sources.row import Document, Documents, Row, documents_of
from dtt.runtime.log import log

SEARCHED_BYTES = 2**29
"""Maximum bytes of the corpus to search for held-out text; this takes seconds at each start."""


class HeldOutText:
    """The first held-out documents of a corpus. Implements dtt.data.source.Source."""

    def __init__(
        self,
        documents: Documents,
        encoder: Encoder,
        *,
        name: str,
        seq_len: int,
        validation_fraction: float,
        text_bytes: int,
    ) -> None:
        """Encode about `text_bytes` of UTF-8, or less if the first SEARCHED_BYTES hold less."""
        self.name, self._documents, self._encoder = name, documents, encoder
        self._row = Row(_search(documents, validation_fraction, text_bytes), encoder, seq_len)
        self.tokens = len(self._row.ids)
        self.bytes_per_token: float | None = self._row.text_bytes / max(self.tokens, 1)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._row)

    def samples_at(self, first: int, count: int) -> Samples:
        """Return the samples in their stored order, starting over after the last one."""
        return np.arange(first, first + count, dtype=np.uint64) % np.uint64(len(self))

    def read(self, samples: Samples) -> npt.NDArray[np.int64]:
        """Return the ids, [len(samples), seq_len + 1]."""
        return self._row.read(samples)

    def documents(self, samples: Samples, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Return the index, from 0, of each id's document within its sample."""
        return documents_of(ids, self._encoder.end_of_document)

    def targets(self, samples: Samples) -> int:
        """Return the number of targets in these samples."""
        return self._row.targets(samples)

    def locate(self, sample: int) -> list[Piece]:
        """Return the documents of a sample, numbered among the readable ones of their file."""
        return self._documents.locate(self._row, sample)

    def state(self, consumed: int) -> Any:
        """Return None: no state is needed."""
        return None

    def restore(self, state: Any) -> None:
        """Do nothing: there is no state."""


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
            "validation: %.1f MB of held-out text in the first %.0f MB of the corpus, of %.1f that "
            "train.eval_tokens asks for; a larger tokenize.validation_fraction gives more",
            (text_bytes - missing) / 1e6,
            SEARCHED_BYTES / 1e6,
            text_bytes / 1e6,
        )
    return found
