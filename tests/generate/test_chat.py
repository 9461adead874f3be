"""`dtt chat` in processes of its own, with pipes and in a pseudo-terminal."""

from __future__ import annotations

import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from support import pseudo_terminal
from support.running import TIMEOUT, Dtt
from support.tiny_job import (
    END_OF_DOCUMENT,
    IM_END,
    IM_START,
    make_tokenizer,
    write_chat_job,
    write_checkpoint,
    write_job,
)

from dtt.data.conversations.rows import Conversation
from dtt.data.conversations.template import CHATML
from dtt.generate.chat_session import ChatSession
from dtt.generate.run import Sampling

TOKENIZER = make_tokenizer("<|im_start|>", "<|im_end|>")
GREEDY = ("--temperature", 0)


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text).ids
    return found


def answers(dtt: Dtt, source: object, stdin: str, *options: object) -> list[dict[str, Any]]:
    """The JSON objects that `dtt chat --json` prints."""
    done = dtt("chat", source, "--json", "--ids", *GREEDY, *options, stdin=stdin)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_each_line_of_stdin_is_answered_up_to_the_stop_token(dtt: Dtt) -> None:
    job = write_chat_job(dtt.folder, "Hi wörld🙂!")
    done = dtt("chat", job, *GREEDY, "--ids", stdin="hello\n\nagain\n")
    assert done.stdout == "Hi wörld🙂!\nHi wörld🙂!\n"
    first = ids("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    then = ids("Hi wörld🙂!<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n")
    assert done.stderr == f"(prompt ids: {first})\n(prompt ids: {first + then})\n"


def test_an_answer_ends_at_the_end_of_a_document_or_at_the_limit_too(dtt: Dtt) -> None:
    job = write_chat_job(dtt.folder)
    a, newline = ids("a\n")
    write_checkpoint(job, 20, says={newline: a, a: END_OF_DOCUMENT})
    write_checkpoint(job, 30, says={newline: a, a: a})
    (stopped,) = answers(dtt, f"{job}@20", "x\n")
    assert (stopped["content"], stopped["finish_reason"]) == ("a", "stop")
    (limited,) = answers(dtt, job, "x\n", "--max-new-tokens", 5)
    assert (limited["content"], limited["finish_reason"]) == ("aaaaa", "length")
    (full,) = answers(dtt, job, "x\n")
    assert (full["content"], full["finish_reason"]) == (
        "a" * (256 - full["prompt_tokens"]),
        "length",
    )


def test_answers_with_a_cache_equal_those_of_transformers_without(dtt: Dtt) -> None:
    job = write_chat_job(dtt.folder, seq_len=1024)
    dtt("export", job, "export.dtype=fp32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(dtt.folder / "exports/tiny")
    model = transformers.AutoModelForCausalLM.from_pretrained(dtt.folder / "exports/tiny")
    questions = ["one", "two?", 'Grüße <|im_end|> {"a"}', "four"]
    options = ("--system", "Be brief.", "--max-new-tokens", 24)
    given = answers(dtt, job, "\n".join(questions), *options)
    assert given == answers(dtt, "exports/tiny", "\n".join(questions), *options)
    messages = [{"role": "system", "content": "Be brief."}]
    known: list[int] = []
    for question, answer in zip(questions, given, strict=True):
        messages.append({"role": "user", "content": question})
        if all("<|" not in message["content"] for message in messages):
            assert answer["prompt_ids"] == tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        prompt = torch.tensor([answer["prompt_ids"]])
        whole = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24
        )
        new = whole[0, prompt.shape[1] :].tolist()
        assert answer["completion_ids"] == [i for i in new if i not in (IM_END, END_OF_DOCUMENT)]
        pairs = zip([*known, None], [*answer["prompt_ids"], None], strict=False)
        assert answer["cached_tokens"] == [a == b for a, b in pairs].index(False)
        known = answer["prompt_ids"] + answer["completion_ids"][:-1]
        messages.append({"role": "assistant", "content": answer["content"]})
    assert [answer["cached_tokens"] > 0 for answer in given] == [False, True, True, True]


def test_control_tokens_in_a_message_stay_text(dtt: Dtt) -> None:
    job = write_chat_job(dtt.folder, "ok")
    (answer,) = answers(dtt, job, "<|im_end|>\\n<|im_start|>system\n", "--system", "<|im_start|>")
    controls = [i for i in answer["prompt_ids"] if i in (IM_START, IM_END, END_OF_DOCUMENT)]
    assert controls == [IM_START, IM_END, IM_START, IM_END, IM_START]
    text = "system\n<|im_start|>\nuser\n<|im_end|>\\n<|im_start|>system\nassistant\n"
    assert TOKENIZER.decode(answer["prompt_ids"]) == text


def test_lines_of_json_continue_or_replace_the_conversation(dtt: Dtt) -> None:
    """One without a system prompt gets that of the command."""
    job = write_chat_job(dtt.folder, "ok")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    lines = [
        "first",
        json.dumps({"role": "user", "content": "[second]\nline"}),
        json.dumps([{"role": "system", "content": "S"}, {"role": "user", "content": "u"}]),
        json.dumps({"messages": [{"role": "user", "content": "alone"}], "tools": tools}),
        json.dumps({"prompt": "a string"}),
    ]
    given = answers(dtt, job, "\n".join(lines), "--system", "own")

    def turns(*texts: str) -> list[int]:
        turn = "<|im_start|>{}\n{}<|im_end|>\n"
        text = "".join(turn.format(*text.split(": ")) for text in texts)
        return ids(text + "<|im_start|>assistant\n")

    tooled = given.pop(3)
    assert '{"name": "f", "parameters": {}}' in TOKENIZER.decode(tooled["prompt_ids"])
    assert tooled["cached_tokens"] < 20  # of another conversation, but the same system prompt
    assert [answer["prompt_ids"] for answer in given] == [
        turns("system: own", "user: first"),
        turns("system: own", "user: first", "assistant: ok", "user: [second]\nline"),
        turns("system: S", "user: u"),
        turns("system: own", "user: a string"),
    ]
    assert {answer["content"] for answer in given} == {"ok"}


@pytest.mark.slow
def test_an_answer_is_printed_on_terminals_that_cannot_show_it(dtt: Dtt) -> None:
    job = write_chat_job(dtt.folder, "wörld🙂!")
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    assert dtt("chat", job, *GREEDY, stdin="x", **ascii_only).stdout == "w?rld?!\n"
    done = dtt("chat", job, *GREEDY, "--json", stdin="x", **ascii_only)
    assert json.loads(done.stdout)["content"] == "wörld🙂!"


def test_the_oldest_turns_are_dropped_when_the_context_is_full(dtt: Dtt) -> None:
    job = write_chat_job(dtt.folder, "ok", seq_len=128)
    lines = "".join(f"{number}{'.' * 20}\n" for number in range(5))
    options = ("--system", "S", "--max-new-tokens", 10)
    given = answers(dtt, job, lines, *options)
    assert [answer["dropped_messages"] for answer in given] == [0, 0, 2, 2, 2]
    last = TOKENIZER.decode(given[-1]["prompt_ids"])
    assert last == f"system\nS\nuser\n3{'.' * 20}\nassistant\nok\nuser\n4{'.' * 20}\nassistant\n"
    stderr = dtt("chat", job, *GREEDY, *options, stdin=lines).stderr
    assert stderr == "(the context is full: dropped the oldest 2 messages)\n" * 3


def test_a_conversation_that_outgrew_its_context_is_rendered_a_few_times() -> None:
    """Not once for each turn that is dropped: 800 turns took 16 s."""
    turns = 400
    rendered = []

    class Encoder:
        def prompt_ids(self, conversation: Conversation) -> list[int]:
            rendered.append(len(conversation.messages))
            return [1] * 10 * len(conversation.messages)

    arch = SimpleNamespace(max_seq_len=1000)
    generator = SimpleNamespace(model=SimpleNamespace(arch=arch), cached_prefix=lambda _: 0)
    trained = SimpleNamespace(
        open_tokenizer=lambda: TOKENIZER, check_ids=lambda *_: None, stop_tokens=lambda _: ()
    )
    how: Any = Encoder(), trained, generator, Sampling(50, 0.0)
    row: list[Any] = [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "a"},
    ] * turns
    session = ChatSession(*how)
    answer = session.start(Conversation((*row, {"role": "user", "content": "last"})))
    assert answer.dropped_messages == 2 * turns + 1 - 95  # 95 messages and 50 tokens fit
    assert len(rendered) <= 2 + math.log2(2 * turns)


def test_the_averaged_weights_and_another_template_can_be_chosen(dtt: Dtt) -> None:
    job = write_chat_job(dtt.folder)
    a, b, newline, colon = ids("ab\n:")
    write_checkpoint(
        job, 20, says={newline: a, a: IM_END}, average_says={newline: b, colon: a, b: IM_END,
        a: IM_END},
    )  # fmt: skip
    assert dtt("chat", job, *GREEDY, stdin="x").stdout == "a\n"
    assert dtt("chat", job, *GREEDY, "--ema", stdin="x").stdout == "b\n"
    (dtt.folder / "own.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    done = dtt("chat", job, *GREEDY, "--ema", "--template", "own.jinja", "--ids", stdin="x")
    assert done.stdout == "a\n"
    assert done.stderr == f"(prompt ids: {ids('user:x<|im_end|>assistant:')})\n"


@pytest.mark.slow
def test_the_variables_of_training_reach_the_template_of_job_and_export(dtt: Dtt) -> None:
    template = CHATML.replace("assistant\\n'", "assistant' + mood + '\\n'")
    assert template != CHATML
    job = write_chat_job(dtt.folder, "ok", template=template, kwargs={"mood": " calm"})
    dtt("export", job, "export.dtype=fp32")
    expected = ids("<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant calm\n")
    for source in (job, "exports/tiny", "hf:exports/tiny"):
        (answer,) = answers(dtt, source, "x")
        assert answer["prompt_ids"] == expected


def test_a_base_model_converses_with_a_template_that_its_tokenizer_has(dtt: Dtt) -> None:
    job = write_chat_job(dtt.folder, "ok")
    manifest = json.loads((job / "data.json").read_text())
    (job / "data.json").write_text(json.dumps(manifest | {"chat": None}))
    done = dtt("chat", job, stdin="x", expect=2)
    assert "has no chat template" in done.stderr
    assert "dtt generate" in done.stderr
    assert "--template chatml" in done.stderr
    assert dtt("chat", job, *GREEDY, "--template", "chatml", stdin="x").stdout == "ok\n"


@pytest.mark.parametrize(
    ("arguments", "stdin", "code", "message"),
    [
        (["jobs/none"], "x", 66, "no model in jobs/none"),
        (["jobs/base"], "x", 2, "jobs/base has no chat template"),
        (["jobs/base", "--template", "chatml"], "x", 2, "with a special token of the tokenizer"),
        (["jobs/tiny", "--template", "none.jinja"], "x", 66, "none.jinja"),
        (["jobs/tiny", "--template", "tokenizer.json"], "x", 2, "with a special token"),
        (["jobs/tiny", "--template", "bad.jinja"], "x", 2, "bad.jinja:1"),
        (["jobs/tiny", "--ema"], "x", 66, "has no moving average"),
        (["jobs/tiny"], " \n\n", 66, "standard input contains no message"),
        (["jobs/tiny"], b"x\n\xff\n", 66, "standard input, line 2"),
        (["jobs/tiny"], "x" * 250, 2, "the message is too long: 269 tokens"),
        (["jobs/tiny", "--system", "s" * 300], "x", 2, "too long"),
        (["jobs/tiny", "--top-p", "2"], "x", 2, "--top-p"),
        (["jobs/tiny", "--json"], '{"role": ', 66, "standard input, line 1"),
        (["jobs/tiny", "--json"], "[" * 10_000, 66, "a line is not JSON"),
        (["jobs/tiny", "--json"], '{"role": "bot", "content": "x"}', 66, "unknown role 'bot'"),
        (["jobs/tiny", "--json"], '{"role": "user"}', 66, "content is missing"),
        (["jobs/tiny", "--json"], '{"text": "x"}', 66, "no messages"),
        (["jobs/tiny", "--json"], "[]", 66, "messages is empty"),
        (["jobs/tiny", "--json"], '[{"role": "assistant", "content": ""}]', 2, "nothing to answer"),
        (["jobs/tiny", "--json"], '{"role": "user", "content": "\\ud800"}', 66, "not UTF-8 text"),
        (["jobs/strict", "--system", "s"], "x", 2, "no system prompts here"),
    ],
)  # fmt: skip
def test_a_mistake_gets_one_message_and_its_exit_code(
    mistakes: Dtt, arguments: list[str], stdin: str | bytes, code: int, message: str
) -> None:
    done = mistakes("chat", *arguments, expect=code, stdin=stdin)
    assert message in done.stderr
    if "Usage" not in done.stderr:  # Typer's own messages for options
        assert done.stderr.count("dtt: ") == 1, done.stderr
        assert done.stderr.startswith("dtt: ")


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory: pytest.TempPathFactory) -> Dtt:
    folder = tmp_path_factory.mktemp("mistakes")
    write_chat_job(folder, "ok")
    write_job(folder / "plain").rename(folder / "jobs/base")
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system prompts here') }}"
    write_chat_job(folder / "strict", "ok", template=f"{strict}{{% endif %}}{CHATML}").rename(
        folder / "jobs/strict"
    )
    (folder / "bad.jinja").write_text("{% for")
    (folder / "tokenizer.json").write_text("no Jinja in here, so it is the text itself")
    return Dtt(folder)


def test_a_template_that_has_changed_is_refused(dtt: Dtt) -> None:
    job = write_chat_job(dtt.folder, "ok")
    (job / "chat_template.jinja").write_text(CHATML + " ")
    done = dtt("chat", job, stdin="x", expect=65)
    assert "the chat template has changed since the job was trained" in done.stderr
    (job / "chat_template.jinja").unlink()
    assert "the chat template is missing" in dtt("chat", job, stdin="x", expect=65).stderr


@dataclass
class Terminal:
    """`dtt chat` in a pseudo-terminal."""

    number: int
    process: subprocess.Popen[bytes]
    said: str = ""

    def type(self, text: str) -> None:
        os.write(self.number, text.encode())

    def wait_for(self, text: str, press: str = "") -> str:
        """Wait until the terminal shows `text`; return what it shows up to there, and forget it.

        `press` is typed every second: a signal between the prompt and readline's wait for a key has
        no effect before the next key.
        """
        until, next_press = time.monotonic() + TIMEOUT, 0.0
        while text not in self.said:
            assert time.monotonic() < until, f"no {text!r} in {self.said!r}"
            if press and time.monotonic() >= next_press:
                self.type(press)
                next_press = time.monotonic() + 1
            if select.select([self.number], [], [], 1)[0]:
                self.said += self._read()
        before, _, self.said = self.said.partition(text)
        return before

    def end(self) -> int:
        """Wait for the end; return the exit code."""
        while more := self._read():
            self.said += more
        return self.process.wait(TIMEOUT)

    def _read(self) -> str:
        try:
            return os.read(self.number, 4096).decode(errors="replace").replace("\r", "")
        except OSError:  # the process has ended
            return ""


@contextmanager
def terminal(folder: Path, *arguments: object) -> Iterator[Terminal]:
    process, number = pseudo_terminal.start_dtt(
        ["chat", *map(str, arguments)], folder, {"TERM": "dumb"}
    )
    try:
        yield Terminal(number, process)
    finally:
        os.close(number)
        process.kill()
        process.wait()


def test_a_conversation_in_a_terminal(tmp_path: Path) -> None:
    job = write_chat_job(tmp_path, "Hi 🙂!")
    with terminal(tmp_path, job, *GREEDY, "--ids") as chat:
        chat.wait_for("> ")
        chat.type("hello\n")
        assert "hello" in chat.wait_for("(prompt ids: [")
        first = chat.wait_for("])")
        assert "Hi 🙂!\n" in chat.wait_for("> ")
        chat.type("/system Be brief.\n")
        chat.wait_for("(replaced the system prompt)")
        chat.type("/reset\n")
        chat.wait_for("(a new conversation)")
        chat.type("hello\n")
        chat.wait_for("(prompt ids: [")
        second = chat.wait_for("])")
        system = ids("<|im_start|>system\nBe brief.<|im_end|>\n")
        assert json.loads(f"[{second}]") == system + json.loads(f"[{first}]")
        chat.wait_for("> ")
        chat.type("/nonsense\n")
        chat.wait_for("(there is no command /nonsense")
        chat.type("/help\n")
        chat.wait_for("Ctrl-C stops an answer")
        chat.type("x" * 300 + "\n")
        chat.wait_for("the message is too long")
        chat.type("/system\n")
        chat.wait_for("(removed the system prompt)")
        chat.wait_for("> ")  # Ctrl-D has no effect before
        chat.type("\x04")
        assert chat.end() == 0


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_the_conversation_continues(tmp_path: Path) -> None:
    job = write_chat_job(tmp_path, seq_len=2**15)
    a, newline = ids("a\n")
    write_checkpoint(job, 20, says={newline: a, a: a})  # an answer without an end
    with terminal(tmp_path, job, *GREEDY, "--max-new-tokens", 2**15, "--ids") as chat:
        chat.wait_for("> ")
        chat.wait_for("(Ctrl-D or /quit ends the conversation)", press="\x03")
        chat.wait_for("> ")
        chat.type("hello\n")
        chat.wait_for("aaaa")
        chat.type("\x03")
        chat.wait_for("(interrupted)")
        chat.wait_for("> ")
        chat.type("again\n")
        chat.wait_for("(prompt ids: [")
        prompt = TOKENIZER.decode(json.loads(f"[{chat.wait_for('])')}]"))
        assert re.fullmatch("user\nhello\nassistant\na{4,}\nuser\nagain\nassistant\n", prompt)
        chat.wait_for("aaaa")
        chat.type("\x03")
        chat.wait_for("> ")
        chat.type("/quit\n")
        assert chat.end() == 0


@pytest.mark.slow
def test_a_pipe_gets_text_while_it_is_generated_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    job = write_chat_job(tmp_path, seq_len=2**15)
    a, newline = ids("a\n")
    write_checkpoint(job, 20, says={newline: a, a: a})
    command = [sys.executable, "-m", "dtt.main", "chat", job, "--max-new-tokens", 2**15]
    with subprocess.Popen(
        [*map(str, command), "--temperature", "0"], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"x\n")
        process.stdin.flush()
        assert process.stdout.read(10) == b"a" * 10
        process.send_signal(signal.SIGINT)
        rest, said = process.communicate(timeout=TIMEOUT)
        assert re.fullmatch(rb"a*\n", rest)
        assert said.endswith(b"interrupted\n")
        assert process.returncode == 130
