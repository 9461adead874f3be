"""The check that a corpus has a document to learn from, and the error if it has none."""

from __future__ import annotations

from collections.abc import Sequence

from dtt.base.errors import InputError
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.documents import read_unit
from dtt.data.corpus.units import Corpus, Unit

COLUMN_REASONS = ("no key", "no column", "the text is")
"""Parts of the reasons for which another column may hold the text; see documents.py."""


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
    reasons = []
    if unread:
        shown = f", such as {examples[0]}" if examples else ""
        reasons.append(f"{unread} could not be used{shown}")
    if empty:
        reasons.append(f"{empty} are empty")
    if blank:
        reasons.append(f"{blank} contain only white space, no word to learn from")
    example = examples[0] if examples else ""
    has_column = corpus.manifest.text_column is not None
    if refused:
        then = "change the rows as the reason says; docs/tutorial-chat.md lists the formats"
    elif "UTF" in example:
        then = "convert the files to UTF-8: iconv -f ENCODING -t UTF-8 FILE > NEW"
    elif has_column and (
        any(reason in example for reason in COLUMN_REASONS) or (not unread and (empty or blank))
    ):
        then = "choose another column, download.text_column=NAME, or another data set"
    elif unread:
        then = "write the files again as the reason says, then dtt download with the same options"
    else:
        then = "specify another file or folder: dtt download -d PATH"
    return InputError(
        "the corpus contains only white space"
        if blank and not unread and not empty
        else "the corpus contains no documents to learn from",
        where=corpus.folder,
        why="of its documents, " + "; ".join(reasons) if reasons else "all of its files are empty",
        next=then,
    )
