"""The interface between the writer of shards and the kinds of documents: text or conversations.

The units of work, their markers, the ranks and the manifest are the same for all kinds
(dtt.data.tokenize.encode_corpus). This module also has the kind for text; the one for conversations
is dtt.data.conversations.row_encoder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from dtt.artifacts.manifests import ChatFacts, LostText
from dtt.base.reading import read_whole
from dtt.config.data import Engine, GivenTokenizerConfig, TokenizerConfig
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.document_sampling import some_text
from dtt.data.corpus.documents import read_batches
from dtt.data.corpus.units import Corpus, Unit
from dtt.data.text.encoder import Encoder
from dtt.data.text.side_files import check_special_tokens
from dtt.data.text.tokenizer import (
    begin_of_document,
    find_tokenizer,
    given_tokenizer,
    parse_tokenizer,
)
from dtt.data.text.unencodable import Unencodable
from dtt.mesh.comm import Comm

D = TypeVar("D")
"""A document as it is read: bytes of text, or a row."""


class EncodedPart(NamedTuple):
    """Encoded documents of one split in one token buffer."""

    ids: npt.NDArray[Any]
    """[sum(lengths)]: token ids."""
    lengths: npt.NDArray[Any]
    """[sequences]: tokens of each sequence."""
    mask: npt.NDArray[np.bool_] | None
    """[sum(lengths)]: True for the tokens that are targets; None if all are."""
    text_bytes: int
    """UTF-8 bytes of the text that was encoded."""
    lost: LostText | None = None
    """What the tokenizer has no token for; None if it has one for each byte."""


class UnitEncoder(Protocol[D]):
    """A reader and encoder of the documents of units."""

    vocab_size: int
    end_of_document: int
    begin_of_document: int | None
    """Token before each document of text; templates of conversations write their own."""
    has_mask: bool
    """True if the token files have loss masks."""
    chat: ChatFacts | None
    """The conversation format; None for text."""
    pairs: bool
    """True if sequences 2i and 2i + 1 are a preference pair."""

    @property
    def engine(self) -> Engine:
        """The tokenizer implementation in use."""

    def choose_engine(self, corpus: Corpus, units: list[Unit], comm: Comm) -> None:
        """Choose the engine by the content of the corpus, if there are several.

        Collective, called before `encode`.
        """
        return

    def read(self, corpus: Corpus, unit: Unit, bad: BadDocuments) -> Iterator[list[D]]:
        """Iterate over the readable documents of `unit`, in batches of a few MB."""

    def content(self, document: D) -> bytes:
        """Return the bytes of a document whose hash decides whether it is held out."""

    def encode(self, documents: list[D], refused: BadDocuments) -> EncodedPart:
        """Encode documents; record those that have no valid form in `refused`."""


Prepared = tuple[dict[str, Any], Mapping[str, str]]
"""Options for the key of token files, and the text of files beside the tokenizer, by name."""


class DocumentKind(Protocol):
    """A kind of documents, as configured."""

    def prepare(
        self, tokenizer: TokenizerConfig, there: Mapping[str, Any] | None = None
    ) -> Prepared:
        """Return what determines the token ids besides corpus and tokenizer; rank 0 calls it.

        `there` are the options of the token files in the folder, which a run that is continued, or
        repeated on another day, makes again. Raises ConfigError if the tokenizer cannot be used.
        """

    def open(
        self, tokenizer: TokenizerConfig, path: Path, key_parts: dict[str, Any]
    ) -> UnitEncoder[Any]:
        """Return the encoder; `path` is the tokenizer.json, next to which the other files are.

        `key_parts` are those of the token files, on all ranks.
        """


class PlainText:
    """Documents of text. Implements DocumentKind."""

    def __init__(self, engine: Engine) -> None:
        """Encode with `engine`."""
        self._engine = engine

    def prepare(
        self, tokenizer: TokenizerConfig, there: Mapping[str, Any] | None = None
    ) -> Prepared:
        """Return the token before each document, if there is one.

        Raises InputError if files beside tokenizer.json declare special tokens.
        """
        if not isinstance(tokenizer, GivenTokenizerConfig):
            return {}, {}
        content = given_tokenizer(tokenizer)
        parsed = parse_tokenizer(content, tokenizer.path)
        check_special_tokens(find_tokenizer(tokenizer), content)
        begin = None if tokenizer.bos == "never" else begin_of_document(parsed, tokenizer.path)
        # Absent without one, so that the token files of most tokenizers keep their key.
        return {} if begin is None else {"begin_of_document": begin}, {}

    def open(
        self, tokenizer: TokenizerConfig, path: Path, key_parts: dict[str, Any]
    ) -> TextUnitEncoder:
        """See DocumentKind."""
        content = read_whole(path)
        if isinstance(tokenizer, GivenTokenizerConfig):
            end, where = tokenizer.end_of_document, tokenizer.path
            return TextUnitEncoder(Encoder(content, end, where, self._engine, tokenizer.bos))
        return TextUnitEncoder(Encoder(content, tokenizer.special_tokens[0], path, self._engine))


class TextUnitEncoder:
    """An encoder of units of text. Implements UnitEncoder."""

    has_mask = pairs = False
    chat: ChatFacts | None = None

    def __init__(self, encoder: Encoder) -> None:
        """Encode documents with `encoder`."""
        self._encoder = encoder
        self.vocab_size = encoder.vocab_size
        self.end_of_document = encoder.end_of_document
        self.begin_of_document = encoder.begin_of_document

    @property
    def engine(self) -> Engine:
        """The engine in use."""
        return self._encoder.engine

    def choose_engine(self, corpus: Corpus, units: list[Unit], comm: Comm) -> None:
        """Use the fast engine if it yields the same ids on some text of all ranks."""
        engine_problem = self._encoder.engine_problem(
            some_text(corpus, units, comm.rank, comm.size)
        )
        self._encoder.choose_engine(next(filter(None, comm.gather(engine_problem)), None))

    def read(self, corpus: Corpus, unit: Unit, bad: BadDocuments) -> Iterator[list[bytes]]:
        """See UnitEncoder."""
        return read_batches(corpus, unit, bad)

    def content(self, document: bytes) -> bytes:
        """Return the text itself."""
        return document

    def encode(self, documents: list[bytes], refused: BadDocuments) -> EncodedPart:
        """See UnitEncoder. A text is refused if the tokenizer raises an error for it."""
        try:
            ids, lengths = self._encoder.encode(documents)
        except Unencodable as error:
            if len(documents) == 1:
                start = documents[0].decode()[:40]
                refused.add(lambda: f"a document that starts with {start!r}", error.why)
                return self.encode([], refused)
            # Halved, until only the document in question is left.
            middle = len(documents) // 2
            halves = (documents[:middle], documents[middle:])
            one, other = (self.encode(half, refused) for half in halves)
            return EncodedPart(
                np.concatenate([one.ids, other.ids]),
                np.concatenate([one.lengths, other.lengths]),
                None,
                one.text_bytes + other.text_bytes,
                one.lost and other.lost and one.lost + other.lost,
            )
        lost = self._encoder.lost.count(documents, ids)
        return EncodedPart(ids, lengths, None, sum(map(len, documents)), lost)
