"""Encoding of conversations: token ids and loss masks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from dtt.artifacts.manifests import ChatFacts, LostText
from dtt.base.errors import ConfigError
from dtt.config.data import ChatConfig
from dtt.data.conversations.conversation_tokens import (
    ControlText,
    ConversationTokens,
    EncodedText,
    Ids,
    StandInTokenizer,
    in_units,
    overlap,
)
from dtt.data.conversations.loss_mask import AnswerSpan, LossMask, check_reasoning
from dtt.data.conversations.rows import Conversation, Message, RefusedRow
from dtt.data.conversations.sandbox import FROM_ROW, MARKS
from dtt.data.conversations.template import ChatTemplate
from dtt.data.text.encoder import find_end_of_document, vocabulary_size
from dtt.data.text.tokenizer import exact_tokenizer
from dtt.data.text.unencodable import LostCharacters

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class EncodedConversation:
    """The token ids of a conversation and its targets."""

    ids: Ids
    """[tokens]"""
    mask: Mask
    """[tokens]: True if the token is a target. The first token never is."""


@dataclass(frozen=True)
class _Rendered:
    """A rendered conversation."""

    text: str
    answers: list[AnswerSpan]
    """Answers whose tokens are targets; with `train_on: all`, messages whose tokens are not."""
    last: Message | None
    """The message at the end, if it is an answer whose tokens are targets."""
    encoded: EncodedText | None
    """Its ids if the row contains strings of special tokens, which stay text; else it has none."""
    written: list[str]
    """The special tokens that the template wrote, in that case."""


class ChatEncoder:
    """An encoder of conversations for one tokenizer, template and configuration."""

    def __init__(
        self,
        tokenizer_json: bytes,
        cfg: ChatConfig,
        where: Path | str,
        template_text: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        date: str | None = None,
    ) -> None:
        """Compile the template, and find the tokens that end answers.

        `tokenizer_json` was read from `where`, and `special_tokens` are the template's variables
        `bos_token`, `eos_token` and others. `date` is that of `strftime_now`; None: now. Raises
        DamagedError if it is not a tokenizer.json, and ConfigError if the template is invalid or
        ends answers with no token of the tokenizer.
        """
        self.cfg = cfg
        self.template = ChatTemplate(template_text, special_tokens, cfg.kwargs, cfg.template, date)
        facts = json.loads(tokenizer_json)
        self._tokenizer = exact_tokenizer(tokenizer_json, where)
        # Without added tokens, a post-processor only trims white space off the offsets.
        self._tokenizer.post_processor = None
        self.vocab_size = vocabulary_size(facts)
        """Largest id + 1."""
        self._special = {
            token["id"]: token["content"]
            for token in facts.get("added_tokens") or ()
            if token["special"]
        }
        self._masks = LossMask(self.template, self._special.values())
        self._control = ControlText(self._special.values())
        self._stand_in: StandInTokenizer | None = None
        self._content, self._where = tokenizer_json, where
        size = self._tokenizer.get_vocab_size() + 1
        # An array indexed by id: one lookup for a whole conversation.
        self._is_special = np.zeros(max([size, *(i + 1 for i in self._special)]), bool)
        self._is_special[list(self._special)] = True
        self._tokens = ConversationTokens(tokenizer_json, facts, self._tokenizer)
        self._lost, self.lost = LostCharacters(self._tokenizer, facts), LostText()
        self._stops: frozenset[int] = frozenset()
        self.stop_tokens = self._find_stops(where)
        """Ids that end an answer, the most frequent first."""
        self._stops = frozenset(self.stop_tokens)
        self.lost = LostText()
        """What the tokenizer has had no token for in the conversations so far."""
        self.facts = ChatFacts(
            template_sha256=self.template.sha256,
            kwargs=cfg.kwargs,
            stop_tokens=self.stop_tokens,
            special_tokens=dict(special_tokens or {}),
        )

    def encode(self, conversation: Conversation) -> list[EncodedConversation]:
        """Return the samples of a conversation: one, or with `turns: expand` one per answer.

        Raises RefusedRow if the template refuses the conversation, its mask cannot be derived, or
        no token would be a target.
        """
        (result,) = self.encode_batch([conversation])
        if isinstance(result, RefusedRow):
            raise result
        return result

    def encode_batch(
        self, conversations: Iterable[Conversation]
    ) -> list[list[EncodedConversation] | RefusedRow]:
        """Return the samples of each conversation, or the reason to refuse it.

        Encoding many at once is faster: `tokenizers` takes several cores.
        """
        rendered: list[list[_Rendered] | RefusedRow] = []
        for conversation in conversations:
            try:
                rendered.append([self._render(*sample) for sample in self._samples(conversation)])
            except RefusedRow as refused:
                rendered.append(refused)
        samples = [one for row in rendered if isinstance(row, list) for one in row]
        texts = [one.text for one in samples if one.encoded is None]
        encodings = iter(self._tokens.encode(texts))
        results: list[list[EncodedConversation] | RefusedRow] = []
        for row in rendered:
            if isinstance(row, RefusedRow):
                results.append(row)
                continue
            mine = [one.encoded or next(encodings) for one in row]
            try:
                results.append([self._finish(*pair) for pair in zip(row, mine, strict=True)])
            except RefusedRow as refused:
                results.append(refused)
        return results

    def end_of_document(self, name: str | None) -> int | None:
        """Return the id of the token that ends documents of text, or None if there is none.

        `name` is the token that the configuration names, if any; then raise ConfigError if it does
        not exist.
        """
        try:
            return find_end_of_document(self._tokenizer, name, self._where)[1]
        except ConfigError:
            if name is not None:
                raise
            return None

    def prompt_ids(self, conversation: Conversation) -> list[int]:
        """Return the ids of a conversation with the generation prompt.

        Raises RefusedRow if the template refuses it, or the tokenizer cannot encode it.
        """
        # Through the same render as training, so that the model sees the ids it was trained on.
        text = self.template.render(conversation, add_generation_prompt=True)
        _check_marks(text)
        written = self._written(text, conversation, prompt=True)
        return [*map(int, self._encoded(text, written).ids)]

    def _written(
        self, text: str, conversation: Conversation, prompt: bool = False
    ) -> list[tuple[int, str]] | None:
        """Return the special tokens that the template wrote; None if the row contains none.

        `text` is the render of the conversation. Raises RefusedRow if they cannot be distinguished,
        or the configuration refuses such rows.
        """
        if self.cfg.control_text == "token":
            return None
        suspicious = self._control.mark(conversation)
        if suspicious is None:
            return None
        parts: list[str] = []
        with suppress(RefusedRow):
            parts = self.template.render(suspicious, prompt).split(FROM_ROW)
        # A template that reacts to the marks would be encoded differently than without them.
        if not parts or "".join(parts) != text:
            raise RefusedRow(
                "it contains text like a special token, which the chat template treats specially"
            )
        places = [*accumulate(map(len, parts[:-1]))]
        written, contained = self._control.find(text, places)
        if not contained:
            return None
        if self.cfg.control_text == "stop":
            raise RefusedRow(f"it contains the string of a special token: {contained[0]}")
        return written

    def _encoded(self, text: str, written: list[tuple[int, str]] | None) -> EncodedText:
        """Encode a text; if `written`, only the special tokens at these positions are special."""
        stand_in: tuple[Tokenizer, str] | None = None
        if written is not None:
            if self._stand_in is None:
                self._stand_in = StandInTokenizer(self._content, self._control.tokens, self._where)
            stand_in = self._stand_in.tokenizer, self._stand_in.text(text, written)
        [encoded] = self._tokens.encode([text], stand_in)
        if isinstance(encoded, RefusedRow):
            raise encoded
        return encoded

    def _samples(self, conversation: Conversation) -> list[tuple[Conversation, list[int]]]:
        """Return conversations, each with the indices of the answers to train on."""
        flags = conversation.trained or (True,) * len(conversation.messages)
        answers = [
            i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"
        ]
        if self.cfg.train_on == "last":
            answers = answers[-1:]
        trained = [i for i in answers if flags[i]]
        if self.cfg.train_on != "all" and not trained:
            raise RefusedRow("no answer is trained: all have train: false")
        if self.cfg.turns == "expand":
            return [(conversation.until(i + 1), [i]) for i in trained]
        return [(conversation, trained)]

    def _render(self, conversation: Conversation, trained: list[int]) -> _Rendered:
        """Return the text of a conversation and the spans of its targets."""
        text = self.template.render(conversation)
        _check_marks(text)
        written = self._written(text, conversation)
        end = len(conversation.messages) - 1
        if self.cfg.train_on == "all":
            # The text between messages is a target too, so the messages that are none are located.
            others = [i for i, flag in enumerate(conversation.trained) if not flag]
            answers = self._masks.answers(conversation, text, others)
            is_target = end not in others
        else:
            answers = self._masks.answers(conversation, text, trained)
            for answer in answers:
                check_reasoning(conversation, answer, text[answer.start : answer.end])
            is_target = end in trained
        last = conversation.messages[end]
        return _Rendered(
            text,
            answers,
            last if is_target and last["role"] == "assistant" else None,
            None if written is None else self._encoded(text, written),
            [token for _, token in written or ()],
        )

    def _finish(
        self, rendered: _Rendered, encoded: EncodedText | RefusedRow
    ) -> EncodedConversation:
        if isinstance(encoded, RefusedRow):
            raise encoded
        ids, trains_all = encoded.ids, self.cfg.train_on == "all"
        self.lost += self._lost.in_conversation(rendered.text, ids) or LostText()
        mask = np.full(len(ids), trains_all)
        for one in rendered.answers:
            answer = in_units(one, rendered.text, encoded.text)
            find = overlap if trains_all else self._targets
            first, last = find(encoded, answer)
            mask[first:last] = not trains_all
        if rendered.encoded is not None:
            expected = [self._tokenizer.token_to_id(token) for token in rendered.written]
            if ids[self._is_special[ids]].tolist() != expected:
                raise RefusedRow("the tokenizer turns its text into special tokens")
        mask[:1] = False
        if not mask.any():
            if not trains_all and any(one.is_omitted for one in rendered.answers):
                raise RefusedRow("the chat template renders nothing of its answers")
            raise RefusedRow("no token is a target")
        if rendered.last is not None and self._stops:
            special = np.flatnonzero(self._is_special[ids])
            after = int(encoded.ends[special[-1]]) if len(special) else 0
            if encoded.text[after:].strip():  # more than white space behind the last special token
                if rendered.last.get("tool_calls"):
                    raise RefusedRow("the chat template ends a tool call only before its result")
                # The next role ends an answer, and the last one has no next: without a stop token,
                # a model that is trained on single questions would never stop.
                ids = np.append(ids, np.uint32(self.stop_tokens[0]))
                mask = np.append(mask, True)
        return EncodedConversation(ids, mask)

    def _targets(self, encoded: EncodedText, answer: AnswerSpan) -> tuple[int, int]:
        """Return the range of the tokens of an answer, up to and including its stop token.

        The stop token is the first stop token among the special tokens at the end of the answer.
        Without any there, it is the special token that directly follows, as in GLM's templates.
        """
        if answer.is_omitted:
            return 0, 0
        ids, text, starts, _ = encoded
        first, last = overlap(encoded, answer)
        end = last
        stops = []
        while end > first:
            if self._is_special[ids[end - 1]]:
                stops.append(end)
            elif text[starts[end - 1] : answer.end].strip():
                break
            end -= 1
        if stops:
            known = [at for at in reversed(stops) if int(ids[at - 1]) in self._stops]
            return first, known[0] if known else stops[0]
        if last < len(ids) and starts[last] == answer.end:
            after = int(ids[last])
            if after in self._stops if self._stops else self._is_special[after]:
                return first, last + 1
        return first, last

    def _find_stops(self, where: Path | str) -> tuple[int, ...]:
        """Return the tokens that end answers in conversations of all kinds."""
        found: Counter[int] = Counter()
        cfg = self.cfg
        self.cfg = cfg.model_copy(update={"train_on": "assistant", "turns": "all"})
        for as_parts in (False, True):  # some templates read only contents that are lists of parts
            rows = []
            for probe in STOP_PROBES:
                messages = probe
                if as_parts:
                    messages = tuple(
                        {**one, "content": [{"type": "text", "text": one["content"]}]}
                        for one in probe
                    )
                rows.append(Conversation(messages, None, {}, (True,) * len(probe)))
            for result in self.encode_batch(rows) if not found else ():
                for one in [] if isinstance(result, RefusedRow) else result:
                    ends = one.mask & ~np.append(one.mask[1:], False)
                    found.update(i for i in one.ids[ends].tolist() if self._is_special[i])
        self.cfg = cfg
        if not found:
            raise ConfigError(
                "the chat template does not end answers with a special token of the tokenizer",
                where=where,
                why=f"its special tokens: {', '.join([*self._special.values()][:20]) or 'none'}",
                next="choose a template that was made for this tokenizer, or add its tokens to "
                "tokenizer.special_tokens",
            )
        return tuple(token for token, _ in found.most_common())


_USER: Message = {"role": "user", "content": "How warm is it?"}
_CALL = {"type": "function", "function": {"name": "thermometer", "arguments": {}}}
STOP_PROBES: tuple[tuple[Message, ...], ...] = (
    (_USER, {"role": "assistant", "content": "Warm."}),
    (
        _USER,
        {"role": "assistant", "content": "Warm."},
        _USER,
        {"role": "assistant", "content": "Still warm."},
    ),
    (
        _USER,
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "name": "thermometer", "content": "20 degrees"},
        {"role": "assistant", "content": "20 degrees."},
    ),
)
"""Conversations that show how a template ends answers."""


def _check_marks(text: str) -> None:
    """Raise RefusedRow if a text contains a mark, or half of a character."""
    if text.isascii():
        return
    if found := MARKS.search(text):
        raise RefusedRow(
            f"it contains the noncharacter U+{ord(found.group()):04X}, which is reserved for "
            "internal use"
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RefusedRow("it contains half of a character (a lone surrogate)") from None
