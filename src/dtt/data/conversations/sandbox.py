"""A Jinja sandbox for chat templates, with limits on work and size, which traces messages."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
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
MAX_STEPS = 10_000_000
"""Maximum number of loop iterations in one render, with MACRO_STEPS for each call of a macro."""
MACRO_STEPS = 50
MAX_CHARS = 1 << 24
"""Maximum size of a string, and of a list by repetition, that a template builds."""
MAX_SECONDS = 10.0
"""Maximum duration of one render. The other limits refuse nearly all runaway templates first."""
CHUNK = 1000
"""Iterations between two checks of the limits."""

FROM_ROW = "\ufdd4"
"""Mark before a character of a row that is part of the string of a special token."""
STAND_INS = "".join(map(chr, range(0xFDD5, 0xFDF0)))
"""First characters that replace those of special tokens, to distinguish them from text of the
row."""
MARKS = re.compile("[\ufdd0-\ufdef]")
"""Pattern of all these: Unicode noncharacters, which are for internal use and occur in no text."""


class LimitExceeded(TemplateError):
    """A render that takes too many steps, too long, or builds too large a string."""


MESSAGE_END = -1
"""The event of the end of a message; that of its start is its index."""


@dataclass(slots=True)
class RenderState:
    """The state of one render: its budget, and the messages whose text is traced."""

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
    chars: int = 0
    deadline: float = field(default_factory=lambda: time.monotonic() + MAX_SECONDS)

    def step(self, count: int) -> None:
        """Count iterations or calls. Raises LimitExceeded."""
        self.steps += count
        if self.steps > MAX_STEPS:
            raise LimitExceeded(f"the template takes more than {MAX_STEPS:,} steps")
        if time.monotonic() > self.deadline:
            raise LimitExceeded(f"the template takes more than {MAX_SECONDS:.0f} s")


def check_size(size: int) -> None:
    """Raise LimitExceeded if a string or list of `size` items is too large."""
    if size > MAX_CHARS:
        raise LimitExceeded(f"the template builds more than {MAX_CHARS:,} characters")


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
    if isinstance(indent, int):
        check_size(indent * 1024)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(date: str | None) -> Callable[[str], str]:
    """Return the function that formats the current local time, or midnight of `date`."""
    if date is None:
        return lambda form: datetime.now().strftime(form)  # noqa: DTZ005 - as in `transformers`
    return datetime.fromisoformat(date).strftime


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment in which `transformers` renders chat templates, with limits."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, date: str | None = None) -> None:
        """Create the environment; `date` replaces the current time for templates."""
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        self.filters["tojson"] = _tojson
        for name in GROWING & self.filters.keys():
            self.filters[name] = _limited(name, self.filters[name])
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now(date)
        del self.globals["lipsum"]  # unlimited, and random
        self.concat = _concat  # type: ignore[method-assign]
        # Filters are called directly, which is faster than a function. With a space in their
        # names, no template can use them.
        for hook in (_loop, _macro, _begin, _end, _join_text):
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
                check_size(state.size)
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

    # The sandbox calls these for each call and for the intercepted operators.

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function from the template."""
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
        if isinstance(owner, str):
            _check_growth(obj.__name__, (owner, *args), kwargs)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Evaluate an operator that can build large objects."""
        if operator == "+":
            if isinstance(left, (str, list, tuple)) and isinstance(right, (str, Sized)):
                check_size(len(left) + len(right))
            return left + right
        if operator == "%":
            if isinstance(left, str):
                _check_format(left, "%", (right,))
        elif isinstance(left, int) and isinstance(right, int):
            bits = right if operator == "**" else right.bit_length()
            check_size(left.bit_length() * max(bits, 1))
        elif operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
                    check_size(len(sequence) * times)
        return super().call_binop(context, operator, left, right)


DICT_ATTRIBUTES = frozenset(dir({}))
"""Names of the attributes of a dict, which templates find before its items."""

GROWING = frozenset(
    {
        "batch", "center", "expandtabs", "format", "format_map", "indent", "join", "ljust",
        "replace", "rjust", "slice", "sum", "wordwrap", "zfill",
    }
)  # fmt: skip
"""Filters and methods of strings whose result can be much larger than their input."""


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that checks its arguments first."""
    passes = getattr(function, "jinja_pass_arg", None)

    def limited(*args: Any, **kwargs: Any) -> Any:
        given = args[1:] if passes is not None else args
        if not isinstance(given[0], (str, list, tuple, dict, int, float)):
            given = ([*islice(given[0], MAX_CHARS)], *given[1:])  # a generator
            args = (*args[:1], *given) if passes is not None else given
        _check_growth(name, given, kwargs)
        return function(*args, **kwargs)

    if passes is not None:
        limited.jinja_pass_arg = passes  # type: ignore[attr-defined]
    return limited


def _check_growth(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise LimitExceeded if a filter or method could build too large an object."""
    if name not in GROWING:
        return
    values = [*args, *kwargs.values()]
    if name in ("format", "format_map"):
        _check_format(str(values[0]), "{", values[1:])
        return
    numbers = [abs(value) for value in values if isinstance(value, int)]
    texts = [len(value) for value in values if isinstance(value, str)]
    if name == "join":
        items = next((v for v in values if isinstance(v, (list, tuple, dict))), ())
        check_size(sum(len(v) for v in items if isinstance(v, str)))
        check_size(sum(texts) * len(items))
        return
    if name == "replace" and len(args) > 2:
        check_size((str(args[0]).count(str(args[1])) + 1) * len(str(args[2])))
        return
    size = max(texts, default=1)
    for number in numbers:
        # indent and expandtabs may insert this number of characters per line or tab, others only
        # once.
        check_size(number * (size if name in ("indent", "expandtabs") else 1))
    if name == "wordwrap" and len(texts) > 1:
        check_size(texts[0] * max(texts[1:]))


def _check_format(form: str, sign: str, values: Iterable[Any]) -> None:
    """Raise LimitExceeded if a format string has a large or a computed width."""
    if re.search(r"\d{6}", form) or ("*" in form if sign == "%" else re.search(r":[^}]*\{", form)):
        raise LimitExceeded("the template formats text with a large or computed width")


def _concat(parts: Iterable[str]) -> str:
    chunks, size = [], 0
    for part in parts:
        size += len(part)
        if size > MAX_CHARS:
            check_size(size)
        chunks.append(part)
    return "".join(chunks)


# Hooks that `instrument` inserts into a template.


@pass_context
def _loop(context: Context, items: Any) -> Any:
    """Count the iterations of a loop over `items`; return an equivalent iterable."""
    state: RenderState = context.parent[STATE]
    if isinstance(items, Sized) and (count := len(items)) <= CHUNK:
        state.step(count)
        return items
    return _counted(items, state)


@pass_context
def _macro(context: Context, _: object) -> str:
    """Count the call of a macro."""
    context.parent[STATE].step(MACRO_STEPS)
    return ""


@pass_context
def _begin(context: Context, direct: bool, *variables: Any) -> str:
    """Trace the start of a message if a loop variable is one; return "".

    `direct` is True if the body of the loop is output immediately.
    """
    state: RenderState = context.parent[STATE]
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


@pass_context
def _join_text(context: Context, *parts: Any) -> str:
    """Return the concatenation of the operator `~`."""
    text = "".join(map(str, parts))
    check_size(len(text))
    return text


def _counted(items: Iterable[Any], state: RenderState) -> Iterator[Any]:
    """Yield items, and count them in chunks."""
    iterator = iter(items)
    while chunk := [*islice(iterator, CHUNK)]:
        state.step(len(chunk))
        yield from chunk
