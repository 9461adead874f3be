"""A command line that contradicts itself is refused; one that repeats itself harmlessly is not."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
import typer
from support.running import Dtt

from dtt.base.errors import ExitCode
from dtt.main import commands

REPEATABLE = {"after", "allow_change", "copied", "prompt"}


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
    ("command", "flag", "repeatable"), options(typer.main.get_command(commands())), ids=str
)
def test_repeated_single_value_options_are_refused(
    command: str, flag: str, repeatable: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*command.split()[1:], flag, "1", flag, "2", "--no-such-option"]
    one = arguments[:-1]
    root = typer.main.get_command(commands())
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

    collect(typer.main.get_command(commands()))
    assert {name: found for name, found in meanings.items() if len(found) > 1} == {}
