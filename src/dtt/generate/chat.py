"""`dtt chat`: converse with a model."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

from dtt.base.errors import InputError
from dtt.generate.chat_console import (
    AnswerPrinter,
    answer_lines,
    converse,
    open_stdout,
    read_lines,
)
from dtt.generate.chat_session import ChatSession
from dtt.generate.run import Sampling
from dtt.hf.model_source import find_chat_format, load_model, on_device

if TYPE_CHECKING:
    from dtt.data.conversations.chat_encoder import ChatEncoder
    from dtt.hf.read import LoadedModel
    from dtt.model.generate import GeneratorPool, PrefixCachedGenerator


def run(
    source: str,
    system: str,
    sampling: Sampling,
    *,
    template: str | None = None,
    ema: bool = False,
    show_ids: bool = False,
    as_json: bool = False,
) -> None:
    """Converse in the terminal, or answer the lines of standard input.

    `load_model` describes `source` and `ema`. `template` replaces the model's own chat template; a
    model without one needs it. With `as_json`, each answer is a line of JSON; with `show_ids`, the
    ids of prompts are printed, too.
    """
    # Refuses a malformed template before it waits for input.
    encoder = find_chat_format(source, template).encoder()
    terminal = sys.stdin is not None and sys.stdin.isatty()
    lines = None if terminal else _first_of(read_lines(_stdin()))
    trained = load_model(source, ema=ema)
    import torch

    from dtt.model.generate import PrefixCachedGenerator

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = PrefixCachedGenerator(on_device(trained, device))
    session = open_session(encoder, trained, generator, sampling)
    session.set_system(system)
    open_stdout(as_json=as_json)
    printer = AnswerPrinter(as_json, show_ids)
    if lines is None:
        converse(session, printer)
    else:
        answer_lines(session, printer, lines)


def open_session(
    encoder: ChatEncoder,
    trained: LoadedModel,
    generator: PrefixCachedGenerator | GeneratorPool,
    sampling: Sampling,
) -> ChatSession:
    """Return a conversation without messages."""
    from dtt.data.text.tokenizer import open_tokenizer

    stop_tokens = frozenset(trained.stop_tokens(encoder))
    tokenizer = open_tokenizer(trained.tokenizer)
    return ChatSession(encoder, tokenizer, trained.check_ids, generator, stop_tokens, sampling)


def _stdin() -> Iterable[bytes]:
    """Return the lines of standard input; none if it is closed."""
    return () if sys.stdin is None else sys.stdin.buffer


def _first_of(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Return the lines after waiting for the first one; InputError if there is none."""
    first = next(lines, None)
    if first is None:
        raise InputError(
            "standard input contains no message",
            next="write one message per line, or run dtt chat in a terminal",
        )
    return chain([first], lines)
