"""The pages tell the truth: commands, keys, paths, links and the tree are checked against the code."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from running import ROOT

from dtt.config import explain
from dtt.config.load import find, resolve
from dtt.config.run import RunConfig
from dtt.main import cli

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OWN_CONFIG = "run.yaml"
"""The config that a reader writes; the README shows one."""
NAMES_OF_FILES = (".py", ".md", ".json", ".jsonl", ".yaml", ".safetensors", ".idx", ".bin")

Page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)


def blocks(page: Path, *languages: str) -> Iterator[str]:
    """The fenced blocks of a page in these languages."""
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S):
        if language in languages:
            yield text


def commands(page: Path) -> Iterator[list[str]]:
    """The arguments of each `dtt …` in the shell blocks of a page, however it is launched."""
    for block in blocks(page, "sh", "console"):
        for line in block.splitlines():
            words = shlex.split(line.partition(" < ")[0], comments=True)
            for name in ("dtt", "dtt.main"):
                if name in words:
                    yield words[words.index(name) + 1 :]


def test_the_readme_opens_with_the_two_commands() -> None:
    block = re.search(r"```\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert block is not None
    assert block[1].splitlines() == [
        "./env.sh dtt pipeline -c configs/quickstart.yaml"
        "     # install, then raw text → tokens → model → verified HF export",
        "./env.sh pytest                                      # install, then pass the tests",
    ]
    assert (ROOT / "configs/quickstart.yaml").is_file()


def test_generated_pages_are_up_to_date() -> None:
    check = [sys.executable, ROOT / "docs/generate.py", "--check"]
    run = subprocess.run(check, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_generate_writes_what_check_then_accepts(tmp_path: Path) -> None:
    script = tmp_path / "generate.py"
    script.write_text((ROOT / "docs/generate.py").read_text())
    (tmp_path / "cli.md").write_text("of long ago")

    def generate(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    stale = generate("--check")
    assert stale.returncode == 1
    assert "docs/cli.md" in stale.stderr
    assert "docs/config.md" in stale.stderr
    assert generate().returncode == 0
    assert generate("--check").returncode == 0
    for name in ("cli.md", "config.md"):
        assert (tmp_path / name).read_text() == (ROOT / "docs" / name).read_text()


@Page
def test_every_dtt_command_parses(page: Path) -> None:
    group = typer.main.get_command(cli)
    for arguments in commands(page):
        if "--help" in arguments:
            continue
        command, rest = group, arguments
        while hasattr(command, "commands"):
            assert rest[0] in command.commands, f"dtt {shlex.join(arguments)}"
            command, rest = command.commands[rest[0]], rest[1:]
        context = command.make_context(rest[0] if rest else "", list(rest))
        config = context.params.get("config")
        if config is not None and config != OWN_CONFIG:
            find(config)  # InputError if there is none
        values = context.params.get("overrides") or context.params.get("job_or_overrides") or []
        settings = [value for value in values if "=" in value]
        resolve(None if config == OWN_CONFIG else config, settings, env={})


@Page
def test_every_config_shown_is_one(page: Path, tmp_path: Path) -> None:
    for block in blocks(page, "yaml"):
        path = tmp_path / OWN_CONFIG
        path.write_text(block)
        resolve(path, env={})


@Page
def test_every_key_named_exists(page: Path) -> None:
    known = {".".join(key) for key, _, _ in explain.all_fields()}
    named = {
        key
        for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", page.read_text())
        if key.split(".")[0] in RunConfig.model_fields and not key.endswith(NAMES_OF_FILES)
    }
    assert named <= known


@Page
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
            slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in slugs, target


@Page
def test_every_path_named_exists(page: Path) -> None:
    folders = "|".join(path.name for path in ROOT.iterdir() if path.is_dir())
    for name in re.findall(rf"`((?:{folders})/[\w./-]+)`", page.read_text()):
        if name.split("/")[0] not in ("data", "jobs", "exports"):
            assert (ROOT / name).exists(), name


def tree() -> dict[str, str]:
    """Each path of the README's tree, with what is said of it."""
    block = (ROOT / "README.md").read_text().split("## The tree")[1].split("```")[1]
    said: dict[str, str] = {}
    parents: list[str] = []
    for line in filter(None, block.splitlines()):
        name, _, clause = line.strip().partition(" ")
        depth = (len(line) - len(line.lstrip())) // 2
        parents[depth:] = [name]
        said["".join(parents)] = clause.strip()
    return said


def test_the_tree_names_every_file_and_nothing_else() -> None:
    said = tree()
    assert [name for name in said if not (ROOT / name).exists()] == []
    assert [n for n, clause in said.items() if not clause and n != "src/dtt/"] == []
    source = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "src/dtt").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    packages = {f"{name}__init__.py" for name in said if name.endswith("/")}
    assert source - packages - said.keys() == set()
    docs = {f"docs/{path.name}" for path in (ROOT / "docs").iterdir() if path.is_file()}
    assert docs - said.keys() == set()
    top = {f"{path.name}/" for path in ROOT.iterdir() if (path / "quickstart.yaml").exists()}
    assert top == {"configs/"}
