"""Conversations as a kind of documents that `dtt tokenize` reads and encodes by units of work.

A render yields the text of a conversation, and renders of its first turns the positions of its
answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from dtt.artifacts.manifests import CHAT_TEMPLATE, ChatFacts, LostText
from dtt.base.errors import ConfigError
from dtt.base.log import log
from dtt.base.reading import read_whole
from dtt.config.data import ChatConfig, Engine, GivenTokenizerConfig, TokenizerConfig
from dtt.data.conversations.chat_encoder import ChatEncoder, EncodedConversation
from dtt.data.conversations.dialects import TEXTS, parse_pair, parse_row
from dtt.data.conversations.loss_mask import VERSION as MASK_VERSION
from dtt.data.conversations.rows import REASONING, Conversation, RefusedRow
from dtt.data.conversations.template import CHATML, resolve_template, special_tokens_beside
from dtt.data.corpus.bad_documents import BadDocuments, raise_if_refused
from dtt.data.corpus.documents import JsonRow, read_rows
from dtt.data.corpus.units import Corpus, Unit
from dtt.data.text.tokenizer import find_tokenizer, token_bytes
from dtt.data.text.unit_encoder import EncodedPart, Prepared, UnitEncoder

READS_THE_CLOCK = re.compile(r"\bstrftime_now\b")
"""Templates such as Llama 3's print the current date."""
OWN = "the tokenizer has its own, which --overwrite takes"
ROWS_VERSION = 3
"""Version of the parsing of rows; part of the key of token files."""
AT_ONCE = 256
"""Conversations per call of the encoder; its results take many times the memory of the ids."""


def today() -> str:
    """Return the local date, as 2026-01-31."""
    return datetime.now().astimezone().date().isoformat()


class Conversations:
    """Rows with conversations. Implements dtt.data.text.unit_encoder.DocumentKind."""

    def __init__(self, cfg: ChatConfig, *, pairs: bool = False, engine: Engine = "auto") -> None:
        """Render and encode conversations according to `cfg`; with `pairs`, preference pairs."""
        self._cfg, self._pairs, self._engine = cfg, pairs, engine

    def prepare(
        self, tokenizer: TokenizerConfig, there: Mapping[str, Any] | None = None
    ) -> Prepared:
        """See DocumentKind. Raises ConfigError for gigatoken and for a tokenizer to be trained.

        Of token files that are `there`, the date is kept, and the template if none is configured:
        earlier versions of dtt took `chatml` for every tokenizer.
        """
        known = (there or {}).get("chat", {})
        if not isinstance(tokenizer, GivenTokenizerConfig):
            raise ConfigError(
                "conversations need an existing tokenizer",
                where="tokenizer.type",
                why="fine-tuning uses the tokenizer of the pretrained model",
                next="tokenizer.type=file tokenizer.path=data/tokens/…/tokenizer.json; to reserve"
                " the special tokens of conversations, pretrain with tokenizer.chat_tokens=true",
            )
        if self._engine == "gigatoken":
            raise ConfigError(
                "gigatoken encodes text, not conversations",
                where="tokenize.engine",
                next="tokenize.engine=auto",
            )
        path = find_tokenizer(tokenizer)
        template = resolve_template(self._cfg.template, path)
        if self._cfg.template is None and template != CHATML:
            if known.get("template_sha256") == sha256(CHATML.encode()).hexdigest():
                template = CHATML
                log.info("chat template: chatml, as in the token files that are there; %s", OWN)
            else:
                log.info("chat template: the tokenizer's own")
        kind = {"rows": "preference pairs"} if self._pairs else {}
        if READS_THE_CLOCK.search(template):
            # Token files of one key must be equal, so they have one date: that of the first run.
            kind["date"] = known.get("date", today())
        options = self._cfg.model_dump(mode="json", exclude={"template", "too_long"})
        facts = {
            "template_sha256": sha256(template.encode()).hexdigest(),
            "special_tokens": special_tokens_beside(path),
            **kind,
            "rows_version": ROWS_VERSION,
            "mask_version": MASK_VERSION,
            **options,
        }
        return {"chat": facts}, {CHAT_TEMPLATE: template}

    def open(
        self, tokenizer: TokenizerConfig, path: Path, key_parts: dict[str, Any]
    ) -> ConversationEncoder:
        """See DocumentKind."""
        assert isinstance(tokenizer, GivenTokenizerConfig)
        return ConversationEncoder(self._cfg, tokenizer, path, key_parts["chat"], self._pairs)


class ConversationEncoder(UnitEncoder[JsonRow]):
    """A reader and encoder of the conversations of units."""

    has_mask = True
    engine: Engine = "hf"
    begin_of_document: int | None = None

    def __init__(
        self,
        cfg: ChatConfig,
        tokenizer: GivenTokenizerConfig,
        path: Path,
        facts: dict[str, Any],
        pairs: bool,
    ) -> None:
        """Open the tokenizer.json at `path` and the template beside it.

        `facts` are those of the key: the date and the special tokens. With `pairs`, a row is a
        preference pair, which becomes two sequences, the chosen conversation first.
        """
        self.pairs = pairs
        self._read: dict[str, bool] = {"role": True, "content": True}
        """Keys of messages, and whether the template may read them."""
        self._chat = ChatEncoder(
            read_whole(path),
            cfg,
            tokenizer.path,
            read_whole(path.with_name(CHAT_TEMPLATE)).decode(),
            facts["special_tokens"],
            date=facts.get("date"),
        )
        self.chat: ChatFacts | None = self._chat.facts
        self.vocab_size = self._chat.vocab_size
        # The same as for text, so that both can be mixed.
        end = self._chat.end_of_document(tokenizer.end_of_document)
        self.end_of_document = self._chat.stop_tokens[0] if end is None else end
        self._bytes = token_bytes(path, self.vocab_size, self.end_of_document)

    def read(self, corpus: Corpus, unit: Unit, bad: BadDocuments) -> Iterator[list[JsonRow]]:
        """See UnitEncoder."""
        return read_rows(corpus, unit, bad)

    def content(self, document: JsonRow) -> bytes:
        """Return the JSON text of a row."""
        return document.content

    def encode(self, documents: list[JsonRow], refused: BadDocuments) -> EncodedPart:
        """See UnitEncoder. One row may become several sequences."""
        found: list[EncodedConversation] = []
        self._chat.lost = LostText()
        for first in range(0, len(documents), AT_ONCE):
            found += self._encode(documents[first : first + AT_ONCE], refused)
        ids = np.concatenate([np.empty(0, np.uint32), *(one.ids for one in found)])
        mask = np.concatenate([np.empty(0, np.bool_), *(one.mask for one in found)])
        lengths = np.fromiter((len(one.ids) for one in found), np.int32, len(found))
        # Special tokens do not count as text. If the bytes per token are unknown, the size of the
        # rows is an estimate.
        text_bytes = sum(len(row.content) for row in documents)
        if self._bytes is not None:
            text_bytes = int(self._bytes[ids].sum())
        lost = self._chat.lost
        return EncodedPart(ids, lengths, mask, text_bytes, lost if lost.of else None)

    def _encode(self, rows: list[JsonRow], refused: BadDocuments) -> Iterator[EncodedConversation]:
        parsed: list[tuple[JsonRow, list[Conversation]]] = []
        for row in rows:
            with refused.guard(row.where):
                conversations = self._parse(row)
                unread = self._unread(conversations)
                refused.nulls += any(map(_has_nulls, conversations))
                refused.count_unread(unread)
                parsed.append((row, conversations))
        results = self._results([conversations for _, conversations in parsed])
        for (row, _), mine in zip(parsed, results, strict=True):
            found: list[EncodedConversation] = []
            with refused.guard(row.where):
                for result in mine:
                    if isinstance(result, Exception):
                        raise result  # a pair is refused if either of its conversations is
                    found += result
                yield from found

    def _results(
        self, rows: list[list[Conversation]]
    ) -> list[list[list[EncodedConversation] | Exception]]:
        """Return the samples of each conversation of each row, or what encoding it raises."""
        try:
            results = iter(self._chat.encode_batch(chain.from_iterable(rows)))
            return [[next(results) for _ in conversations] for conversations in rows]
        except Exception as error:  # noqa: BLE001  templates and tokenizers raise anything
            raise_if_refused(error)
            if len(rows) == 1:
                return [[error]]
        return [self._results([row])[0] for row in rows]  # one at a time, to keep the others

    def _unread(self, conversations: list[Conversation]) -> list[str]:
        """Return the keys of a row, and of its messages, that nothing reads, each once.

        Raises RefusedRow if a reasoning or another text is among them: the model would learn to
        answer without it.
        """
        found = dict.fromkeys(key for one in conversations for key in one.unread)
        for i, message in enumerate(m for one in conversations for m in one.messages):
            for key in [key for key in message if key not in self._read]:
                # A reasoning is rendered under all of its names.
                names = REASONING if key in REASONING else (key,)
                self._read[key] = any(map(self._chat.template.mentions, names))
            unread = [key for key in message if not self._read[key]]
            if lost := [key for key in unread if key in REASONING]:
                raise RefusedRow(f"messages[{i}].{lost[0]}: the chat template reads no reasoning")
            if lost := [key for key in unread if key in TEXTS and message[key]]:
                raise RefusedRow(f"messages[{i}].{lost[0]}: the chat template does not read it")
            found.update(dict.fromkeys(f"messages[].{key}" for key in unread))
        return list(found)

    def _parse(self, row: JsonRow) -> list[Conversation]:
        """Return the conversation of a row, or both of a pair; raise RefusedRow."""
        if not self.pairs:
            return [parse_row(row.value)]
        pair = parse_pair(row.value)
        if pair.chosen.messages == pair.rejected.messages:
            raise RefusedRow("chosen and rejected are the same")
        return [pair.chosen, pair.rejected]


def _has_nulls(conversation: Conversation) -> bool:
    """Return True if tools, or the arguments of calls, have keys whose value is null.

    `datasets` writes such JSON lines: in its columns all tools have the keys of each of them. What
    a template prints of them would be trained. Rows of Parquet files have lost them already.
    """
    pending: list[Any] = [conversation.tools]
    pending += [message.get("tool_calls") for message in conversation.messages]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if None in value.values():
                return True
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    return False
