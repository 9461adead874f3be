"""The recipes of images in containers/ name keys, commands, extras and files that exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import typer
from support.running import ROOT

from dtt.config import explain
from dtt.config.run import RunConfig
from dtt.config.shipped import find
from dtt.main import commands

RECIPES = sorted((ROOT / "containers").iterdir())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_every_key_and_command_of_a_recipe_exists(recipe: Path) -> None:
    text = recipe.read_text()
    known = {".".join(key) for key, _, _ in explain.all_fields(entries=True)}
    named = re.findall(r"(?<![\w/.-])([a-z_]+(?:\.[a-z_]+)+)\b", text)
    keys = {name for name in named if name.partition(".")[0] in RunConfig.model_fields}
    assert keys <= known
    # The image runs `dtt`, so what follows its name is the command.
    shown = re.findall(r"(?:dtt|dtt\.sif) ([a-z]+) -c (\S+)$", text, re.MULTILINE)
    assert shown
    all_commands = typer.main.get_command(commands()).commands  # type: ignore[attr-defined]
    for command, config in shown:
        assert command in all_commands
        assert find(config).is_file()


def test_both_recipes_install_the_same_from_what_a_wheel_needs() -> None:
    docker, apptainer = (
        (ROOT / "containers" / name).read_text() for name in ("Dockerfile", "dtt.def")
    )
    for pattern in (r"apt-get install (.+?)(?: \\)?$", r"pip install (.+)$", r"(?i)from:? (\S+)$"):
        assert re.findall(pattern, docker, re.M) == re.findall(pattern, apptainer, re.M) != []
    [extras] = re.findall(r'"/opt/dtt\[(.+)\]"', docker)
    assert set(extras.split(",")) <= PROJECT["project"]["optional-dependencies"].keys()
    project, build = PROJECT["project"], PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = ["pyproject.toml", project["readme"], *project["license-files"]]
    needed = {name.split("/")[0] for name in [*needed, *build["only-include"]]}
    copied = dict(re.findall(r"^    (\S+) /opt/dtt/(\S+)$", apptainer, re.M))
    assert copied == {name: name for name in needed}
    assert all((ROOT / name).exists() for name in copied)
    assert "COPY . /opt/dtt\n" in docker
    assert not needed & {*(ROOT / ".dockerignore").read_text().split()}
