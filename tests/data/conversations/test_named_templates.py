"""Several templates of a tokenizer, and templates that print the date."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from dtt.base.errors import DamagedError, InputError
from dtt.config.data import ChatConfig, GivenTokenizerConfig
from dtt.data.conversations.dialects import parse_row
from dtt.data.conversations.row_encoder import Conversations
from dtt.data.conversations.template import (
    CHATML,
    ChatTemplate,
    either,
    resolve_template,
    special_tokens_beside,
)

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
    before = named.key_parts(tokenizer)
    assert kind.key_parts(tokenizer) == before  # the tokenizer has none
    (folder / "chat_template.jinja").write_text(DEFAULT)
    kind.key_parts(tokenizer)
    assert kind.files() == {"chat_template.jinja": DEFAULT}
    assert kind.key_parts(tokenizer, before) == before
    assert kind.files() == {"chat_template.jinja": CHATML}
    assert named.key_parts(tokenizer) == before


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
    assert len(Conversations(cfg).key_parts(tokenizer)["chat"]["date"]) == len("2026-01-31")
    conversation = parse_row({"messages": MESSAGES})
    assert ChatTemplate(text, date="2026-01-31").render(conversation) == "31 January 2026|00"
    assert not ChatTemplate(text).render(conversation).startswith("31 January 2026")
    (folder / "chat_template.jinja").write_text("a")
    assert "date" not in Conversations(cfg).key_parts(tokenizer)["chat"]
