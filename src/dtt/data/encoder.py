"""Documents to ids, by the fastest engine that gives the ids of Hugging Face's `tokenizers`."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, models

from dtt.config.data import Engine
from dtt.data.gigatoken import Gigatoken, Row, Unfit, hard_texts
from dtt.data.tokenizer import parse_tokenizer
from dtt.errors import ConfigError, EnvironmentUnfit
from dtt.runtime.log import log

END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class Encoder:
    """Documents to ids, each ended by the end-of-document token.

    Special-token strings in a document are encoded as the text that they are, so no document can
    end itself. Apart from that ids are those of `tokenizers`' `encode(text,
    add_special_tokens=False)`, whatever the engine.
    """

    def __init__(
        self,
        content: bytes,
        end_of_document: str | None,
        where: Path | str,
        engine: Engine = "hf",
    ) -> None:
        """`content` of a tokenizer.json that came from `where`; see GivenTokenizerConfig.

        With the engine `auto` or `gigatoken`, `settle` must follow.

        Raises DamagedError if it is none, ConfigError if it has no end-of-document token.
        """
        self._tokenizer = tokenizer = parse_tokenizer(content, where)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if isinstance(tokenizer.model, models.BPE):
            tokenizer.model.dropout = None  # it would give other ids each time
        facts = json.loads(content)
        self.vocab_size = _largest_id(facts) + 1
        """Largest id + 1."""
        added = tokenizer.get_added_tokens_decoder()
        candidates = END_OF_DOCUMENT if end_of_document is None else (end_of_document,)
        known = {t: i for t in candidates if (i := tokenizer.token_to_id(t)) is not None}
        name = next(iter(known), None)
        if name is None:
            names = [token.content for token in added.values()]
            raise ConfigError(
                f"the tokenizer has no {' or '.join(candidates)} to end documents with",
                where=where,
                why=f"its special tokens: {', '.join(names[:20]) or 'none'}",
                next=f"tokenizer.end_of_document={names[0] if names else 'TOKEN'}",
            )
        # Only tokens that are marked special are left alone by `encode_special_tokens`.
        tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True)])
        tokenizer.encode_special_tokens = True
        self.end_of_document_token = name
        self.end_of_document: int = known[name]
        self._asked = engine
        self._fast: Gigatoken | None = None
        self._doubt: str | None = None
        """Why there is no fast engine."""
        if engine != "hf":
            special = {t.content: i for i, t in added.items() if t.special} | {name: known[name]}
            ended = _ended_by(name, known[name], facts, content)
            try:
                self._fast = Gigatoken(ended, facts.get("normalizer"), special, name, self._exact)
            except Unfit as error:
                self._doubt = str(error)

    @property
    def engine(self) -> Engine:
        """Which one encodes."""
        return "hf" if self._fast is None else "gigatoken"

    def doubt(self, sample: list[bytes]) -> str | None:
        """Why the fast engine must not be used: it is missing, or differs; None if it may be.

        Encodes `sample` and some strings that are hard to split, by both; `tokenizers` takes about
        a second for 3 MB.
        """
        if self._fast is None:
            return self._doubt
        added = [t.content for t in self._tokenizer.get_added_tokens_decoder().values()]
        return self._fast.difference([*sample, *map(str.encode, hard_texts(added))])

    def settle(self, doubt: str | None) -> None:
        """Use the fast engine only without a `doubt`.

        Raises EnvironmentUnfit if there is one although that engine was asked for by name.
        """
        if doubt is None:
            return
        if self._asked == "gigatoken":
            raise EnvironmentUnfit(
                "gigatoken cannot encode this corpus", why=doubt, next="tokenize.engine=auto"
            )
        log.info("encoding with Hugging Face's tokenizers, which is slower: %s", doubt)
        self._fast = None

    def encode(self, documents: list[bytes]) -> Row:
        """Encode documents, all of them UTF-8."""
        return (self._fast or self._exact)(documents)

    def _exact(self, documents: list[bytes]) -> Row:
        texts = [one.decode() for one in documents]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ids = [[*encoding.ids, self.end_of_document] for encoding in encodings]
        lengths = np.fromiter(map(len, ids), np.int32, len(ids))
        return Row(np.fromiter(chain.from_iterable(ids), np.uint32, int(lengths.sum())), lengths)


def _ended_by(name: str, id: int, facts: dict[str, Any], content: bytes) -> bytes:
    """A tokenizer.json in which the token `name` is special and takes nothing of its neighbours."""
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


def _largest_id(facts: dict[str, Any]) -> int:
    """Of a tokenizer.json; to have `tokenizers` list the vocabulary takes twice as long."""
    vocabulary = facts["model"]["vocab"]
    largest: int = max(vocabulary.values()) if isinstance(vocabulary, dict) else len(vocabulary) - 1
    added: list[int] = [token["id"] for token in facts.get("added_tokens") or ()]
    return max([largest, *added])
