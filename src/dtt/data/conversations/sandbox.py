"""A Jinja sandbox for chat templates.

The sandbox of Jinja keeps a template from running code. Beyond that, a template can do what it can
do in `transformers`, within limits of its time and output: a row must not hang a run. A limit of
its memory would be one of the address space of the process, in which other threads work, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from time import thread_time
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.environment import Template
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context

MAX_SECONDS = 1.0
"""Maximum CPU time of one render, which usually takes 0.1 ms.

CPU time, because wall-clock time would refuse rows on a machine that swaps or is suspended. It is
read at each turn of a loop and at each call, which ends whatever a mistake in a template can do. To
count the work of each filter, comparison and assignment as well, so that one hostile step of C code
(a comparison of lists that contain each other 2^90 times) ends, took 190 lines. Nor does a step end
that takes gigabytes, such as `'a' * 3000000000`.
"""
MAX_CHARS = 1 << 24
"""Maximum size of a render."""
DEADLINE = "dtt deadline"
"""Context variable: when the thread must have rendered. With a space in its name, no template can
refer to it."""

FROM_ROW = "\ufdd4"
"""Mark before a character of a row that is part of the string of a special token."""
STAND_INS = "".join(map(chr, range(0xFDD5, 0xFDF0)))
"""First characters that replace those of special tokens, to distinguish them from text of the
row."""
MARKS = re.compile("[\ufdd0-\ufdef]")
"""Pattern of all these: Unicode noncharacters, which are for internal use and occur in no text."""


class TooCostly(TemplateError):
    """A render takes too much time."""


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
        self.filters["dtt turn"] = _check_time

    def compile_template(self, text: str) -> Template:
        """Compile a template whose loops check the time. Raises TemplateSyntaxError."""
        tree = self.parse(text)
        for loop in tree.find_all(nodes.For):
            turn = nodes.Filter(nodes.Const(""), "dtt turn", [], [], None, None)
            loop.body = [nodes.Output([turn]), *loop.body]
        # The usual ChainMap of globals would be copied key by key at each render.
        return Template.from_code(self, self.compile(tree), dict(self.globals))

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a macro, a method or a function."""
        _check_time(context)
        return super().call(context, obj, *args, **kwargs)

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
def _check_time(context: Context, text: str = "") -> str:
    """Raise TooCostly after the deadline of a render; return the text."""
    if thread_time() > context.parent[DEADLINE]:
        raise TooCostly(f"the template takes more than {MAX_SECONDS:g} s")
    return text
