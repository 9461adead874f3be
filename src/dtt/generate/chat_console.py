"""The front ends of `dtt chat`: a terminal, and lines on standard input."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from io import TextIOWrapper

from dtt.base.errors import DttError, InputError
from dtt.base.terminal import Message, Verbatim, raw
from dtt.data.conversations.dialects import parse_prompt
from dtt.data.conversations.rows import RefusedRow
from dtt.generate.chat_session import ChatSession, StreamedAnswer

COMMANDS = """/reset        forget the conversation, except the system prompt
/system TEXT  replace the system prompt; without TEXT, remove it
/quit         end; so does Ctrl-D. Ctrl-C stops an answer"""
STDIN = "standard input"


@dataclass(frozen=True)
class AnswerPrinter:
    """A printer of answers to stdout: as text while they are generated, or as lines of JSON."""

    as_json: bool
    show_ids: bool
    """True to print the ids of prompts too: to stderr, or in the JSON line."""

    def print(self, session: ChatSession, answer: StreamedAnswer) -> None:
        """Generate and print an answer; if interrupted, finish the output and re-raise."""
        if answer.dropped_messages and not self.as_json:
            notice(f"the context is full: dropped the oldest {answer.dropped_messages} messages")
        if self.show_ids and not self.as_json:
            notice(f"prompt ids: {answer.prompt_ids}")
        try:
            with closing(session.stream(answer)) as texts:
                for text in texts:
                    if not self.as_json:
                        sys.stdout.write(Verbatim(text))
                        sys.stdout.flush()
        except KeyboardInterrupt:
            self._print_end(answer)
            raise
        self._print_end(answer)

    def _print_end(self, answer: StreamedAnswer) -> None:
        print(self._record(answer) if self.as_json else "", flush=True)

    def _record(self, answer: StreamedAnswer) -> str:
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
        return json.dumps(record, ensure_ascii=False)


def open_stdout(*, as_json: bool) -> None:
    """Make every text printable: JSON is UTF-8; a terminal shows ? for unsupported characters."""
    stdout = raw(sys.stdout)
    if isinstance(stdout, TextIOWrapper):  # not if it was replaced, for example by a test
        stdout.reconfigure(encoding="utf-8" if as_json else None, errors="replace")


def notice(text: str) -> None:
    """Print a line for the user that is not part of an answer."""
    print(f"({text})", file=sys.stderr, flush=True)


def converse(session: ChatSession, printer: AnswerPrinter) -> None:
    """Converse in a terminal until Ctrl-D or /quit. An error ends only the current message."""
    with suppress(ImportError):  # line editing and history
        import readline  # noqa: F401
    interrupts = Interrupts()
    notice("/help lists the commands; Ctrl-D ends the conversation")
    while True:
        try:
            with interrupts.enabled():
                line = _read_line("" if printer.as_json else "> ")
        except KeyboardInterrupt:
            print(file=sys.stderr)
            notice("Ctrl-D or /quit ends the conversation")
            continue
        if line is None or line == "/quit":
            return
        try:
            if line.startswith("/"):
                _run_command(session, line)
            elif line:
                with interrupts.enabled():
                    printer.print(session, session.ask({"role": "user", "content": line}))
        except KeyboardInterrupt:
            notice("interrupted")
        except DttError as error:
            print(Message(f"dtt: {error}"), file=sys.stderr, flush=True)


class Interrupts:
    """Ctrl-C that raises KeyboardInterrupt at most once, and only where it is enabled.

    The default handler would raise it again while the first is handled: pressed twice, Ctrl-C would
    end the conversation.
    """

    def __init__(self) -> None:
        self._enabled = False
        signal.signal(signal.SIGINT, self._handle)

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """Return a context in which Ctrl-C raises KeyboardInterrupt."""
        self._enabled = True
        try:
            yield
        finally:
            self._enabled = False

    def _handle(self, *_: object) -> None:
        if self._enabled:
            self._enabled = False
            raise KeyboardInterrupt


def _read_line(prompt: str) -> str | None:
    """Read a line and strip it; at the end of input, print a line break and return None."""
    if not sys.stdout.isatty():
        sys.stderr.write(prompt)  # `input` would print it to stdout, between the answers
        sys.stderr.flush()
        prompt = ""
    try:
        return input(prompt).strip()
    except EOFError:
        print(file=sys.stderr)
        return None


def _run_command(session: ChatSession, line: str) -> None:
    name, _, rest = line.partition(" ")
    if name == "/reset":
        session.reset()
        notice("a new conversation")
    elif name == "/system":
        session.set_system(rest.strip())
        notice("replaced the system prompt" if rest else "removed the system prompt")
    elif name == "/help":
        print(COMMANDS, file=sys.stderr)
    else:
        notice(f"there is no command {name}; /help lists them")


def read_lines(stdin: Iterable[bytes]) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of each line that is not blank; InputError for one that is not UTF-8."""
    for number, line in enumerate(stdin, start=1):
        try:
            text = line.decode().strip()
        except UnicodeDecodeError as error:
            raise InputError(
                "a message is not UTF-8 text", where=_place(number), why=str(error)
            ) from None
        if text:
            yield number, text


def answer_lines(
    session: ChatSession, printer: AnswerPrinter, lines: Iterable[tuple[int, str]]
) -> None:
    """Answer each line of standard input: the text of a user's message.

    With JSON output, a line that starts with `{` or `[` is JSON: a message, which continues the
    conversation, or a list of messages or a row of a conversation file, which starts a new one.
    Raises DttError for the first line that cannot be answered.
    """
    for number, line in lines:
        if printer.as_json and line[0] in "{[":
            answer = _start(session, line, _place(number))
        else:
            answer = session.ask({"role": "user", "content": line})
        printer.print(session, answer)


def _start(session: ChatSession, line: str, where: str) -> StreamedAnswer:
    """Return the answer to a line of JSON; InputError if it is not a message or a conversation."""
    try:
        value = json.loads(line)
        if isinstance(value, dict) and "role" in value:
            return session.ask(*parse_prompt({"messages": [value]}).messages)
        return session.start(
            parse_prompt({"messages": value} if isinstance(value, list) else value)
        )
    except (ValueError, RecursionError) as error:  # RefusedRow and JSONDecodeError are ValueErrors
        refused = isinstance(error, RefusedRow)
        raise InputError(
            "a line is not a conversation" if refused else "a line is not JSON",
            where=where,
            why=str(error) or "it is nested too deep",
            next='write {"role": "user", "content": …} or {"messages": […]} on one line; '
            "a text that starts with { or [ needs this form, too",
        ) from None


def _place(number: int) -> str:
    return f"{STDIN}, line {number}"
