"""Which documents are held out for validation, and which the tokenizer learns from."""

from __future__ import annotations

from collections.abc import Iterator

from xxhash import xxh3_64_intdigest

from dtt.data.corpus import Corpus, Unit
from dtt.data.documents import BadDocuments, batches, read_unit
from dtt.runtime.comm import Comm
from dtt.runtime.log import Advance

HELD_OUT_BY = "xxh3_64 of the text"
"""How `held_out` decides: part of what identifies token files, and text that is trained from."""
BATCH_BYTES = 2**20
SOME_UNITS = 4
SOME_BYTES = 2**16
"""On which an engine is tried: more would be noticed at the start."""


def held_out(document: bytes, fraction: float) -> bool:
    """Whether a document is for validation: decided by a hash of its text alone.

    So equal texts are on one side, and adding documents moves none.
    """
    return xxh3_64_intdigest(document) < int(fraction * 2**64)


def tokenizer_sample(
    corpus: Corpus,
    units: list[Unit],
    train_bytes: int,
    validation_fraction: float,
    comm: Comm,
    advance: Advance,
) -> Iterator[list[bytes]]:
    """This rank's share of about `train_bytes` of text for the tokenizer, in lists.

    It is the start of every unit, in proportion to its size, without documents that are held out.
    So what all ranks read together does not depend on how many they are. `advance` is told the
    bytes taken.
    """
    total = max(sum(unit.text_bytes for unit in units), 1)
    for unit in units[comm.rank :: comm.size]:
        # Rounded up, and at least a document: an estimate of no bytes may still hold some.
        quota = -(-train_bytes * max(unit.text_bytes, 1) // total)
        documents = read_unit(corpus, unit, BadDocuments())
        for batch in batches(documents, min(BATCH_BYTES, quota)):
            advance(sum(map(len, batch)))
            yield [one for one in batch if one and not held_out(one, validation_fraction)]
            quota -= sum(map(len, batch))
            if quota <= 0:
                break


def some_text(corpus: Corpus, units: list[Unit], rank: int = 0, size: int = 1) -> list[bytes]:
    """Documents from all over the corpus, about SOME_BYTES: the start of SOME_UNITS at most.

    Of a document that is longer than a unit's part, the beginning. Each rank gets its share.
    """
    chosen = units[:: -(-len(units) // SOME_UNITS)]
    part = SOME_BYTES // len(chosen)
    starts = (
        next(batches(read_unit(corpus, unit, BadDocuments(), part), part), [])
        for unit in chosen[rank::size]
    )
    texts = (one[:part].decode(errors="ignore") for batch in starts for one in batch)
    return [text.encode() for text in texts if text]
