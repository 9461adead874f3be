"""Encoding of documents by the fastest engine whose ids equal those of HF `tokenizers`.

Documents are UTF-8 bytes from the file to the engine. gigatoken, about 100 times as fast, encodes a
batch of concatenated documents, each followed by the string of the end-of-document token. The
end-of-document tokens in the output separate the documents. If the output contains any other
special token, or if the batch contains a document on which the engines may differ, dtt halves the
batch until it has isolated the document. These documents go to `tokenizers` one by one:

- documents that contain the string of a special token;
- documents with characters that Python's Unicode database does not know, as the engines may
  disagree on whether they are letters;
- documents that the tokenizer's normalizer (NFC) would change;
- very long documents, where gigatoken holds the GIL while it encodes.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer

from dtt.base.errors import ConfigError, EnvironmentUnfit
from dtt.base.log import log
from dtt.config.data import Engine
from dtt.data.text.tokenizer import begin_of_document, exact_tokenizer
from dtt.data.text.unencodable import LostCharacters, encoding

END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Tokens that may end documents, in order of preference, where the configuration names none."""
CACHED_BYTES = 2 * 2**30
"""Bytes of text after which the tokenizer is reopened: its cache of words grows without bound."""
LONGEST = 2**22
"""Maximum bytes per call where gigatoken holds the GIL.

This is a few seconds at worst, so that the thread that watches the launcher can still run in time.
"""

Ids = npt.NDArray[np.uint32]


class EncodedBatch(NamedTuple):
    """Encoded documents in one token buffer, each ended by the end-of-document token."""

    ids: Ids
    """[sum(lengths)]: token ids."""
    lengths: npt.NDArray[np.int32]
    """[documents]: tokens of each document, end-of-document token included."""

    def documents(self) -> Iterator[Ids]:
        """Yield the ids of each document."""
        start = 0
        for length in self.lengths.tolist():
            yield self.ids[start : start + length]
            start += length


class UnsupportedTokenizer(Exception):
    """Raised if gigatoken cannot be used; the message is the reason."""


class Gigatoken:
    """An encoder that uses gigatoken on the calling thread and falls back to `exact`."""

    def __init__(
        self,
        content: bytes,
        normalizer: Any,
        special: Mapping[str, int],
        end: str,
        exact: Callable[[list[bytes]], EncodedBatch],
    ) -> None:
        """Open gigatoken with `content`, a tokenizer.json, and its `normalizer` section.

        `special` maps special tokens to their ids; their strings in documents are encoded as text.
        `end`, one of them, ends documents. `exact` encodes the documents that gigatoken might
        encode differently.

        Raises UnsupportedTokenizer if gigatoken is not installed or does not support the tokenizer.
        """
        self._content = content
        self._separator, self._end = end.encode(), special[end]
        self._lowest, self._highest = min(special.values()), max(special.values())
        self._special = np.zeros(self._highest + 1, np.bool_)
        self._special[[*special.values()]] = True
        self._known = np.zeros(sys.maxunicode + 1, np.bool_)
        self._exact = exact
        self._composes = _composes(normalizer)
        self._longest = sys.maxsize
        self._encode = self._open()
        self._room = CACHED_BYTES

    def __call__(self, documents: list[bytes]) -> EncodedBatch:
        """Encode documents, which must be valid UTF-8.

        If a batch cannot be encoded together, it is halved until only the documents in question
        are left to `exact`.
        """
        if (row := self._together(documents)) is not None:
            return row
        if len(documents) == 1:
            return self._exact(documents)
        middle = len(documents) // 2
        ids, lengths = zip(self(documents[:middle]), self(documents[middle:]), strict=True)
        return EncodedBatch(np.concatenate(ids), np.concatenate(lengths))

    def difference(self, documents: list[bytes]) -> str | None:
        """Return a message about the first document whose ids differ from `exact`, else None."""
        taken = [one for one in documents if self._together([one])]
        rows = zip(taken, self(taken).documents(), self._exact(taken).documents(), strict=True)
        for one, ours, exact in rows:
            if not np.array_equal(ours, exact):
                return f"gigatoken returns different ids for {one.decode()[:60]!r}"
        return None

    def _open(self) -> Callable[[bytes], Ids]:
        try:
            from gigatoken import BytesSource, Tokenizer
            from gigatoken.gigatoken_rs import SentencePieceTokenizer
        except ImportError as error:
            raise UnsupportedTokenizer(f"gigatoken is not installed ({error})") from None
        try:
            tokenizer = Tokenizer.from_json(self._content)
        except Exception as error:  # noqa: BLE001 - any error of its Rust code
            raise UnsupportedTokenizer(
                f"gigatoken does not support this tokenizer: {error}"
            ) from None

        if isinstance(tokenizer.backend, SentencePieceTokenizer):
            self._longest = LONGEST
            locked: Callable[[bytes], Ids] = tokenizer.backend.encode
            return locked  # `encode_batch_padded` would start with an empty cache on each call

        def encode(text: bytes) -> Ids:
            # Unlike `encode`, this call releases the GIL. Unlike `encode_batch`, it does not import
            # awkward, which takes as long as encoding 100 MB.
            rows, _ = tokenizer.encode_batch_padded(BytesSource(text), pad_id=0, parallel=False)
            row: Ids = rows[0]
            return row

        return encode

    def _together(self, documents: list[bytes]) -> EncodedBatch | None:
        """Encode documents in one call; return None if the engines might differ on them.

        A special token other than the ends of documents means that a document contained its string,
        which must be encoded as text.
        """
        text = self._separator.join([*documents, b""])
        if len(text) > self._longest or not self._agrees_on(documents):
            return None
        self._room -= len(text)
        if self._room < 0:
            self._encode, self._room = self._open(), CACHED_BYTES
        ids = self._encode(text)
        if self._lowest == self._highest:
            places = np.flatnonzero(ids == self._end)
        else:
            places = np.flatnonzero((ids >= self._lowest) & (ids <= self._highest))
            places = places[self._special[ids[places]]]
        if len(places) != len(documents) or (ids[places] != self._end).any():
            return None
        return EncodedBatch(ids, np.diff(places, prepend=-1).astype(np.int32))

    def _agrees_on(self, documents: list[bytes]) -> bool:
        """Return True if both engines treat all characters in the same way.

        This requires characters that are defined in Python's version of Unicode and, if the
        tokenizer normalises to NFC, text that is already NFC.

        The NFC form of defined characters never changes
        (https://www.unicode.org/policies/stability_policy.html), and their categories hardly ever
        do; the tests compare them. At the time of writing the engines implement Unicode 16 and 17,
        Python 3.11 implements 14 and Python 3.14 implements 16.
        """
        text = b"\n".join(one for one in documents if not one.isascii())
        if not text:
            return True
        content = np.frombuffer(text, np.uint8)
        characters = content[content >= 0x80].tobytes().decode()
        codes = np.frombuffer(characters.encode("utf-32-le"), np.uint32)
        for code in set(codes[~self._known[codes]].tolist()):
            if unicodedata.category(chr(code)) == "Cn":
                return False
            self._known[code] = True
        return not self._composes or unicodedata.is_normalized("NFC", text.decode())


class Encoder:
    """An encoder of documents that appends the end-of-document token to each.

    With `bos`, each begins with the token that the tokenizer adds before a text, if it adds one.

    Special-token strings in a document are encoded as ordinary text, so a document cannot contain
    an end-of-document token. Apart from that, the ids are those of `encode(text,
    add_special_tokens=False)` of `tokenizers`, with either engine.
    """

    def __init__(
        self,
        content: bytes,
        end_of_document: str | None,
        where: Path | str,
        engine: Engine = "hf",
        bos: Literal["tokenizer", "never"] = "never",
    ) -> None:
        """Create an encoder from `content`, a tokenizer.json that was read from `where`.

        `end_of_document` is the token that ends documents; None selects the first known one of
        END_OF_DOCUMENT. With the engine `auto` or `gigatoken`, call `choose_engine` before
        encoding.

        Raises DamagedError if `content` is not a tokenizer.json, and ConfigError if the tokenizer
        has no end-of-document token.
        """
        self._tokenizer = tokenizer = exact_tokenizer(content, where)
        self._where, self._patterns = where, b'"Regex"' in content
        facts = json.loads(content)
        self.lost = LostCharacters(tokenizer, facts)
        """Counter of the characters that have no token."""
        self.vocab_size = vocabulary_size(facts)
        """Largest id + 1."""
        added = tokenizer.get_added_tokens_decoder()
        self.begin_of_document = None if bos == "never" else begin_of_document(tokenizer, where)
        name, self.end_of_document = find_end_of_document(tokenizer, end_of_document, where)
        # `encode_special_tokens` affects only tokens that are marked as special.
        tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True)])
        tokenizer.encode_special_tokens = True
        self.end_of_document_token = name
        special = {t.content: i for i, t in added.items() if t.special}
        special[name] = self.end_of_document
        ended = _ended_by(name, self.end_of_document, facts, content)
        normalizer = facts.get("normalizer")
        self._asked = engine
        self._fast: Gigatoken | None = None
        self._problem: str | None = None
        """Reason why the fast engine is not available."""
        if engine != "hf":
            try:
                self._fast = Gigatoken(ended, normalizer, special, name, self._exact)
            except UnsupportedTokenizer as error:
                self._problem = str(error)

    @property
    def engine(self) -> Engine:
        """The engine in use."""
        return "hf" if self._fast is None else "gigatoken"

    def engine_problem(self, sample: list[bytes]) -> str | None:
        """Return the reason why the fast engine cannot be used, or None if it can.

        It cannot if it is unavailable or if its ids differ. To compare, both engines encode
        `sample` and some strings that are hard to split; `tokenizers` takes about 1 s per 3 MB.
        """
        if self._fast is None:
            return self._problem
        added = [t.content for t in self._tokenizer.get_added_tokens_decoder().values()]
        return self._fast.difference([*sample, *map(str.encode, hard_texts(added))])

    def choose_engine(self, engine_problem: str | None) -> None:
        """Choose the engine: the fast one if `engine_problem` is None, else `tokenizers`.

        Raises EnvironmentUnfit if there is one and the configuration requires `gigatoken`.
        """
        if engine_problem is None:
            return
        if self._asked == "gigatoken":
            raise EnvironmentUnfit(
                "gigatoken cannot encode this corpus",
                why=engine_problem,
                next="tokenize.engine=auto",
            )
        log.info("encoding with Hugging Face's tokenizers, which is slower: %s", engine_problem)
        self._fast = None

    def encode(self, documents: list[bytes]) -> EncodedBatch:
        """Encode documents, which must be valid UTF-8; Unencodable if one of them cannot be."""
        batch = (self._fast or self._exact)(documents)
        if self.begin_of_document is None:
            return batch
        starts = np.cumsum(batch.lengths, dtype=np.int64) - batch.lengths
        ids = np.insert(batch.ids, starts, np.uint32(self.begin_of_document))
        return EncodedBatch(ids, batch.lengths + np.int32(1))

    def _exact(self, documents: list[bytes]) -> EncodedBatch:
        texts = [one.decode() for one in documents]
        with encoding(self._where, patterns=self._patterns):
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ids = [[*one.ids, self.end_of_document] for one in encodings]
        lengths = np.fromiter(map(len, ids), np.int32, len(ids))
        return EncodedBatch(
            np.fromiter(chain.from_iterable(ids), np.uint32, int(lengths.sum())), lengths
        )


def find_end_of_document(
    tokenizer: Tokenizer, name: str | None, where: Path | str
) -> tuple[str, int]:
    """Return the token that ends documents, `name` or the first known one, and its id.

    Raises ConfigError, with `where` as its location, if the tokenizer does not have it.
    """
    candidates = END_OF_DOCUMENT if name is None else (name,)
    for token in candidates:
        id = tokenizer.token_to_id(token)
        if id is not None:
            return token, id
    names = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    raise ConfigError(
        f"the tokenizer has no {' or '.join(candidates)} to end documents with",
        where=where,
        why=f"its special tokens: {', '.join(names[:20]) or 'none'}",
        next=f"tokenizer.end_of_document={names[0] if names else 'TOKEN'}",
    )


def _ended_by(name: str, id: int, facts: dict[str, Any], content: bytes) -> bytes:
    """Return a tokenizer.json in which the token `name` is special and matches exactly.

    Flags that would make it match only single words, or strip adjacent spaces, are switched off.
    """
    added = facts.get("added_tokens") or []
    plain = {
        "id": id, "content": name, "special": True,
        "single_word": False, "lstrip": False, "rstrip": False,
    }  # fmt: skip
    if any(plain.items() <= token.items() for token in added):
        return content
    others = [token for token in added if token["content"] != name]
    tokens = sorted([*others, plain | {"normalized": False}], key=lambda token: token["id"])
    return json.dumps(facts | {"added_tokens": tokens}).encode()


def vocabulary_size(facts: dict[str, Any]) -> int:
    """Return the largest id in `facts`, the decoded content of a tokenizer.json, + 1.

    Listing the vocabulary with `tokenizers` instead would take twice as long.
    """
    vocabulary = facts["model"]["vocab"]
    largest: int = max(vocabulary.values()) if isinstance(vocabulary, dict) else len(vocabulary) - 1
    added: list[int] = [token["id"] for token in facts.get("added_tokens") or ()]
    return max([largest, *added]) + 1


def _composes(normalizer: Any) -> bool:
    """Return True if the normalizer is NFC.

    Raises UnsupportedTokenizer unless it is NFC, absent, or SentencePiece's replacement of spaces.
    """
    match normalizer:
        case None:
            return False
        case {"type": "NFC"}:
            return True
        case {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend"}, {"type": "Replace", "pattern": {"String": " "}}],
        }:
            return False
    raise UnsupportedTokenizer(
        f"it is used with no normalizer or NFC, not {json.dumps(normalizer)[:80]}"
    )


def hard_texts(added_tokens: Iterable[str]) -> list[str]:
    """Return short texts on which tokenizers are known to differ, some with the added tokens."""
    return [
        "", " ", "  ", "\n", "\r\n", "\t", "\x00", "\u00a0", "\u2028", "\ufeff", "\u200b",
        "a  b   c    d     e" + " " * 30 + "f", " lead and trail ",
        "\n\n\n text\n \n  \n\tx \r\n\r y", "I'll don't WE'RE 'tis ’s 's'S'd'D",
        "0 12 345 6789 01234567890 3.14 1,000,000 ½ ² ٣٤ 一二 Ⅷ",
        "naïve café Å é ñ ǆ ﬁ ß İ ı Σς", "日本語のテキスト。汉字漢字 한국어 ｶﾞ",
        "हिन्दी ক্ত ไทย ລາວ မြန်မာ עברית العَرَبِيَّة",
        "🤗 👍🏽 🇩🇪 ❤\ufe0f \U0001f469\u200d\U0001f467 𝔘𝔫𝔦 𐍈 𠀋",
        "e\u0301\u0327 a\u0308\u0323 \u0301 \u212b \u1112\u1161\u11ab \u0915\u093c",
        "\ud7ff\ue000\ufffd\uffff\U00010000\U0010ffff", "x" * 300, "ab" * 200,
        "!?.,;:-_=+*/\\|@#$%^&~`'\"()[]{}<>" * 3, "_a__b___c ....... ------ ====",
        "def f(x):\n    return x**2  # ok\n\n\nclass A:\n\tpass\n",
        "http://a.b/c?d=e&f=%20 a@b.c <p>x</p>",
        *(f"a{token}b {token} c\n{token}" for token in added_tokens),
    ]  # fmt: skip
