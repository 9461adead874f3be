"""`dtt chat --web`: a page to converse with a model, and OpenAI's API for other programs.

The API is the part of https://platform.openai.com/docs/api-reference that clients use:
`POST /v1/chat/completions`, `POST /v1/completions` and `GET /v1/models`. A parameter that dtt
cannot honour is refused by name.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from dtt.base.errors import ConfigError, DttError
from dtt.base.local_server import Connection, LocalServer
from dtt.base.log import log
from dtt.base.secrets import redacted
from dtt.data.conversations.dialects import parse_prompt
from dtt.data.conversations.rows import RefusedRow
from dtt.generate.chat_session import ChatSession, StreamedAnswer
from dtt.generate.run import Sampling, encode_prompt, on_own_device
from dtt.hf.model_source import NoChatTemplate, find_chat_format, load_model
from dtt.report.page import document, joined

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from dtt.hf.read import LoadedModel
    from dtt.model.generate import GeneratorPool

LONGEST_BODY = 2**24
"""Bytes of a request."""
MOST_STOPS = 16
NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,), "best_of": (1,), "frequency_penalty": (0,), "presence_penalty": (0,),
    "repetition_penalty": (1,), "length_penalty": (1,), "min_p": (0,), "typical_p": (1,),
    "min_tokens": (0,), "top_k": (-1, 0), "logit_bias": ({},), "stop": ("",), "suffix": ("",),
    "logprobs": (False,), "top_logprobs": (0,), "echo": (False,), "ignore_eos": (False,),
    "use_beam_search": (False,), "add_generation_prompt": (True,),
    "continue_final_message": (False,), "chat_template_kwargs": ({},),
    "response_format": ({"type": "text"},), "modalities": (["text"],),
    "functions": ([],), "function_call": ("none", "auto"),
    "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False),
    "service_tier": ("auto", "default"),
}  # fmt: skip
"""Values that ask for nothing, of parameters that dtt does not have or for which it has others."""
LABELS = ("user", "metadata", "safety_identifier", "store", "prompt_cache_key")
"""Parameters that describe a request without changing the answer."""
ANSWERS_AT_ONCE = 4
"""Further requests wait. Each of these keeps the memory of a KV cache until the server ends."""


def run(
    source: str,
    system: str,
    sampling: Sampling,
    *,
    template: str | None = None,
    ema: bool = False,
    port: int = 0,
) -> None:
    """Serve a model on `port` of 127.0.0.1 (0: any free port) until the user interrupts it.

    Arguments are those of `chat.run`. A model without a chat format continues texts.
    """
    try:
        encoder = find_chat_format(source, template).encoder()
    except NoChatTemplate:
        encoder = None
    trained = load_model(source, ema=ema)
    from dtt.model.generate import GeneratorPool

    generators = GeneratorPool(on_own_device(trained), ANSWERS_AT_ONCE)
    session = None
    if encoder is not None:
        session = ChatSession(encoder, trained, generators, sampling)
        session.set_system(system)
    elif system:
        raise ConfigError(f"--system requires a chat template, and {source} has none")
    served = Api(source, trained, trained.open_tokenizer(), generators, session, sampling)
    server = LocalServer(served, port)
    api = f"http://127.0.0.1:{server.server_port}/v1"
    log.info("OpenAI API: base_url %s, api_key %s", api, server.token)
    server.serve()


class Refused(ConfigError):
    """A parameter of a request that is invalid, or that dtt does not have."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"parameter {name!r}: {why}")
        self.name = name


class Fields:
    """The parameters of a request; each is taken once, and none may be left."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        # Clients send null for a parameter that is not set.
        self._left = {name: value for name, value in body.items() if value is not None}
        for name in LABELS:
            self._left.pop(name, None)
        for name, values in NEUTRAL.items():
            given = self._left.get(name)
            # False equals 0 for Python, and 1 equals True.
            if any(given == one and isinstance(given, bool) == isinstance(one, bool)
                   for one in values):  # fmt: skip
                del self._left[name]

    def take(self, name: str, default: Any, *kinds: type) -> Any:
        """Return a parameter; raise Refused if it has another type."""
        value = self._left.pop(name, default)
        # True is an int for Python, and 1 is no float for JSON's users.
        valid = type(value) in kinds or (float in kinds and type(value) is int)
        if value is not default and not valid:
            raise Refused(name, f"it must be of type {' or '.join(k.__name__ for k in kinds)}")
        return value

    def number(self, name: str, default: Any, low: float, high: float, kind: type) -> Any:
        """Return a number in [low, high]; raise Refused for another one."""
        value = self.take(name, default, kind)
        if value is not default and not low <= value <= high:  # NaN is in no interval
            raise Refused(name, f"{value} is not between {low} and {high}")
        return value

    def end(self) -> None:
        """Raise Refused for a parameter that was not taken."""
        if self._left:
            raise Refused(next(iter(self._left)), "dtt does not have it; leave it out")


@dataclass(frozen=True)
class Options:
    """The fields that requests for a chat and for a continuation share."""

    sampling: Sampling
    stop_texts: tuple[str, ...]
    stream: bool
    with_usage: bool

    @classmethod
    def take(cls, fields: Fields, model: str, own: Sampling) -> Options:
        """Take the options of a request for `model`, which are `own` by default."""
        name = fields.take("model", model, str)
        if name != model:
            raise Refused("model", f"this server has {model!r} only, not {name!r}")
        most = fields.number("max_tokens", None, 1, 2**31, int)
        most = fields.number("max_completion_tokens", most, 1, 2**31, int)
        stop = fields.take("stop", [], str, list)
        texts = [stop] if isinstance(stop, str) else stop
        if len(texts) > MOST_STOPS or not all(isinstance(text, str) and text for text in texts):
            raise Refused("stop", f"it must be one to {MOST_STOPS} texts that are not empty")
        stream = fields.take("stream", False, bool)
        stream_options = fields.take("stream_options", {}, dict)
        if stream_options.pop("include_obfuscation", False) or (
            stream_options.keys() - {"include_usage"}
        ):
            raise Refused("stream_options", "dtt has only include_usage")
        return cls(
            Sampling(
                max_tokens=own.max_tokens if most is None else most,
                temperature=fields.number("temperature", own.temperature, 0.0, 100.0, float),
                top_k=fields.number("top_k", own.top_k, 1, 2**31, int),
                top_p=fields.number("top_p", own.top_p, 1e-6, 1.0, float),
                seed=fields.number("seed", own.seed, -(2**63), 2**63 - 1, int),
            ),
            tuple(texts),
            stream,
            stream_options.get("include_usage") is True,
        )


def read_body(connection: Connection) -> dict[str, Any]:
    """Return the JSON object of a request; raise ConfigError if there is none."""
    content = connection.read_body(LONGEST_BODY)
    if content is None:
        raise ConfigError(f"the request has no Content-Length, or more than {LONGEST_BODY} bytes")
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise ConfigError("the request is not a JSON object")
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        cut = error.object[max(0, error.start - 20) : error.start]
        raise ConfigError(
            "the request has half of a character",
            why=f"there is a surrogate without its partner after {cut!r}",
            next="cut texts between characters, not between UTF-16 units as JavaScript does",
        ) from None
    return body


@dataclass(frozen=True)
class Api:
    """Answers to requests."""

    name: str
    """Name of the model."""
    trained: LoadedModel
    tokenizer: Tokenizer
    """Adds to a text what the documents of the model begin with."""
    generators: GeneratorPool
    session: ChatSession | None
    """A conversation without messages, which knows the chat format; None without a chat format."""
    sampling: Sampling
    """Defaults of requests."""
    started: int = field(default_factory=lambda: int(time.time()))

    def answer(self, connection: Connection, path: str, query: str) -> None:
        """Answer a request for the page or of the API."""
        methods = {"": "GET", "v1/models": "GET"}
        posts = {"v1/chat/completions": self._chat, "v1/completions": self._complete}
        if path not in methods | posts:
            _fail(connection, HTTPStatus.NOT_FOUND, f"there is no /{path}")
        elif connection.command != methods.get(path, "POST"):
            _fail(connection, HTTPStatus.METHOD_NOT_ALLOWED, f"use {methods.get(path, 'POST')}")
        elif path == "":
            data = {
                "model": redacted(self.name),
                "chat": self.session is not None,
                "temperature": self.sampling.temperature,
                "max_tokens": self.sampling.max_tokens,
            }
            script = joined("dtt.report", ("elements.js",)) + joined("dtt.generate", ("chat.js",))
            style = joined("dtt.report", ("theme.css",)) + joined("dtt.generate", ("chat.css",))
            page = document(f"dtt chat: {data['model']}", data, script, style, connects=True)
            connection.send(HTTPStatus.OK, page, "text/html")
        elif path == "v1/models":
            model = {"id": self.name, "object": "model", "created": self.started}
            _send(connection, {"object": "list", "data": [model | {"owned_by": "dtt"}]})
        else:
            try:
                posts[path](connection, Fields(read_body(connection)))
            except DttError as error:
                _fail(connection, HTTPStatus.BAD_REQUEST, error)

    def _chat(self, connection: Connection, fields: Fields) -> None:
        if self.session is None:
            raise ConfigError(
                f"{self.name} has no chat template", next="use /v1/completions, or --template"
            )
        options = Options.take(fields, self.name, self.sampling)
        row = {"messages": fields.take("messages", None, list)}
        if tools := fields.take("tools", [], list):
            row["tools"] = tools
        # Without it a program would not notice that the model has not seen what it sent.
        may_drop = fields.take("drop_oldest_turns", False, bool)
        fields.end()
        try:
            conversation = parse_prompt(row)
        except (RefusedRow, RecursionError) as error:
            raise Refused("messages", str(error) or "it is nested too deep") from None
        session = self.session.another(options.sampling, options.stop_texts)
        answer = session.start(conversation)
        if answer.dropped_messages and not may_drop:
            raise ConfigError(
                "the conversation is too long for the context of the model",
                next="leave out old messages, or send drop_oldest_turns: true",
            )
        Response(connection, self.name, options, chat=True).send(answer, session.stream(answer))

    def _complete(self, connection: Connection, fields: Fields) -> None:
        options = Options.take(fields, self.name, self.sampling)
        prompt = fields.take("prompt", None, str)
        fields.end()
        if prompt is None:
            raise Refused("prompt", "it must be a text")
        ids = encode_prompt(prompt, self.tokenizer, self.trained, "the prompt")
        how = options.sampling, self.trained.stop_tokens(), options.stop_texts
        answer = StreamedAnswer(self.generators, self.tokenizer, ids, *how)
        Response(connection, self.name, options, chat=False).send(answer, answer.texts())


class Response:
    """The response to one request."""

    def __init__(self, connection: Connection, model: str, options: Options, *, chat: bool) -> None:
        self._connection, self._options, self._chat = connection, options, chat
        kind = "chat.completion" if chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": f"{kind}.chunk" if chat and options.stream else kind,
            "created": int(time.time()),
            "model": model,
        }

    def send(self, answer: StreamedAnswer, texts: Generator[str]) -> None:
        """Generate and send an answer, until the client goes away."""
        stream = self._options.stream
        if stream:
            self._connection.start_stream("text/event-stream")
        try:
            with closing(texts):
                for text in texts:
                    if self._connection.gone():
                        raise ConnectionAbortedError
                    if stream and text:
                        self._event(choices=[self._choice(text)])
        except DttError as error:
            if not stream:
                raise
            # The status has been sent.
            self._event(error={"message": redacted(str(error)), "type": "server_error"})
        else:
            prompt, new = len(answer.prompt_ids), len(answer.ids)
            usage = {
                "prompt_tokens": prompt,
                "completion_tokens": new,
                "total_tokens": prompt + new,
                "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
                "dropped_messages": answer.dropped_messages,
            }
            # In a stream, the text has been sent.
            choices = [self._choice("" if stream else answer.content, answer.finish_reason)]
            if not stream:
                _send(self._connection, self._head | {"choices": choices, "usage": usage})
                return
            self._event(choices=choices)
            if self._options.with_usage:
                self._event(choices=[], usage=usage)
        self._connection.send_chunk("data: [DONE]\n\n")
        self._connection.send_chunk("")

    def _choice(self, text: str, finish: str | None = None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text}
        name = "delta" if self._options.stream else "message"
        content = {name: message} if self._chat else {"text": text}
        return {"index": 0, "finish_reason": finish, "logprobs": None, **content}

    def _event(self, **content: Any) -> None:
        self._connection.send_chunk(f"data: {json.dumps(self._head | content)}\n\n")


def _send(connection: Connection, value: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
    connection.send(status, json.dumps(value), "application/json")


def _fail(connection: Connection, status: HTTPStatus, error: object) -> None:
    parameter = error.name if isinstance(error, Refused) else None
    message = {"message": redacted(str(error)), "type": "invalid_request_error"}
    _send(connection, {"error": message | {"param": parameter, "code": None}}, status)
