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
BATCH_CHARACTERS = 2**20
SOME_UNITS = 4
SOME_CHARACTERS = 2**16
"""On which an engine is tried: more would be noticed at the start."""


def held_out(text: str, fraction: float) -> bool:
    """Whether a document is for validation: decided by a hash of its text alone.

    So equal texts are on one side, and adding documents moves none.
    """
    return xxh3_64_intdigest(text.encode()) < int(fraction * 2**64)


def tokenizer_sample(
    corpus: Corpus,
    units: list[Unit],
    train_bytes: int,
    validation_fraction: float,
    comm: Comm,
    advance: Advance,
) -> Iterator[list[str]]:
    """This rank's share of about `train_bytes` of text for the tokenizer, in lists.

    It is the start of every unit, in proportion to its size, without documents that are held out.
    So what all ranks read together does not depend on how many they are. `advance` is told the
    characters taken.
    """
    total = max(sum(unit.text_bytes for unit in units), 1)
    for unit in units[comm.rank :: comm.size]:
        # Rounded up, and at least a document: an estimate of no bytes may still hold some.
        quota = -(-train_bytes * max(unit.text_bytes, 1) // total)
        documents = read_unit(corpus, unit, BadDocuments())
        for batch in batches(documents, min(BATCH_CHARACTERS, quota)):
            advance(sum(map(len, batch)))
            yield [text for text in batch if text and not held_out(text, validation_fraction)]
            quota -= sum(map(len, batch))
            if quota <= 0:
                break


def some_text(corpus: Corpus, units: list[Unit]) -> list[str]:
    """Documents from all over the corpus, about SOME_CHARACTERS: the start of SOME_UNITS at most.

    Of a document that is longer than a unit's part, the beginning.
    """
    chosen = units[:: -(-len(units) // SOME_UNITS)]
    part = SOME_CHARACTERS // len(chosen)
    starts = (next(batches(read_unit(corpus, unit, BadDocuments()), part), []) for unit in chosen)
    return [text[:part] for texts in starts for text in texts if text]
