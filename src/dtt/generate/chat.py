"""`dtt chat`: converse with a model, in a terminal or by lines of standard input."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import chain

from dtt.base.errors import DttError, InputError
from dtt.base.terminal import Message, Verbatim, raw
from dtt.data.conversations.dialects import parse_prompt
from dtt.data.conversations.rows import RefusedRow
from dtt.generate.chat_session import ChatSession, StreamedAnswer
from dtt.generate.run import Sampling, on_own_device
from dtt.hf.model_source import find_chat_format, load_model

COMMANDS = """/reset        forget the conversation, except the system prompt
/system TEXT  replace the system prompt; without TEXT, remove it
/quit         end; so does Ctrl-D. Ctrl-C stops an answer"""


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
    terminal, lines = sys.stdin is not None and sys.stdin.isatty(), read_lines()
    if not terminal:  # waits for the first line
        lines = chain([next(lines)], lines)
    trained = load_model(source, ema=ema)
    from dtt.model.generate import GeneratorPool

    generator = GeneratorPool(on_own_device(trained), 1)
    session = ChatSession(encoder, trained, generator, sampling)
    session.set_system(system)
    stdout = raw(sys.stdout)
    if isinstance(stdout, TextIOWrapper):  # not if it was replaced, for example by a test
        # JSON is UTF-8; a terminal shows ? for characters that it does not have.
        stdout.reconfigure(encoding="utf-8" if as_json else None, errors="replace")
    chat = Chat(session, as_json, show_ids)
    if terminal:
        chat.converse()
    else:
        chat.answer(lines)


def read_lines() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each line of standard input that is not blank.

    Raises InputError for one that is not UTF-8, and if there is none.
    """
    some = False
    for number, line in enumerate(() if sys.stdin is None else sys.stdin.buffer, start=1):
        where = f"standard input, line {number}"
        try:
            text = line.decode().strip()
        except UnicodeDecodeError as error:
            raise InputError("a message is not UTF-8 text", where=where, why=str(error)) from None
        if text:
            some = True
            yield where, text
    if not some:
        raise InputError(
            "standard input contains no message",
            next="write one message per line, or run dtt chat in a terminal",
        )


def notice(text: str) -> None:
    """Print a line for the user that is not part of an answer."""
    print(f"({text})", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Chat:
    """A conversation whose answers are printed to stdout."""

    session: ChatSession
    as_json: bool
    """True to print lines of JSON, else the text while it is generated."""
    show_ids: bool
    """True to print the ids of prompts too: to stderr, or in the JSON line."""

    def print(self, answer: StreamedAnswer) -> None:
        """Generate and print an answer; if interrupted, finish the output and re-raise."""
        if answer.dropped_messages and not self.as_json:
            notice(f"the context is full: dropped the oldest {answer.dropped_messages} messages")
        if self.show_ids and not self.as_json:
            notice(f"prompt ids: {answer.prompt_ids}")
        interrupted: KeyboardInterrupt | None = None
        try:
            with closing(self.session.stream(answer)) as texts:
                for text in texts:
                    if not self.as_json:
                        sys.stdout.write(Verbatim(text))
                        sys.stdout.flush()
        except KeyboardInterrupt as error:
            interrupted = error
        record: dict[str, object] = {
            "role": "assistant",
            "content": answer.content,
            "finish_reason": answer.finish_reason,
            "prompt_tokens": len(answer.prompt_ids),
            "completion_tokens": len(answer.ids),
            "cached_tokens": answer.cached_tokens,
            "dropped_messages": answer.dropped_messages,
        }
        if self.show_ids:
            record |= {"prompt_ids": answer.prompt_ids, "completion_ids": answer.ids}
        print(json.dumps(record, ensure_ascii=False) if self.as_json else "", flush=True)
        if interrupted is not None:
            raise interrupted

    def answer(self, lines: Iterable[tuple[str, str]]) -> None:
        """Answer each line of standard input: the text of a user's message.

        With JSON output, a line that starts with `{` or `[` is JSON: a message, which continues the
        conversation, or a list of messages or a row of a conversation file, which starts a new one.
        Raises DttError for the first line that cannot be answered.
        """
        for where, line in lines:
            if self.as_json and line[0] in "{[":
                self.print(self._start(line, where))
            else:
                self.print(self.session.ask({"role": "user", "content": line}))

    def _start(self, line: str, where: str) -> StreamedAnswer:
        """Return the answer to a line of JSON; InputError if it is no message or conversation."""
        try:
            value = json.loads(line)
            if isinstance(value, dict) and "role" in value:
                return self.session.ask(*parse_prompt({"messages": [value]}).messages)
            row = {"messages": value} if isinstance(value, list) else value
            return self.session.start(parse_prompt(row))
        except (ValueError, RecursionError) as error:  # RefusedRow is a ValueError
            refused = isinstance(error, RefusedRow)
            raise InputError(
                "a line is not a conversation" if refused else "a line is not JSON",
                where=where,
                why=str(error) or "it is nested too deep",
                next='write {"role": "user", "content": …} or {"messages": […]} on one line; '
                "a text that starts with { or [ needs this form, too",
            ) from None

    def converse(self) -> None:
        """Converse in a terminal until Ctrl-D or /quit. An error ends only the current message."""
        with suppress(ImportError):  # line editing and history
            import readline  # noqa: F401
        notice("/help lists the commands; Ctrl-D ends the conversation")
        while True:
            try:
                prompt = "" if self.as_json else "> "
                if not sys.stdout.isatty():
                    sys.stderr.write(prompt)  # `input` would print it to stdout, between answers
                    sys.stderr.flush()
                    prompt = ""
                line = input(prompt).strip()
            except EOFError:
                print(file=sys.stderr)
                return
            except KeyboardInterrupt:
                # Pressed again while this one is handled, it would end the conversation.
                handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
                print(file=sys.stderr)
                notice("Ctrl-D or /quit ends the conversation")
                signal.signal(signal.SIGINT, handler)
                continue
            if line == "/quit":
                return
            try:
                if line.startswith("/"):
                    self._command(*line.partition(" ")[::2])
                elif line:
                    self.print(self.session.ask({"role": "user", "content": line}))
            except KeyboardInterrupt:
                handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
                notice("interrupted")
                signal.signal(signal.SIGINT, handler)
            except DttError as error:
                print(Message(f"dtt: {error}"), file=sys.stderr, flush=True)

    def _command(self, name: str, text: str) -> None:
        if name == "/reset":
            self.session.reset()
            notice("a new conversation")
        elif name == "/system":
            self.session.set_system(text.strip())
            notice("replaced the system prompt" if text else "removed the system prompt")
        elif name == "/help":
            print(COMMANDS, file=sys.stderr)
        else:
            notice(f"there is no command {name}; /help lists them")
