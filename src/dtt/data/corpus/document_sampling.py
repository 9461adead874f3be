"""Selection of documents: for validation, for tokenizer training, and to compare engines."""

from __future__ import annotations

from collections.abc import Iterator

from xxhash import xxh3_64_intdigest

from dtt.base.log import Advance
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.documents import batches, read_unit
from dtt.data.corpus.units import Corpus, Unit

HELD_OUT_BY = "xxh3_64 of the text"
"""The rule of `held_out`; part of the key of token files and of text sources."""
SAMPLE_BATCH_BYTES = 2**20
SOME_UNITS = 4
SOME_BYTES = 2**16
"""Size of the sample on which engines are compared; more would noticeably delay the start."""


def held_out(document: bytes, fraction: float) -> bool:
    """Return True if a document belongs to the validation split, by a hash of its text.

    So equal texts are always in the same split, and adding documents to the corpus does not move
    others to another split.
    """
    return xxh3_64_intdigest(document) < int(fraction * 2**64)


def tokenizer_sample(
    corpus: Corpus,
    units: list[Unit],
    train_bytes: int,
    validation_fraction: float,
    advance: Advance,
) -> Iterator[list[str]]:
    """Yield about `train_bytes` bytes of text to train the tokenizer on.

    The text is the start of every unit, in proportion to its size, without held-out documents.
    Documents come in lists, and `advance` is called with the number of bytes of each.
    """
    total = max(sum(unit.text_bytes for unit in units), 1)
    for unit in units:
        # Rounded up, so at least one document: a unit with an estimated size of 0 may have some.
        quota = -(-train_bytes * max(unit.text_bytes, 1) // total)
        documents = read_unit(corpus, unit, BadDocuments())
        for batch in batches(documents, min(SAMPLE_BATCH_BYTES, quota)):
            advance(sum(map(len, batch)))
            yield [one.decode() for one in batch if one and not held_out(one, validation_fraction)]
            quota -= sum(map(len, batch))
            if quota <= 0:
                break


def some_text(corpus: Corpus, units: list[Unit], rank: int = 0, size: int = 1) -> list[bytes]:
    """Return this rank's share of about SOME_BYTES of text from across the corpus.

    The text is the start of at most SOME_UNITS units. A document longer than a unit's part is
    truncated to that part.
    """
    chosen = units[:: -(-len(units) // SOME_UNITS)]
    part = SOME_BYTES // len(chosen)
    starts = (
        next(batches(read_unit(corpus, unit, BadDocuments(), part), part), [])
        for unit in chosen[rank::size]
    )
    texts = (one[:part].decode(errors="ignore") for batch in starts for one in batch)
    return [text.encode() for text in texts if text]
