"""A command line that contradicts itself is refused; one that repeats itself harmlessly is not."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
import typer
from support.running import Dtt

from dtt.base.errors import ExitCode
from dtt.cli.parser import RENAMED, _translated
from dtt.config import explain
from dtt.main import cli

REPEATABLE = {"allow_change", "copied", "prompt"}


def options(command: typer.core.TyperGroup, path: str = "dtt") -> list[tuple[str, str, bool]]:
    """Each option that takes a value: its command, its name, whether it may be repeated."""
    found = []
    for name, one in command.commands.items():
        if isinstance(one, typer.core.TyperGroup):
            found += options(one, f"{path} {name}")
            continue
        for parameter in one.params:
            if parameter.param_type_name == "option" and not parameter.is_flag:
                flag = max(parameter.opts, key=len)
                found.append((f"{path} {name}", flag, parameter.name in REPEATABLE))
    return found


@pytest.mark.parametrize(
    ("command", "flag", "repeatable"), options(typer.main.get_command(cli)), ids=str
)
def test_repeated_single_value_options_are_refused(
    command: str, flag: str, repeatable: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*command.split()[1:], flag, "1", flag, "2", "--no-such-option"]
    one = arguments[:-1]
    root = typer.main.get_command(cli)
    with pytest.raises(SystemExit) as ended:
        root.main([*one, "-h"] if repeatable else one, prog_name="dtt")
    captured = capsys.readouterr()
    if repeatable:
        assert ended.value.code == 0
    else:
        assert ended.value.code == ExitCode.USAGE
        assert f"{flag} is given 2 times" in captured.err


def test_flags_may_be_repeated_and_values_may_look_like_options(dtt: Dtt) -> None:
    (dtt.folder / "jobs").mkdir()
    assert json.loads(dtt("job", "ls", "--json", "--json").stdout) == []
    missing = dtt("generate", "nowhere", "-p", "-v", expect=ExitCode.INPUT_MISSING)
    assert "no model in nowhere" in missing.stderr


def command_of(name: str) -> Any:
    found = typer.main.get_command(cli)
    for part in name.split():
        found = found.commands[part]
    return found


def test_an_old_name_of_an_option_stands_for_an_option_or_a_key_that_exists() -> None:
    for name, renamed in RENAMED.items():
        known = {flag for option in command_of(name).params for flag in option.opts}
        for old, new in renamed.items():
            assert old not in known
            if new.endswith("="):
                assert explain.nearest(new[:-1]) == new[:-1]
            else:
                assert new in known


@pytest.mark.parametrize(
    ("command", "given", "current"),
    [
        ("chat", "J --max-tokens 5", "J --max-new-tokens 5"),
        ("chat", "--max-tokens=5 J", "--max-new-tokens=5 J"),
        ("chat", "J --system --max-tokens", "J --system --max-tokens"),  # a value
        ("chat", "J -- --max-tokens", "J -- --max-tokens"),
        ("chat", "J --max-tokens", "J --max-new-tokens"),  # the parser reports what is missing
        ("data mix", "-c a -d b", "-c a download.dataset=b"),
        ("data mix", "-c a -db --json", "-c a download.dataset=b --json"),
        ("data mix", "-cd --dataset=b=c", "-cd download.dataset=b=c"),
        ("data mix", "-c -d -d", "-c -d -d"),  # `-d` is the value of -c, then misses its own
        ("tokenize", "-d x --explain --json", "-d x --dry-run --json"),
        ("plan", "--nodes 2 --gpu H100", "launch.nodes=2 --gpu H100"),
        ("plan", "launch.nodes=2 --gpu=H100", "launch.nodes=2 --gpu=H100"),
    ],
)
def test_old_names_are_translated_and_values_are_not(
    command: str, given: str, current: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one = command_of(command)
    parent = typer.Context(typer.main.get_command(cli), info_name="dtt")
    for part in command.split()[:-1]:
        parent = typer.Context(command_of(part), parent=parent, info_name=part)
    ctx = typer.Context(one, parent=parent, info_name=command.split()[-1])
    assert _translated(one, ctx, given.split()) == current.split()
    warned = "is deprecated, use" in capsys.readouterr().err
    assert warned == (given != current or given.endswith("-d -d"))


def test_a_short_flag_has_one_meaning_and_an_option_one_short_flag() -> None:
    """Also, an option takes a value in all commands or in none."""
    meanings: defaultdict[str, set[Any]] = defaultdict(set)

    def collect(group: Any) -> None:
        for one in group.commands.values():
            if hasattr(one, "commands"):
                collect(one)
                continue
            for option in one.params:
                if option.param_type_name == "option":
                    *short, name = sorted(option.opts, key=len)
                    meanings[name].add((tuple(short), option.is_flag))
                    for flag in short:
                        meanings[flag].add(name)

    collect(typer.main.get_command(cli))
    assert {name: found for name, found in meanings.items() if len(found) > 1} == {}
