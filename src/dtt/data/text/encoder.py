"""Encoding of documents by the fastest engine whose ids equal those of HF `tokenizers`.

Documents are UTF-8 bytes from the file to the engine. gigatoken encodes a batch of concatenated
documents, each followed by the string of the end-of-document token. The end-of-document tokens in
the output separate the documents. If the output contains any other special token, or if the batch
contains a document on which the engines may differ, dtt halves the batch until it has isolated
the document. These documents go to `tokenizers` one by one:

- documents that contain the string of a special token;
- documents with characters that Python's Unicode database does not know;
- documents that the tokenizer's normalizer (NFC) would change;
- very long documents, where gigatoken holds the GIL while it encodes.
"""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import AddedToken, Tokenizer

from dtt.base.errors import ConfigError, EnvironmentUnfit
from dtt.base.log import log
from dtt.config.data import Engine
from dtt.data.text.encoding_errors import encoding
from dtt.data.text.gigatoken import EncodedBatch, Gigatoken, UnsupportedTokenizer, hard_texts
from dtt.data.text.lost_characters import LostCharacters
from dtt.data.text.tokenizer import begin_of_document, exact_tokenizer

END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Tokens that may end documents, in order of preference, where the configuration names none."""


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
