"""Keys of conversations: the chat template, the trained tokens, and rows that do not fit."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from dtt.config.base import Section


class ChatConfig(Section):
    """The conversion of conversations into token ids and loss masks.

    `dtt tokenize` reads it with `data.type: chat`; a job keeps it for `dtt chat` and `dtt export`.
    """

    template: str | None = None
    """Chat template: `chatml`, `tokenizer` (the tokenizer's own), or the path of a Jinja file,
    which is used unmodified. By default, the tokenizer's own, or `chatml` if it has none."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the template, such as `{enable_thinking: false}`. A row's `template_kwargs`
    take precedence."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Tokens that are targets: the answers of the assistant, each with its stop token; only the
    last answer; or all tokens of the conversation. A message with `train: false` is never one."""
    turns: Literal["all", "expand"] = "all"
    """Samples per conversation: one with all turns, or one per answer. Only `expand` equals
    inference where the template renders earlier turns differently, for example without their
    reasoning."""
    too_long: Literal["drop", "stop", "whole_turns"] = "drop"
    """Action on a conversation that is longer than `train.seq_len`: leave it out and count it, end
    with an error, or cut it after the last answer that fits. An answer is never cut."""
    control_text: Literal["text", "stop", "token"] = "text"
    """Treatment of the strings of special tokens, such as `<|im_end|>`, in the content of messages:
    encode them as ordinary text, refuse the row, or encode them as special tokens, which lets the
    data end turns and start new ones."""
