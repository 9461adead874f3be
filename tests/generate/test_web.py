"""`dtt chat --web`: the official client and a browser as its users."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from openai import OpenAI
from playwright.sync_api import Browser, expect
from support.browser import OpenPage
from support.running import TIMEOUT, Dtt
from support.tiny_job import make_tokenizer, write_chat_job, write_checkpoint, write_job

from dtt.data.text.continuation import Continuation
from dtt.generate.run import Sampling
from dtt.generate.web import Fields, Options, Refused

TOKENIZER = make_tokenizer("<|im_start|>", "<|im_end|>")
HOSTILE = "<img src=x onerror='window.pwned=1'>"


@dataclass
class Served:
    """A server in a process of its own."""

    url: str
    model: str

    @property
    def token(self) -> str:
        return urlsplit(self.url).path.strip("/")

    @property
    def base(self) -> str:
        return f"http://{urlsplit(self.url).netloc}/v1"

    def client(self, token: str | None = None) -> OpenAI:
        return OpenAI(base_url=self.base, api_key=token or self.token, max_retries=0)

    def ask(self, text: str, **options: Any) -> Any:
        return self.client().chat.completions.create(
            model=self.model, messages=[{"role": "user", "content": text}], **options
        )


def serve(folder: Path, *arguments: object) -> Iterator[Served]:
    """A server that ends with Ctrl-C, and without a traceback."""
    dtt = Dtt(folder)
    process = dtt.start("chat", *arguments, "--web", "--temperature", 0)
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    try:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", url), process.stderr
        yield Served(url, str(arguments[0]))
    finally:
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0
    assert "Traceback" not in error


def post(served: Served, body: str) -> bytes:
    """Return the response to a request for a continuation."""
    parts = urlsplit(served.url)
    assert parts.port is not None
    with socket.create_connection(("127.0.0.1", parts.port), timeout=TIMEOUT) as connection:
        head = f"POST /{served.token}/v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        received = b""
        while piece := connection.recv(65536):
            received += piece
    return received


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model that answers everything with one sentence."""
    folder = tmp_path_factory.mktemp("chat")
    yield from serve(folder, write_chat_job(folder, "Hi wörld🙂!").relative_to(folder))


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model that says `ab` until its long context is full."""
    folder = tmp_path_factory.mktemp("endless")
    job = write_chat_job(folder, seq_len=16384)
    newline, a, b = (TOKENIZER.encode(c).ids[0] for c in "\nab")
    write_checkpoint(job, 20, says={newline: a, a: b, b: a})
    yield from serve(folder, job.relative_to(folder), "--max-new-tokens", 16384)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model without a chat format, with seeded weights."""
    folder = tmp_path_factory.mktemp("base")
    yield from serve(folder, write_job(folder), "--max-new-tokens", 8)


def test_the_official_client_gets_an_answer_whole_and_in_pieces(chat: Served) -> None:
    whole = chat.ask("hello")
    assert whole.choices[0].message.content == "Hi wörld🙂!"
    assert whole.choices[0].finish_reason == "stop"
    pieces = list(chat.ask("hello", stream=True, stream_options={"include_usage": True}))
    texts = [piece.choices[0].delta.content for piece in pieces if piece.choices]
    assert "".join(texts) == "Hi wörld🙂!"
    assert len([text for text in texts if text]) == len("Hi wörld🙂!")
    usage = pieces[-1].usage
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    assert [model.id for model in chat.client().models.list()] == [chat.model]


def test_stop_texts_limits_and_seeds_are_honoured(chat: Served, base: Served) -> None:
    assert chat.ask("x", stop=["zz", "rl"]).choices[0].message.content == "Hi wö"
    stopped = "".join(
        piece.choices[0].delta.content or "" for piece in chat.ask("x", stop="wörlx", stream=True)
    )
    assert stopped == "Hi wörld🙂!", "the start of a stop text that does not follow is sent"
    limited = chat.ask("x", max_completion_tokens=2).choices[0]
    assert (limited.message.content, limited.finish_reason) == ("Hi", "length")

    def drawn(seed: int) -> str:
        found = base.client().completions.create(
            model=base.model, prompt="abc", temperature=5, seed=seed
        )
        return found.choices[0].text

    assert drawn(1) == drawn(1) != drawn(2)


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("abcabd", ["abd"], "abc"),
        ("aaab", ["aab"], "a"),
        ("xy", ["yz"], "xy"),
        ("ab", ["b", "ab"], ""),
    ],
)
def test_a_stop_text_ends_an_answer_wherever_tokens_end(
    text: str, stops: list[str], expected: str
) -> None:
    answer = Continuation(TOKENIZER, [], (), stops)
    pieces = list(answer.stream(token for token in TOKENIZER.encode(text).ids))
    assert "".join(pieces) == answer.content == expected
    assert answer.finish_reason == ("stop" if expected != text else "length")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"n": 2}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"logprobs": True}, "logprobs"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"extra_body": {"min_p": 0.1}}, "min_p"),
        ({"extra_body": {"temperature": True}}, "temperature"),
        ({"extra_body": {"model": "gpt-4"}}, "model"),
        ({"extra_body": {"messages": [{"role": "user"}]}}, "messages"),
        ({"extra_body": {"messages": "hello"}}, "messages"),
    ],
)
def test_a_parameter_that_cannot_be_honoured_is_refused_by_name(
    options: dict[str, Any], named: str, chat: Served
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat.ask("hello", **options)
    assert refused.value.param == named
    assert named in refused.value.message


def test_values_that_ask_for_nothing_are_accepted(chat: Served) -> None:
    neutral = {"n": 1, "logprobs": False, "stop": "", "top_k": -1, "min_p": 0, "tools": [],
               "top_logprobs": 0, "frequency_penalty": 0.0, "logit_bias": {}, "max_tokens": None,
               "modalities": ["text"], "repetition_penalty": 1.0}  # fmt: skip
    fields = Fields(neutral | {"messages": []})
    Options.take(fields, "m", Sampling(max_tokens=5, temperature=1.0))
    assert fields.take("messages", None, list) == fields.take("tools", [], list) == []
    fields.end()
    for name, value in {"logprobs": 0, "n": True, "top_logprobs": False, "echo": 0}.items():
        with pytest.raises(Refused) as refused:
            Fields({name: value}).end()
        assert refused.value.name == name


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ('{"prompt": "a \\ud83d"}', "half of a character"),
        ('{"prompt": "a", "stop": ["\\ud83d"]}', "half of a character"),
        ('{"prompt": "%s"}' % ("a" * 70_000), "too long: 70000 characters"),
        *((text, "the request is not a JSON object") for text in ("", "[]", "{", "[" * 100_000)),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(body: str, why: str, base: Served) -> None:
    received = post(base, body)
    assert received.startswith(b"HTTP/1.1 400")
    assert why in json.loads(received.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert post(base, '{"prompt": "a"}').startswith(b"HTTP/1.1 200")


def test_a_conversation_that_does_not_fit_is_refused_or_shortened_on_request(chat: Served) -> None:
    turns = [{"role": "user", "content": "x" * 100}, {"role": "assistant", "content": "y"}]
    messages: Any = [*turns, *turns, {"role": "user", "content": "z"}]
    create = chat.client().chat.completions.create
    with pytest.raises(openai.BadRequestError, match="too long for the context"):
        create(model=chat.model, messages=messages)
    found = create(model=chat.model, messages=messages, extra_body={"drop_oldest_turns": True})
    assert found.choices[0].message.content == "Hi wörld🙂!"
    assert found.usage.dropped_messages == 2  # type: ignore[union-attr]


def test_nothing_is_answered_without_the_token(chat: Served) -> None:
    for token in ("wrong", chat.token + "x"):
        with pytest.raises(openai.PermissionDeniedError):
            chat.client(token).models.list()
    parts = urlsplit(chat.url)
    assert parts.port is not None
    for head in (
        f"GET /{chat.token}/ HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}",
    ):
        with socket.create_connection(("127.0.0.1", parts.port)) as connection:
            connection.sendall(head.encode())
            assert connection.recv(64).startswith(b"HTTP/1.1 403")


def test_two_clients_are_answered_at_the_same_time(endless: Served) -> None:
    both_begun = threading.Barrier(2, timeout=TIMEOUT)
    ended = []

    def read() -> None:
        with endless.ask("x", stream=True) as pieces:
            next(iter(pieces))
            both_begun.wait()  # breaks if one is only answered after the other
            ended.append(True)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended == [True, True]


def test_three_turns_in_a_browser(chat: Served, chromium: Browser) -> None:
    with OpenPage(chromium, chat.url, height=500) as opened:
        page = opened.page
        for turn in range(1, 4):
            page.fill("#message", f"question {turn} {HOSTILE}")
            page.press("#message", "Enter")
            expect(page.locator(".message.assistant")).to_have_text(["Hi wörld🙂!"] * turn)
            page.wait_for_selector("button[type=submit]:not([disabled])")
        assert page.locator(".message.user").first.inner_text() == f"question 1 {HOSTILE}"
        answer, form = (page.locator(it).last.bounding_box() for it in (".message", "form"))
        assert answer["y"] + answer["height"] <= form["y"]  # the form covers no part of it
        assert opened.pwned is None
        assert opened.axe() == []
        page.click("text=Reset")
        assert page.locator(".message").count() == 0
        assert opened.problems == []


@pytest.mark.slow
def test_an_answer_is_stopped_in_a_browser(endless: Served, chromium: Browser) -> None:
    with OpenPage(chromium, endless.url) as opened:
        page = opened.page
        page.fill("#message", "go on")
        page.click("text=Send")
        expect(page.locator(".message.assistant")).to_contain_text("abab")
        page.click("text=Stop")
        page.wait_for_selector("text=Stopped.")
        page.wait_for_selector("button[type=submit]:not([disabled])")
        kept = page.locator(".message.assistant").inner_text()
        assert kept.startswith("abab")
        assert opened.problems == []


@pytest.mark.slow
def test_hostile_output_is_shown_as_text(tmp_path: Path, chromium: Browser) -> None:
    script = "<b onclik='wd.pn=1>"  # its characters differ, as the model needs
    unique = "".join(dict.fromkeys(script))
    job = write_chat_job(tmp_path, unique)
    for served in serve(tmp_path, job):
        with OpenPage(chromium, served.url) as opened:
            opened.page.fill("#message", "x")
            opened.page.press("#message", "Enter")
            expect(opened.page.locator(".message.assistant")).to_have_text(unique)
            assert (opened.problems, opened.pwned) == ([], None)


@pytest.mark.slow
def test_a_model_without_a_chat_format_continues_texts(base: Served, chromium: Browser) -> None:
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        base.ask("hello")
    expected = base.client().completions.create(model=base.model, prompt="abc").choices[0].text
    with OpenPage(chromium, base.url) as opened:
        page = opened.page
        page.fill("#message", "abc")
        page.get_by_role("button", name="Continue").click()
        expect(page.locator(".message.assistant")).to_have_text(expected)
        assert opened.axe() == []
        assert opened.problems == []
