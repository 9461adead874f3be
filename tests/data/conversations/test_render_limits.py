"""Templates of strangers that would never end: each is refused by its time or memory."""

from __future__ import annotations

import resource

import pytest

from dtt.base.errors import ConfigError, InputError
from dtt.data.conversations.dialects import parse_prompt
from dtt.data.conversations.rows import RefusedRow
from dtt.data.conversations.template import COSTLY_SHARE, ChatTemplate

HELLO = parse_prompt({"prompt": "hello"})
LOOP = "{% for i in range(90000) %}BODY{% endfor %}"
DOUBLED = (
    "{% set ns = namespace(x=START, y=START) %}{% for i in range(90) %}"
    "{% set ns.x = STEP %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
)
ENDLESS = {
    "macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macro twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "loops": LOOP.replace("BODY", "{% for j in range(90000) %}{% endfor %}"),
    "sums": LOOP.replace("BODY", "{% set x = range(90000) | sum %}"),
    "repetition": "{{ 'a' * 3000000000 }}",
    "repetition in loops": LOOP.replace("BODY", "{% set x = 'a' * 30000000 %}"),
    "method": "{{ 'a'.ljust(3000000000) }}",
    "method in loops": "{% set x = 'a' * 30000000 %}" + LOOP.replace("BODY", "{{ x.count('b') }}"),
    "slice in loops": "{% set x = 'a' * 30000000 %}" + LOOP.replace("BODY", "{{ x[1:] and '' }}"),
    "filter": "{{ 'a' | center(3000000000) }}",
    "format": "{{ '%3000000000d' % 1 }}",
    "format method": "{{ '{:3000000000}'.format(1) }}",
    "indented": "{{ messages | tojson(indent=3000000000) }}",
    "join": "{{ (['a' * 1000000] * 100000) | join }}",
    "product": DOUBLED.replace("START", "99").replace("STEP", "ns.x * ns.x"),
    "text": DOUBLED.replace("START", "'a'").replace("STEP", "ns.x ~ ns.x"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_would_never_end_is_refused(name: str) -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises((InputError, RefusedRow), match=r"takes too much|recurses too deeply"):
        ChatTemplate(ENDLESS[name]).render(HELLO)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_powers_are_refused_by_name_also_where_they_are_not_reached() -> None:
    """transformers computes them when it compiles, in one step that nothing interrupts."""
    assert ChatTemplate("{{ 2 ** 3 }}").render(HELLO) == "8"
    with pytest.raises(ConfigError) as failed:
        ChatTemplate("\n{% if false %}{{ 9 ** (9 ** 9) }}{% endif %}", where="t.jinja")
    assert "powers" in str(failed.value)
    assert "t.jinja:2" in str(failed.value)


def test_a_large_row_is_refused_and_a_template_that_refuses_many_ends_the_run() -> None:
    template = ChatTemplate(
        "{% if messages[0].content == 'many' %}" + ENDLESS["sums"] + "{% endif %}a"
    )
    many = parse_prompt({"prompt": "many"})
    for _ in range(COSTLY_SHARE):
        template.render(HELLO)
    with pytest.raises(RefusedRow, match="more than 1 s"):
        template.render(many)
    with pytest.raises(InputError, match="the chat template takes too much time or memory"):
        template.render(many)
