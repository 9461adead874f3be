"""Loss masks of conversations with the chat templates of public models, and those of trl.

`EVERY=1 ./env.sh pytest --all -n 0 -s tests/data/conversations/test_loss_mask.py` takes each
template, in two minutes.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.chat_shapes import NAMED, SHAPES, templates, with_tokens
from tokenizers import Tokenizer

from dtt.config.data import ChatConfig
from dtt.data.conversations.chat_encoder import ChatEncoder, EncodedConversation
from dtt.data.conversations.dialects import parse_row
from dtt.data.conversations.rows import Conversation, RefusedRow
from dtt.data.conversations.template import CHATML

EVERY = int(os.environ.get("EVERY", "4"))
"""Interval of the templates to test."""


@pytest.fixture(scope="module")
def gpt2(shared: Path) -> bytes:
    return with_tokens(shared / "data/tokenizers/gpt2")


@pytest.mark.slow
def test_masks_are_derived_for_nearly_all_pairs_of_public_templates_and_shapes(
    gpt2: bytes,
) -> None:
    """With all answers in one sample, the others are those of templates that rewrite earlier
    turns."""
    counts: Counter[str] = Counter()
    for name, text in [*templates().items(), ("chatml", CHATML)][::EVERY]:
        whole, ours = (
            ChatEncoder(gpt2, ChatConfig(turns=turns), "tokenizer.json", text, NAMED)
            for turns in ("all", "expand")
        )
        cells = []
        for row in SHAPES.values():
            conversation = parse_row(row)
            try:
                ours.template.render(conversation)
            except RefusedRow:
                cells.append("-")
                continue
            (got,), (together,) = (one.encode_batch([conversation]) for one in (ours, whole))
            if not isinstance(got, RefusedRow):
                rewritten = isinstance(together, RefusedRow)
                assert not rewritten or "chat.turns=expand" in together.why
                cells.append("expand" if rewritten else "derived")
            elif "renders nothing" in got.why:
                cells.append("nothing rendered")
            elif "reasoning in the content" in got.why:
                cells.append("other reasoning")  # that of the row would be lost, or a second one
            else:
                cells.append("refused")
        counts.update(cells)
        print(f"{name:24}", *(cell[0] for cell in cells))
    print(counts)
    renderable = counts.total() - counts["-"]
    assert renderable > 400 / EVERY
    assert counts["refused"] <= 0.04 * renderable


class Differences:
    """The classes of tokens that trl trains and dtt does not, or the reverse."""

    def __init__(self, tokenizer: Tokenizer, ours: ChatEncoder) -> None:
        self.tokenizer, self.ours = tokenizer, ours
        self.counts: Counter[str] = Counter()

    def classify(
        self, conversation: Conversation, sample: EncodedConversation, trl: Any
    ) -> set[str]:
        """Return the classes of differences in one conversation; `unexplained` among them."""
        texts = [self.tokenizer.decode([i], skip_special_tokens=False) for i in sample.ids]
        classes = set()
        differs = sample.mask != trl
        for at in np.flatnonzero(differs & ~np.append(False, differs[:-1])).tolist():
            end = at
            while end < len(differs) and differs[end] and sample.mask[end] == sample.mask[at]:
                end += 1
            classes.add(self._class(sample, at, end, "".join(texts[at:end]), conversation))
        return classes

    def _class(
        self, sample: EncodedConversation, at: int, end: int, text: str, conversation: Conversation
    ) -> str:
        stops = self.ours.stop_tokens
        if sample.mask[at]:
            if end == at + 1 and int(sample.ids[at]) in stops:
                return "trl omits the token that ends a turn"
            if "\ufffd" in text:
                return "trl omits tokens of a split character"
            return f"unexplained: {text!r}"
        follows = at and int(sample.ids[at - 1]) in stops and sample.mask[at - 1]
        if follows and text.strip() in ("", NAMED["eos_token"]):
            return "trl trains what follows the stop token"
        if end < len(sample.mask) and sample.mask[end]:
            if self._is_supplied(text, conversation):
                return "trl trains the header, which the prompt supplies"
        elif not self.tokenizer.decode(sample.ids[at:end].tolist()).strip():
            return "trl trains an answer of which the template renders nothing"
        return f"unexplained: {text!r}"

    def _is_supplied(self, text: str, conversation: Conversation) -> bool:
        """Return True if the prompt of an answer ends with a text or begins its header with it."""
        prompts = [
            self.ours.template.render(conversation.until(index), add_generation_prompt=True)
            for index, message in enumerate(conversation.messages)
            if message["role"] == "assistant"
        ]
        return any(text in prompt[-100:] for prompt in prompts)


def trl_masks(content: bytes, text: str, conversations: list[Conversation]) -> list[Any]:
    """Return (ids, mask) of each conversation with a training template of trl; None if refused."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_buffer(content), **NAMED)
    results: list[Any] = []
    for one in conversations:
        try:
            got = tokenizer.apply_chat_template(
                list(one.messages), tools=one.tools, chat_template=text,
                return_dict=True, return_assistant_tokens_mask=True,
            )  # fmt: skip
        except Exception:  # noqa: BLE001 - templates raise anything
            results.append(None)
        else:
            results.append((got["input_ids"], np.array(got["assistant_masks"], bool)))
    return results


@pytest.mark.slow
def test_masks_equal_those_of_trl_except_for_argued_classes(gpt2: bytes) -> None:
    """The text of an answer and its stop token are the targets of both.

    trl also trains line feeds after the stop token, which no inference produces, and headers that
    the generation prompt supplies at inference.
    """
    tokenizer = Tokenizer.from_buffer(gpt2)
    conversations = [parse_row(row) for row in SHAPES.values()]
    counts: Counter[str] = Counter()
    for name, training in [*templates(True).items()][::EVERY]:
        expected = trl_masks(gpt2, training, conversations)
        for text in (templates()[name], training):
            ours = ChatEncoder(gpt2, ChatConfig(), "tokenizer.json", text, NAMED)
            differences = Differences(tokenizer, ours)
            results = ours.encode_batch(conversations)
            for one, want, got in zip(conversations, expected, results, strict=True):
                if want is None or isinstance(got, RefusedRow):
                    counts["one refuses"] += 1
                elif got[0].ids.tolist() != want[0]:
                    counts["the text differs"] += 1
                else:
                    classes = differences.classify(one, got[0], want[1])
                    assert not [c for c in classes if c.startswith("unexplained")], (name, one)
                    counts.update(classes or {"equal"})
    for what, count in counts.most_common():
        print(f"{count:5} {what}")
    assert counts["trl trains what follows the stop token"] > 100 / EVERY
