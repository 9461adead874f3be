"""Chat templates: resolution, compilation in a sandbox, and rendering of conversations."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from dtt.base.errors import ConfigError, InputError
from dtt.base.reading import read_small
from dtt.data.conversations.rows import REASONING, Conversation, Message, RefusedRow
from dtt.data.conversations.sandbox import WORK, Sandbox, TooCostly, Work, memory_limit
from dtt.data.text.side_files import object_beside

CHATML = """\
{%- set first = messages[0] if messages and messages[0].role == 'system' else none %}
{%- macro text(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for part in content or [] %}
            {{- part.text }}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if first %}
        {{- text(first.content) + '\\n\\n' }}
    {%- endif %}
    {{- 'You can call these functions:\\n<tools>\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson + '\\n' }}
    {%- endfor %}
    {{- '</tools>\\nTo call one, write:\\n' }}
    {{- '<tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and first and loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {%- if message.content is string %}
            {{- message.content }}
        {%- else %}
            {{- text(message.content) }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {%- if message.content or not loop.first %}
                {{- '\\n' }}
            {%- endif %}
            {{- '<tool_call>\\n{"name": ' + function.name | tojson + ', "arguments": ' }}
            {%- if function.arguments is string %}
                {{- function.arguments }}
            {%- else %}
                {{- (function.arguments or {}) | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""The built-in template `chatml`: each message between `<|im_start|>` and `<|im_end|>`.

It renders every turn in the same way, regardless of the turns after it, so that text at training
equals text at inference.
"""

COSTLY_SHARE = 10
"""A single render may be beyond the limits: then the row is to blame, not the template."""

CALL = (
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call12345",
                "type": "function",
                "function": {"name": "get", "arguments": {"city": "Rome"}},
            }
        ],
    },
)
"""A conversation that shows whether a template reads the arguments of a call as an object."""


class ChatTemplate:
    """A compiled chat template."""

    def __init__(
        self,
        text: str,
        special_tokens: Mapping[str, str] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        where: object = None,
        date: str | None = None,
    ) -> None:
        """Compile a template.

        `special_tokens` are the variables `bos_token`, `eos_token` and others; `kwargs` those of
        the configuration. Raises ConfigError, with `where` as its location, if the template has a
        syntax error. `strftime_now` is that of `date`, as in 2026-01-31; None: of the current time.
        """
        self.text = text
        self.name = str(where or "chat.template")
        self.sha256 = hashlib.sha256(text.encode()).hexdigest()
        self._variables = {**(special_tokens or {}), **(kwargs or {})}
        self._rendered = self._costly = 0
        self._sandbox = Sandbox(date)
        try:
            self._template = self._sandbox.compile_template(text)
        except Exception as error:  # noqa: BLE001 - Jinja and Python raise anything here
            what, where = "the chat template cannot be compiled", self.name
            if isinstance(error, TemplateSyntaxError):
                what = "the chat template is not a valid Jinja template"
                where = f"{self.name}:{error.lineno}"
            why = getattr(error, "message", None) or str(error) or type(error).__name__
            raise ConfigError(what, where=where, why=why, next="chat.template=chatml") from None

    def render(self, conversation: Conversation, add_generation_prompt: bool = False) -> str:
        """Return the text of a conversation, that of `apply_chat_template(tokenize=False)`.

        Raises RefusedRow if the template raises an error, or takes or builds more than the limits
        of the sandbox; InputError if the template, not the row, is to blame for that.
        """
        messages = [self._message(message) for message in conversation.messages]
        variables = {
            **self._variables,
            **conversation.template_kwargs,
            "messages": messages,
            "tools": conversation.tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            WORK: Work(),
        }
        try:
            context = self._template.new_context(variables)
            with memory_limit:
                text = self._sandbox.concatenate(self._template.root_render_func(context))
        except RecursionError:
            raise RefusedRow("the chat template recurses too deeply") from None
        except (TooCostly, MemoryError) as error:
            # A row may be large, but if many take seconds each and yield nothing, no run would
            # end.
            self._costly += 1
            why = str(error) or "it needs too much memory"
            if self._costly > self._rendered // COSTLY_SHARE:
                raise InputError(
                    "the chat template takes too much time or memory",
                    where=self.name,
                    why=why,
                    next="chat.template=chatml, or the path of another Jinja file",
                ) from None
            raise RefusedRow(f"the chat template takes too much time or memory: {why}") from None
        except Exception as error:  # noqa: BLE001 - a template can raise anything
            why = " ".join(str(error).split()) or type(error).__name__
            why = why if len(why) <= 200 else f"{why[:197]}..."
            raise RefusedRow(f"the chat template rejects it: {why}") from None
        self._rendered += 1
        return text

    def mentions(self, key: str) -> bool:
        """Return True if the text of the template contains this word, so that it may read it."""
        return re.search(rf"\b{re.escape(key)}\b", self.text) is not None

    @cached_property
    def _arguments_as_text(self) -> bool:
        """True if the arguments of tool calls must be JSON text, as for DeepSeek's template.

        It concatenates them with other text, which fails for an object. Others print the object as
        Python does, with single quotes.
        """
        call = Conversation(CALL)
        for as_text in (False, True):
            self.__dict__["_arguments_as_text"] = as_text  # read while the probe is rendered
            with suppress(RefusedRow):
                if "'city'" not in self.render(call):
                    return as_text
        return False

    def _message(self, message: Message) -> Message:
        """Return a copy of a message in the form that the template reads."""
        found = {**message}
        for key in REASONING:  # under every name that templates read
            if key in message:
                found |= dict.fromkeys(REASONING, message[key])
                break
        if message.get("tool_calls") and self._arguments_as_text:
            found["tool_calls"] = []
            for call in message["tool_calls"]:
                function = call.get("function", call)
                if isinstance(arguments := function.get("arguments"), dict):
                    function = {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}
                whole = {**call, "function": function} if "function" in call else function
                found["tool_calls"].append(whole)
        return found


TEMPLATE_FOLDER = "additional_chat_templates"
"""Folder of a tokenizer's templates, besides the default one."""


def resolve_template(name: str | None, tokenizer: Path) -> str:
    """Return the text of the template that `chat.template` names.

    `name` is `chatml`, `tokenizer`, or the path of a Jinja file; `tokenizer` is the path of the
    tokenizer.json, next to which the tokenizer's own template is. None is that one, or `chatml`
    without it: a released model knows no other format. Raises InputError if there is no template.
    """
    if name not in (None, "chatml", "tokenizer"):
        return _template_in(Path(name).expanduser())
    text = None if name == "chatml" else _own_template(tokenizer.parent)
    if text is None and name == "tokenizer":
        raise InputError(
            "the tokenizer has no chat template",
            where=tokenizer.parent,
            why="there is neither chat_template.jinja nor chat_template in tokenizer_config.json",
            next="chat.template=chatml, or the path of a Jinja file",
        )
    return CHATML if text is None else text


def _template_in(path: Path) -> str:
    """Return the text of a Jinja file; InputError names one that cannot be read."""
    try:
        return read_small(path).decode()  # read_text would change line ends
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(
            "the chat template cannot be read",
            where=path.absolute(),
            why="it is not UTF-8" if isinstance(error, UnicodeDecodeError) else why,
            next="chat.template=chatml, or the path of another Jinja file",
        ) from None


def _own_template(folder: Path) -> str | None:
    """Return the template of a tokenizer; None if it has none.

    A tokenizer may have several. As in `transformers`, files take precedence over
    tokenizer_config.json, and rows with tools are rendered by `tool_use` if there is one.
    """
    own, others = folder / "chat_template.jinja", (folder / TEMPLATE_FOLDER).glob("*.jinja")
    named = {path.stem: _template_in(path) for path in others}
    if own.exists() or own.is_symlink():  # also a pipe or a broken link, which is refused
        named["default"] = _template_in(own)
    if not named:
        value = object_beside(folder / "tokenizer_config.json").get("chat_template")
        if isinstance(value, list):
            value = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
        if isinstance(value, dict):
            named = {str(name): text for name, text in value.items() if isinstance(text, str)}
        elif isinstance(value, str):
            named = {"default": value}
    if not named:
        return None
    if "default" not in named:
        raise InputError(
            "the tokenizer has chat templates, but none of them is the default",
            where=folder,
            why=f"their names: {', '.join(sorted(named))}",
            next=f"chat.template={folder / TEMPLATE_FOLDER}/NAME.jinja, or a file with its text",
        )
    return either(named["default"], named.get("tool_use"))


def either(default: str, tool_use: str | None) -> str:
    """Return one template that renders as `tool_use` with tools, and as `default` without.

    One text is less to keep than two: its hash, the job and the export need no second file. With
    the options of `transformers`, Jinja drops a line end after a tag, blanks before a tag at the
    start of a line, and one line end at the end of a template. So each text starts on a line of its
    own, and a plus sign keeps the blanks at its end.
    """
    if tool_use is None:
        return default
    default, tool_use = default.removesuffix("\n"), tool_use.removesuffix("\n")
    return f"{{% if tools is not none %}}\n{tool_use}{{%+ else %}}\n{default}{{%+ endif %}}"


SPECIAL_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
"""Variables for the special tokens of a tokenizer."""


def special_tokens_beside(tokenizer: Path) -> dict[str, str]:
    """Return the special tokens in files next to a tokenizer.json, such as `eos_token`, by name.

    tokenizer_config.json takes precedence over special_tokens_map.json.
    """
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        facts = object_beside(tokenizer.parent / name)
        for key in SPECIAL_TOKENS:
            value = facts.get(key)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                found[key] = value
    return found
