"""Which documents are held out for validation, and which the tokenizer learns from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from dtt.data.corpus import Corpus, Unit
from dtt.data.documents import BadDocuments, batches, read_unit
from dtt.runtime.log import Advance

BATCH_CHARACTERS = 2**20


def held_out(text: str, fraction: float) -> bool:
    """Whether a document is for validation: decided by a hash of its text alone.

    So equal texts are on one side, and adding documents moves none.
    """
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < int(fraction * 2**64)


def tokenizer_sample(
    corpus: Corpus,
    units: list[Unit],
    train_bytes: int,
    validation_fraction: float,
    advance: Advance,
) -> Iterator[list[str]]:
    """About `train_bytes` of text for the tokenizer, in lists: the start of every unit.

    Each unit gives in proportion to its size, and no document that is held out. `advance` is told
    the characters taken.
    """
    total = max(sum(unit.text_bytes for unit in units), 1)
    for unit in units:
        # Rounded up, and at least a document: an estimate of no bytes may still hold some.
        quota = -(-train_bytes * max(unit.text_bytes, 1) // total)
        documents = read_unit(corpus, unit, BadDocuments())
        for batch in batches(documents, min(BATCH_CHARACTERS, quota)):
            advance(sum(map(len, batch)))
            yield [text for text in batch if text and not held_out(text, validation_fraction)]
            quota -= sum(map(len, batch))
            if quota <= 0:
                break
