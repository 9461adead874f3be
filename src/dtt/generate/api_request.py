"""The parameters of a request to OpenAI's API, as `dtt chat --web` honours or refuses them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dtt.base.errors import ConfigError
from dtt.base.local_server import Connection
from dtt.generate.run import Sampling

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
