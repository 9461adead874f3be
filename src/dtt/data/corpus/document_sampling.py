"""Selection of documents, for validation, tokenizers and engines; the error if there are none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from xxhash import xxh3_64_intdigest

from dtt.base.errors import InputError
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


def check_usable(corpus: Corpus, units: Sequence[Unit], *, stop_at_bad: bool) -> None:
    """Raise InputError if no document of text contains anything but white space.

    Reads up to the first usable document: all of the corpus if there is none, else almost nothing.
    With `stop_at_bad`, raises DamagedError at an unreadable document before that.
    """
    bad = BadDocuments(stop=stop_at_bad)
    empty = blank = 0
    for unit in units:
        for document in read_unit(corpus, unit, bad):
            if document and not document.isspace():
                return
            empty += not document
            blank += len(document) > 0
    raise nothing_usable(corpus, bad.count, bad.examples, empty=empty, blank=blank)


def nothing_usable(
    corpus: Corpus,
    unread: int,
    examples: Sequence[str],
    *,
    empty: int,
    blank: int,
    refused: bool = False,
) -> InputError:
    """Return the error for a corpus without a usable document.

    `unread`, `empty` and `blank` are numbers of documents: unreadable, without text, and of white
    space only. `refused` means that the unreadable ones are conversations of an unknown format.
    """
    shown = f", such as {examples[0]}" if examples else ""
    units = () if corpus.selection is None else corpus.selection.manifest.units
    removed = sum(sum(unit.removed.values()) for unit in units)
    reasons = {
        "are removed by the section `clean`": removed,
        f"could not be used{shown}": unread,
        "are empty": empty,
        "contain only white space, no word to learn from": blank,
    }
    why = "; ".join(f"{count} {reason}" for reason, count in reasons.items() if count)
    if refused:
        then = "change the rows as the reason says; docs/tutorial-chat.md lists the formats"
    elif removed and not unread + empty + blank:
        then = "remove less: the section `clean` of the configuration"
    elif corpus.manifest.text_column is not None:
        then = "choose another column, download.text_column=NAME, or another data set"
    else:
        then = "specify another file or folder: dtt download -d PATH"
    return InputError(
        "the corpus contains only white space"
        if blank and not unread and not empty
        else "the corpus contains no documents to learn from",
        where=corpus.folder,
        why=f"of its documents, {why}" if why else "all of its files are empty",
        next=then,
    )
