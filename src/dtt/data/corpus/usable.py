"""The check that a corpus has a document to learn from, and the error if it has none."""

from __future__ import annotations

from collections.abc import Sequence

from dtt.base.errors import InputError
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.documents import read_unit
from dtt.data.corpus.units import Corpus, Unit


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
