"""A Jinja sandbox for chat templates.

The sandbox of Jinja keeps a template from running code. Beyond that, a template can do what it can
do in `transformers`, within limits of its work and memory: a row must not hang a run. Work is
counted, not timed, so that a row is refused on every machine or on none. One step takes about a
microsecond.
"""

from __future__ import annotations

import json
import os
import re
import resource
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime
from threading import Lock
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.environment import Template
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context, pass_environment, pass_eval_context

MAX_STEPS = 1_000_000
"""Maximum number of steps in one render: iterations, calls, and the size of what it computes."""
MAX_CHARS = 1 << 24
"""Maximum size of a render."""
MAX_MEMORY = 1 << 31
"""Maximum bytes of memory that a render takes in addition to what the process has.

It is address space, of which each thread that starts meanwhile reserves 128 MB for its heap: with
512 MB, a few of them ended a render without a fault of its template."""
CALL = 8
"""RenderSteps of a call of a macro."""
CHARS, ITEMS = 9, 4
"""Powers of two: characters of a text, and items of a list, that take a step."""

PAGE = resource.getpagesize()
STEPS = "dtt steps"
"""Context variable of the RenderSteps. With a space in its name, no template can refer to it."""
SHALLOW = frozenset(
    (
        *("length", "count", "first", "last", "random", "list", "reverse", "items", "batch"),
        *("slice", "default", "d", "attr", "map", "select", "reject", "selectattr", "rejectattr"),
        *("defined", "undefined", "none", "string", "mapping", "sequence", "iterable", "sameas"),
        *("boolean", "true", "false", "number", "integer", "callable"),
    )
)
"""Filters and tests that do not look into the items of a list."""
MAX_EXPONENT = 64
SLOW = frozenset(
    ("wordwrap", "urlize", "striptags", "truncate", "wordcount", "title", "urlencode", "indent")
)
"""Filters that take about a microsecond per character."""
MAX_BITS = 1 << 16
"""Maximum size of a product of integers. Larger ones take minutes, in one uninterruptible step."""

FROM_ROW = "\ufdd4"
"""Mark before a character of a row that is part of the string of a special token."""
STAND_INS = "".join(map(chr, range(0xFDD5, 0xFDF0)))
"""First characters that replace those of special tokens, to distinguish them from text of the
row."""
MARKS = re.compile("[\ufdd0-\ufdef]")
"""Pattern of all these: Unicode noncharacters, which are for internal use and occur in no text."""


class TooCostly(TemplateError):
    """A render takes too much work, so that the template would not end in useful time."""


class RenderSteps:
    """The number of steps of a render so far."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        """Start at zero."""
        self.count = 0

    def spend(self, steps: int) -> None:
        """Count steps; raise TooCostly beyond the limit."""
        self.count += steps
        if self.count > MAX_STEPS:
            raise TooCostly(f"the template takes more than {MAX_STEPS:,} steps")

    def read(self, value: object, *, deep: bool) -> None:
        """Count the steps that it takes to read a value; with `deep`, with everything inside.

        A list that contains another twice, thirty times in a row, is a billion items in a few
        kilobytes. So the count ends at the limit.
        """
        kind = type(value)
        if kind is str:
            self.spend(len(value) >> CHARS)  # type: ignore[arg-type]
        elif kind in SIZED:
            pending = [value]
            while pending:
                one = pending.pop()
                kind = type(one)
                if kind is str:
                    self.spend(len(one) >> CHARS)  # type: ignore[arg-type]
                elif kind in SIZED:
                    self.spend(1 + (len(one) >> ITEMS))  # type: ignore[arg-type]
                    if deep and kind is not range:
                        inner = one.values() if kind is dict else one  # type: ignore[attr-defined]
                        pending += inner  # type: ignore[arg-type]


SIZED = frozenset((list, tuple, dict, range))


class _MemoryLimit:
    """A context in which the memory of the process has a limit.

    It is what the process has now and MAX_MEMORY; beyond it follows MemoryError. No count of steps
    sees `'a' * 3000000000`, or a list that is written as text, before the memory is taken. The
    limit holds for all threads, so one thread at a time has it. Costs 5 microseconds.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._before = (0, 0)
        self._statm = (0, -1)
        """Process id and file descriptor of /proc/self/statm, which takes longer to open than many
        renders take."""

    def __enter__(self) -> None:
        self._lock.acquire()
        soft, hard = self._before = resource.getrlimit(resource.RLIMIT_AS)
        limits = [one for one in (soft, hard) if one != resource.RLIM_INFINITY]
        if self._statm[0] != os.getpid():
            with suppress(OSError):  # not Linux
                self._statm = os.getpid(), os.open("/proc/self/statm", os.O_RDONLY)
        if self._statm[0] == os.getpid():
            limits.append(int(os.pread(self._statm[1], 64, 0).split()[0]) * PAGE + MAX_MEMORY)
            resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_AS, self._before)
        self._lock.release()


memory_limit = _MemoryLimit()


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


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment in which `transformers` renders chat templates."""

    # Jinja does not compute these with constants when it compiles, but calls `call_binop`.
    intercepted_binops = frozenset(("*", "%"))

    def __init__(self, date: str | None = None) -> None:
        """Create the environment; `date` replaces the current time for templates."""
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        self.filters["tojson"] = _tojson
        self.filters["sum"] = _sum
        self.filters = {name: _counted(name, one) for name, one in self.filters.items()}
        del self.globals["lipsum"]  # pages of random words

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        def strftime_now(form: str) -> str:
            now = datetime.now() if date is None else datetime.fromisoformat(date)  # noqa: DTZ005
            return now.strftime(form)

        self.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
        self.tests |= {name: _counted(name, one) for name, one in self.tests.items()}
        # Filters are called directly, which is faster than a function. With a space in their
        # names, no template can use them.
        for hook in (_turn, _read, _read_all):
            self.filters[f"dtt {hook.__name__[1:]}"] = hook

    def compile_template(self, text: str) -> Template:
        """Compile a template with the hooks that count steps. Raises TemplateSyntaxError."""
        tree = self.parse(text)
        for power in tree.find_all(nodes.Pow):
            exponent = power.right.value if isinstance(power.right, nodes.Const) else None
            if exponent not in range(MAX_EXPONENT):
                # 9 ** 99999999 takes minutes in one step, in `transformers` even if the template
                # never reaches it.
                why = f"dtt computes powers with exponents of 0 to {MAX_EXPONENT - 1} only"
                raise TemplateSyntaxError(why, power.lineno)
        _instrument(tree)
        code = self.compile(tree)
        # The usual ChainMap of globals would be copied key by key at each render.
        return Template.from_code(self, code, dict(self.globals))

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a macro, a method or a function, and count it."""
        steps: RenderSteps = context.parent[STEPS]
        steps.spend(CALL)
        steps.read(getattr(obj, "__self__", None), deep=type(obj).__name__ != "dict")
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return a product, a remainder or a formatted text within the limits."""
        are_whole = operator == "*" and isinstance(left, int) and isinstance(right, int)
        if are_whole and left.bit_length() + right.bit_length() > MAX_BITS:
            raise TooCostly("the template computes too large a number")
        return super().call_binop(context, operator, left, right)

    def generation(self, caller: Callable[[], str]) -> str:
        """Return the text of a generation block."""
        return caller()

    def concatenate(self, parts: Iterable[str]) -> str:
        """Return the concatenation of the output; raise TemplateError if it is too long."""
        size, chunks = 0, []
        for part in parts:
            size += len(part)
            if size > MAX_CHARS:
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


def _instrument(tree: nodes.Template) -> None:
    """Insert the hooks that count steps into the tree of a template."""

    def read(node: Any, hook: str) -> Any:
        """Return an expression with the hook that counts the steps of its value."""
        if isinstance(node, nodes.TemplateData | nodes.Const):
            return node
        return nodes.Filter(node, f"dtt {hook}", [], [], None, None).set_lineno(node.lineno)

    for output in tree.find_all(nodes.Output):
        output.nodes = [read(node, "read_all") for node in output.nodes]
    for assignment in tree.find_all(nodes.Assign):
        assignment.node = read(assignment.node, "read")
    for item in tree.find_all(nodes.Getitem):
        if isinstance(item.arg, nodes.Slice):
            item.node = read(item.node, "read")
    for comparison in tree.find_all(nodes.Compare):
        sides = [comparison.expr, *(operand.expr for operand in comparison.ops)]
        # With a constant, it takes a step, unless a text is searched for it.
        if not any(isinstance(side, nodes.Const) for side in sides):
            comparison.expr = read(comparison.expr, "read_all")
        for operand in comparison.ops:
            if operand.op in ("in", "notin") or comparison.expr is not sides[0]:
                operand.expr = read(operand.expr, "read_all")
    for loop in tree.find_all(nodes.For):
        turn = nodes.Filter(nodes.Const(None), "dtt turn", [], [], None, None)
        loop.body = [nodes.Output([turn]), *loop.body]


DICT_ATTRIBUTES = frozenset(dir({}))
"""Names of the attributes of a dict, which templates find before its items."""


@pass_context
def _sum(context: Context, items: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
    """Return a sum, and count its steps: of lists, it takes quadratic time."""
    steps: RenderSteps = context.parent[STEPS]
    if attribute is not None:
        items = context.environment.call_filter("map", items, (), {"attribute": attribute}, context)
    for item in items:
        start = start + item
        steps.spend(1)
        steps.read(start, deep=False)
    return start


def _counted(name: str, function: Any) -> Callable[..., Any]:
    """Return a filter or a test that counts the steps of its arguments and its result."""
    kind = getattr(function, "jinja_pass_arg", None)
    deep, slow = name not in SHALLOW, name in SLOW

    @pass_context
    def counted(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        steps: RenderSteps = context.parent[STEPS]
        steps.read(value, deep=deep)
        if slow and isinstance(value, str):
            steps.spend(len(value))
        for one in (*args, *kwargs.values()):
            steps.read(one, deep=deep)
        if kind is None:
            result = function(value, *args, **kwargs)
        elif kind is CONTEXT:
            result = function(context, value, *args, **kwargs)
        elif kind is EVAL_CONTEXT:
            result = function(context.eval_ctx, value, *args, **kwargs)
        else:
            result = function(context.environment, value, *args, **kwargs)
        steps.read(result, deep=False)
        return result

    return counted


CONTEXT, EVAL_CONTEXT, ENVIRONMENT = (
    passing(lambda: None).jinja_pass_arg  # type: ignore[attr-defined]
    for passing in (pass_context, pass_eval_context, pass_environment)
)
"""First arguments that filters ask for."""


# Hooks that `_instrument` inserts into a template.


@pass_context
def _read(context: Context, value: Any) -> Any:
    """Count the steps of a value that is stored; return it."""
    context.parent[STEPS].read(value, deep=False)
    return value


@pass_context
def _read_all(context: Context, value: Any) -> Any:
    """Count the steps of a value that is compared or put out, with everything inside; return it."""
    context.parent[STEPS].read(value, deep=True)
    return value


@pass_context
def _turn(context: Context, _: object) -> str:
    """Count a turn of a loop; return ""."""
    context.parent[STEPS].spend(1)
    return ""
