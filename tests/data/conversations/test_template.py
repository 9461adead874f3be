from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.chat_shapes import NAMED, SHAPES, templates, user
from tokenizers import Tokenizer, models

from dtt.base.errors import ConfigError, DamagedError, InputError
from dtt.config.data import ChatConfig, GivenTokenizerConfig
from dtt.data.conversations import sandbox
from dtt.data.conversations.dialects import parse_prompt, parse_row
from dtt.data.conversations.row_encoder import Conversations
from dtt.data.conversations.rows import Conversation, RefusedRow
from dtt.data.conversations.template import (
    CHATML,
    COSTLY_SHARE,
    ChatTemplate,
    either,
    resolve_template,
    special_tokens_beside,
)

HELLO = Conversation((user("Hello"),))


def expected(
    template: ChatTemplate, conversation: Conversation, prompt: bool, **kwargs: Any
) -> str | None:
    """Return what `transformers` renders; None if it refuses."""
    from transformers.utils.chat_template_utils import render_jinja_template

    # a template that would print the arguments of a call as a Python dict gets them as JSON
    messages = [template._message(message) for message in conversation.messages]
    try:
        rendered, _ = render_jinja_template(
            [messages], tools=conversation.tools, chat_template=template.text,
            add_generation_prompt=prompt, **NAMED, **kwargs,
        )  # fmt: skip
    except Exception:  # noqa: BLE001 - templates raise anything
        return None
    return str(rendered[0])


def rendered(template: ChatTemplate, conversation: Conversation, prompt: bool) -> str | None:
    try:
        return template.render(conversation, prompt)
    except RefusedRow:
        return None


@pytest.mark.slow
def test_renders_equal_those_of_transformers_with_every_template_and_shape() -> None:
    everything = templates() | {f"{name} for training": t for name, t in templates(True).items()}
    assert len(templates()) >= 40
    both = refused = 0
    for name, text in [*everything.items(), ("chatml", CHATML)]:
        template = ChatTemplate(text, NAMED)
        for shape, row in SHAPES.items():
            conversation = parse_row(row)
            for prompt in (False, True):
                want = expected(template, conversation, prompt)
                assert rendered(template, conversation, prompt) == want, (name, shape)
                both += want is not None
                refused += want is None
    print(f"{both} renders are equal; both refuse {refused}")
    assert both > 700


@pytest.mark.parametrize("thinking", [True, False])
def test_variables_of_the_configuration_and_the_row_reach_the_template(thinking: bool) -> None:
    text = templates()["qwen3"]
    configured = ChatTemplate(text, NAMED, {"enable_thinking": thinking})
    want = expected(configured, HELLO, True, enable_thinking=thinking)
    assert configured.render(HELLO, True) == want
    own = Conversation(HELLO.messages, template_kwargs={"enable_thinking": thinking})
    overridden = ChatTemplate(text, NAMED, {"enable_thinking": not thinking})
    assert overridden.render(own, True) == want


FEATURES = {
    "white space": "{% if true %}\n  a\n  {% endif %}\n b",
    "tojson": "{{ {'é': '<&>'} | tojson }}{{ [1] | tojson(indent=2) }}",
    "loop controls": "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}"
    "{% if i > 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "joined": "{{ 'a' ~ 1 ~ none ~ messages[0].content }}",
    "namespace": "{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}"
    "{{ dict(a=2).a }}",
    "macro": "{% macro m(x) %}<{{ x }}>{{ caller() if caller }}{% endmacro %}{{ m(1) }}"
    "{% call m(2) %}inner{% endcall %}",
    "generation": "{% set a = 1 %}{% generation %}{{ a }}{% set a = 2 %}{% endgeneration %}{{ a }}",
    "loop": "{% for m in messages %}{{ loop.index }}{{ loop.last }}{{ loop.length }}"
    "{{ loop.revindex }}{{ loop.previtem }}{% endfor %}",
    "generator": "{% for x in messages | map(attribute='role') %}{{ x }}{{ loop.last }}"
    "{% endfor %}",
    "recursive": "{% for x in [[1, [2]], 3] recursive %}"
    "{{ loop(x) if x is not number else x }}{% endfor %}",
    "undefined": "{{ nothing }}{{ messages[0].nothing is defined }}{{ bos_token }}",
    "strftime": "{{ strftime_now('%Y') }}",
    "format": "{{ '%03d|%s' % (7, 'x') }}{{ '{:>5}'.format(3) }}{{ 'ab' * 3 }}{{ 2 ** 10 }}",
    "split": "{{ 'a</t>b'.split('</t>')[-1].lstrip('x') | upper }}{{ 'abc'[::-1] }}",
}  # fmt: skip


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_of_templates_works_as_in_transformers(feature: str) -> None:
    template = ChatTemplate(FEATURES[feature], NAMED)
    want = expected(template, HELLO, False)
    assert want
    assert template.render(HELLO) == want


HOSTILE = {
    "raises": "{{ raise_exception('roles must alternate') }}",
    "divides by zero": "{{ 1 / 0 }}",
    "a large output": "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
    "includes a file": "{% include '/etc/passwd' %}",
    "imports": "{% import 'os' as os %}",
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['json'] }}",
    "attributes of a namespace": "{{ namespace(a=1).__class__.__mro__ }}",
    "methods of a type": "{{ dict.mro() }}",
    "changes a message": "{{ messages.append(1) }}",
}  # fmt: skip


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_template_refuses_the_row(hostile: str) -> None:
    with pytest.raises(RefusedRow, match="chat template rejects"):
        ChatTemplate(HOSTILE[hostile]).render(HELLO)
    assert ChatTemplate("ok").render(HELLO) == "ok"


def test_a_template_with_a_syntax_error_is_named_with_its_line() -> None:
    with pytest.raises(ConfigError, match=r"not a valid Jinja template\n  where: a\.jinja:2"):
        ChatTemplate("{{ 1 }}\n{% for %}", where="a.jinja")


def test_the_tokenizers_own_template_and_special_tokens_are_found(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    with pytest.raises(InputError, match="the tokenizer has no chat template"):
        resolve_template("tokenizer", tokenizer)
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "named"}]
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert resolve_template("tokenizer", tokenizer) == "named"
    assert special_tokens_beside(tokenizer) == {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "chat_template.jinja").write_text("a file")
    assert resolve_template("tokenizer", tokenizer) == "a file"
    assert resolve_template(str(tmp_path / "chat_template.jinja"), None) == "a file"
    assert resolve_template("chatml", None) == CHATML
    with pytest.raises(InputError, match="the chat template cannot be read"):
        resolve_template(str(tmp_path / "missing.jinja"), None)


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
def test_a_template_that_would_never_end_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 1.0)
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


def test_no_pause_of_the_machine_decides_over_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clocks of a virtual machine that is stopped for a moment go on."""
    template = ChatTemplate(CHATML)
    expected = template.render(HELLO)

    def pause(seconds: float) -> None:
        """Let this much time pass between the first reading of the clock and the others."""
        times = iter([0.0])
        monkeypatch.setattr(sandbox, "thread_time", lambda: next(times, seconds))

    for _ in range(COSTLY_SHARE):
        pause(3)
        assert template.render(HELLO) == expected
    pause(5)
    with pytest.raises(RefusedRow, match="more than 4 s"):
        template.render(HELLO)


def test_a_large_row_is_refused_and_a_template_that_refuses_many_ends_the_run() -> None:
    template = ChatTemplate(
        "{% if messages[0].content == 'many' %}" + ENDLESS["loops"] + "{% endif %}a"
    )
    many = parse_prompt({"prompt": "many"})
    for _ in range(COSTLY_SHARE):
        template.render(HELLO)
    with pytest.raises(RefusedRow, match="more than 200,000 steps"):
        template.render(many)
    with pytest.raises(InputError, match="the chat template takes too much time or memory"):
        template.render(many)


# ---- several templates of a tokenizer, and the date ----------------------------------------------

DEFAULT = "{% for m in messages %}\n{{ m.role }}: {{ m.content }}\n  {% endfor %}\nend\n"
TOOL_USE = "  \n{% if tools %}\n TOOLS {{ tools | tojson }}\n{% endif %}\n" + DEFAULT + "  "
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def as_list(folder: Path, named: dict[str, str]) -> None:
    templates = [{"name": name, "template": text} for name, text in named.items()]
    write_config(folder, templates)


def as_dict(folder: Path, named: dict[str, str]) -> None:
    write_config(folder, named)


def as_files(folder: Path, named: dict[str, str]) -> None:
    write_config(folder, "from tokenizer_config.json, which the files replace")
    (folder / "additional_chat_templates").mkdir()
    for name, text in named.items():
        file = "chat_template" if name == "default" else f"additional_chat_templates/{name}"
        (folder / f"{file}.jinja").write_text(text)


def write_config(folder: Path, template: Any) -> None:
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer without templates."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<|endoftext|>": 1}, "a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


Write = Callable[[Path, dict[str, str]], None]
LAYOUTS = [as_list, as_dict, as_files]


@pytest.mark.parametrize("write", LAYOUTS)
@pytest.mark.parametrize("others", [{}, {"tool_use": TOOL_USE}, {"rag": "x", "tool_use": TOOL_USE}])
def test_rows_are_rendered_as_by_transformers_with_tools_and_without(
    folder: Path, write: Write, others: dict[str, str]
) -> None:
    from transformers import AutoTokenizer

    write(folder, {"default": DEFAULT, **others})
    ours = ChatTemplate(resolve_template("tokenizer", folder / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(folder)
    for tools in (None, TOOLS, []):
        row = {"messages": MESSAGES, "tools": tools}
        want = theirs.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
        assert ours.render(parse_row(row)) == want


@pytest.mark.parametrize("write", LAYOUTS)
def test_named_templates_without_a_default_are_refused_with_their_names(
    folder: Path, write: Write
) -> None:
    write(folder, {"tool_use": TOOL_USE, "rag": "x"})
    with pytest.raises(InputError, match="their names: rag, tool_use"):
        resolve_template("tokenizer", folder / "tokenizer.json")


TEXTS = [DEFAULT, "a", " a ", "\na\n\n", "{{ 1 }}\n", "  {% set x = 1 %}\n{{ x }}", " {# a #} b"]


@pytest.mark.parametrize("default", TEXTS)
@pytest.mark.parametrize("tool_use", [TOOL_USE, "b\n", "{% if true %}\n b\n{% endif %}\n"])
def test_one_template_for_both_renders_as_each_alone(default: str, tool_use: str) -> None:
    both = ChatTemplate(either(default, tool_use))
    for tools, alone in ((None, default), (TOOLS, tool_use)):
        conversation = parse_row({"messages": MESSAGES, "tools": tools})
        assert both.render(conversation) == ChatTemplate(alone).render(conversation)


def test_the_tokenizers_own_template_is_the_default_where_it_has_one(folder: Path) -> None:
    """A released model knows its own format; token files made with `chatml` before keep it."""
    tokenizer = GivenTokenizerConfig(type="file", path=str(folder))
    kind, named = Conversations(ChatConfig()), Conversations(ChatConfig(template="chatml"))
    before = named.prepare(tokenizer)
    assert before[1] == {"chat_template.jinja": CHATML}
    assert kind.prepare(tokenizer) == before  # the tokenizer has none
    (folder / "chat_template.jinja").write_text(DEFAULT)
    assert kind.prepare(tokenizer)[1] == {"chat_template.jinja": DEFAULT}
    assert kind.prepare(tokenizer, before[0]) == before
    assert named.prepare(tokenizer) == before


@pytest.mark.parametrize("name", ["chat_template", "additional_chat_templates/tool_use", "own"])
def test_a_template_that_is_no_small_regular_file_is_refused_by_name(
    folder: Path, name: str
) -> None:
    as_files(folder, {"default": DEFAULT, "tool_use": TOOL_USE})
    path = folder / f"{name}.jinja"
    kinds: dict[str, Callable[[], object]] = {
        "not a regular file": lambda: path.symlink_to("/dev/zero"),
        "it is not a regular": lambda: os.mkfifo(path),
        "more than": lambda: (path.touch(), os.truncate(path, 2**30)),
        "it is a directory": path.mkdir,
        "No such file": lambda: path.symlink_to(folder / "nothing"),
        "not UTF-8": lambda: path.write_bytes(b"\xff"),
    }
    for why, make in kinds.items():
        path.unlink(missing_ok=True) if not path.is_dir() else path.rmdir()
        make()
        with pytest.raises(InputError) as error:
            resolve_template(str(path) if name == "own" else None, folder / "tokenizer.json")
        assert why in str(error.value)
        assert str(path) in str(error.value)


@pytest.mark.parametrize("name", ["special_tokens_map.json", "tokenizer_config.json"])
def test_a_file_beside_a_tokenizer_that_is_no_regular_file_is_refused_by_name(
    folder: Path, name: str
) -> None:
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
        with pytest.raises(DamagedError, match=name):
            special_tokens_beside(folder / "tokenizer.json")


# ---- the date ------------------------------------------------------------------------------------


def test_a_template_that_prints_the_date_is_rendered_with_the_one_of_the_key(folder: Path) -> None:
    text = "{{ strftime_now('%d %B %Y') }}|{{ strftime_now('%H') }}"
    (folder / "chat_template.jinja").write_text(text)
    tokenizer = GivenTokenizerConfig(type="file", path=str(folder))
    cfg = ChatConfig(template="tokenizer")
    assert len(Conversations(cfg).prepare(tokenizer)[0]["chat"]["date"]) == len("2026-01-31")
    conversation = parse_row({"messages": MESSAGES})
    assert ChatTemplate(text, date="2026-01-31").render(conversation) == "31 January 2026|00"
    assert not ChatTemplate(text).render(conversation).startswith("31 January 2026")
    (folder / "chat_template.jinja").write_text("a")
    assert "date" not in Conversations(cfg).prepare(tokenizer)[0]["chat"]
