"""A Jinja sandbox for chat templates, which traces messages.

The sandbox of Jinja keeps a template from running code. Beyond that, a template can do what it can
do in `transformers`, except that loops and the output have a limit: a row must not hang a run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.environment import Template
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context

from dtt.data.conversations.template_trees import instrument

STATE = "dtt state"
"""Context variable of the RenderState. With a space in its name, no template can refer to it."""
MAX_STEPS = 1_000_000
"""Maximum number of loop iterations in one render."""
MAX_CHARS = 1 << 24
"""Maximum size of a render."""

FROM_ROW = "\ufdd4"
"""Mark before a character of a row that is part of the string of a special token."""
STAND_INS = "".join(map(chr, range(0xFDD5, 0xFDF0)))
"""First characters that replace those of special tokens, to distinguish them from text of the
row."""
MARKS = re.compile("[\ufdd0-\ufdef]")
"""Pattern of all these: Unicode noncharacters, which are for internal use and occur in no text."""


MESSAGE_END = -1
"""The event of the end of a message; that of its start is its index."""


@dataclass(slots=True)
class RenderState:
    """The state of one render, and the messages whose text is traced."""

    messages: dict[int, int]
    """Index of each message by the `id` of its object."""
    open: list[bool] = field(default_factory=list)
    """Loop bodies in progress, innermost last: True if the loop variable is a message."""
    events: list[tuple[int, int]] = field(default_factory=list)
    """(event, characters before it), in order."""
    captured: bool = False
    """True if there was an event inside of text that the template stores, for example in a macro.

    Such text has no position yet, so the events do not show where the messages are.
    """
    size: int = 0
    """Characters of the output so far."""
    steps: int = 0
    """Iterations of loops so far."""


class GenerationTag(Extension):
    """The tag `{% generation %}` of templates for training, which renders its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block up to `{% endgeneration %}`.

        Like `transformers`, evaluate the body as the body of a call block, with its own scope.
        """
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = nodes.Call(nodes.EnvironmentAttribute("generation"), [], [], None, None)
        return nodes.CallBlock(call, [], [], body).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without Jinja's escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(date: str | None) -> Callable[[str], str]:
    """Return the function that formats the current local time, or midnight of `date`."""
    if date is None:
        return lambda form: datetime.now().strftime(form)  # noqa: DTZ005 - as in `transformers`
    return datetime.fromisoformat(date).strftime


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment in which `transformers` renders chat templates."""

    def __init__(self, date: str | None = None) -> None:
        """Create the environment; `date` replaces the current time for templates."""
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now(date)
        # Filters are called directly, which is faster than a function. With a space in their
        # names, no template can use them.
        for hook in (_begin, _end):
            self.filters[f"dtt {hook.__name__[1:]}"] = hook

    def compile_template(self, text: str) -> Template:
        """Compile a template with the hooks that trace messages. Raises TemplateSyntaxError."""
        tree = self.parse(text)
        instrument(tree)
        code = self.compile(tree)
        # The usual ChainMap of globals would be copied key by key at each render.
        return Template.from_code(self, code, dict(self.globals))

    def generation(self, caller: Callable[[], str]) -> str:
        """Return the text of a generation block."""
        return caller()

    def trace(self, parts: Iterable[str], state: RenderState) -> str:
        """Return the concatenation of the output, whose size `state` has at any time."""
        chunks = []
        for part in parts:
            state.size += len(part)
            if state.size > MAX_CHARS:
                raise TemplateError(f"the template builds more than {MAX_CHARS:,} characters")
            chunks.append(part)
        return "".join(chunks)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute or an item, like the base class.

        The base class raises and catches an exception for each item of a dict, which takes half of
        the time of a render.
        """
        if type(obj) is dict and attribute not in DICT_ATTRIBUTES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


DICT_ATTRIBUTES = frozenset(dir({}))
"""Names of the attributes of a dict, which templates find before its items."""


# Hooks that `instrument` inserts into a template.


@pass_context
def _begin(context: Context, direct: bool, *variables: Any) -> str:
    """Trace the start of a message if a loop variable is one; return "".

    `direct` is True if the body of the loop is output immediately.
    """
    state: RenderState = context.parent[STATE]
    state.steps += 1
    if state.steps > MAX_STEPS:
        raise TemplateError(f"the template takes more than {MAX_STEPS:,} steps")
    for variable in variables:
        index = state.messages.get(id(variable))
        if index is not None:
            state.open.append(True)
            state.events.append((index, state.size))
            state.captured |= not direct
            return ""
    state.open.append(False)
    return ""


@pass_context
def _end(context: Context, _: object) -> str:
    """Trace the end of the current loop body if the body began with a message."""
    state: RenderState = context.parent[STATE]
    if not state.open:
        state.captured = True
    elif state.open.pop():
        state.events.append((MESSAGE_END, state.size))
    return ""
