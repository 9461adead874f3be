"""A Jinja sandbox for chat templates.

The sandbox of Jinja keeps a template from running code. Beyond that, a template can do what it can
do in `transformers`, within limits of its time and memory: a row must not hang a run.
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
from time import thread_time
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.environment import Template
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context

MAX_STEPS = 200_000
"""Maximum number of turns of loops and of calls in one render, which usually takes a hundred.

A number of steps, because a limit in seconds is reached by other rows on another machine: with 1 s
of CPU time, one of many runs of a test on a busy machine lost a row (a collection of garbage and
the pauses of a virtual machine count too), and a user would have got other token files. On a slow
machine a step takes 2 to 11 microseconds, so that all take less than MAX_SECONDS.
"""
MAX_SECONDS = 4.0
"""Maximum CPU time of one render, which usually takes 0.1 ms.

It ends what a few steps of C code can do, such as 90,000 sums of 90,000 numbers. It is read at each
step. To count the work of each filter, comparison and assignment as well, so that one hostile step
(a comparison of lists that contain each other 2^90 times) ends, took 190 lines.
"""
MAX_CHARS = 1 << 24
"""Maximum size of a render."""
MAX_MEMORY = 1 << 31
"""Maximum bytes of memory that a render takes in addition to what the process has.

It is address space, of which each thread that starts meanwhile reserves 128 MB for its heap: with
512 MB, a few of them ended a render without a fault of its template."""

PAGE = resource.getpagesize()
WORK = "dtt work"
"""Context variable: the `Work` of the render. With a space in its name, no template can refer to
it."""
MAX_EXPONENT = 64
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


class Work:
    """The steps that a render has taken, and the CPU time of the thread at which it must end."""

    __slots__ = ("deadline", "steps")

    def __init__(self) -> None:
        self.steps, self.deadline = 0, thread_time() + MAX_SECONDS


class _MemoryLimit:
    """A context in which the memory of the process has a limit.

    It is what the process has now and MAX_MEMORY; beyond it follows MemoryError. No deadline ends
    `'a' * 3000000000`, or a list that is written as text, before the memory is taken. The limit
    holds for all threads, so one thread at a time has it. Costs 5 microseconds.
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
        del self.globals["lipsum"]  # pages of random words

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        def strftime_now(form: str) -> str:
            now = datetime.now() if date is None else datetime.fromisoformat(date)  # noqa: DTZ005
            return now.strftime(form)

        self.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
        # A filter is called directly, which is faster than a function. With a space in its name, no
        # template can use it.
        self.filters["dtt turn"] = _count_step

    def compile_template(self, text: str) -> Template:
        """Compile a template whose loops count their turns. Raises TemplateSyntaxError."""
        tree = self.parse(text)
        for power in tree.find_all(nodes.Pow):
            exponent = power.right.value if isinstance(power.right, nodes.Const) else None
            if exponent not in range(MAX_EXPONENT):
                # 9 ** 99999999 takes minutes in one step, in `transformers` even if the template
                # never reaches it.
                why = f"dtt computes powers with exponents of 0 to {MAX_EXPONENT - 1} only"
                raise TemplateSyntaxError(why, power.lineno)
        for loop in tree.find_all(nodes.For):
            turn = nodes.Filter(nodes.Const(""), "dtt turn", [], [], None, None)
            loop.body = [nodes.Output([turn]), *loop.body]
        with memory_limit:  # Jinja computes filters of constants, such as 'a' | center(3000000000)
            code = self.compile(tree)
        # The usual ChainMap of globals would be copied key by key at each render.
        return Template.from_code(self, code, dict(self.globals))

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a macro, a method or a function."""
        _count_step(context)
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


DICT_ATTRIBUTES = frozenset(dir({}))
"""Names of the attributes of a dict, which templates find before its items."""


@pass_context
def _count_step(context: Context, text: str = "") -> str:
    """Raise TooCostly if a render takes too many steps or too long; return the text."""
    work = context.parent[WORK]
    work.steps += 1
    if work.steps > MAX_STEPS:
        raise TooCostly(f"the template takes more than {MAX_STEPS:,} steps")
    if thread_time() > work.deadline:
        raise TooCostly(f"the template takes more than {MAX_SECONDS:g} s")
    return text
