"""The pages tell the truth: commands, keys, paths and links are those of the code."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from support.running import ROOT

from dtt.artifacts.corpus import CorpusManifest
from dtt.artifacts.manifest import Manifest
from dtt.artifacts.manifests import (
    CheckpointManifest,
    DataManifest,
    ExportManifest,
    TokensManifest,
)
from dtt.config import explain
from dtt.config.base import field_docs
from dtt.config.load import resolve, stage_names
from dtt.config.run import RunConfig
from dtt.config.sweep import KINDS, SweepConfig
from dtt.evaluate.tasks.definition import load_tasks
from dtt.jobs import sweep_trials as trials
from dtt.main import commands

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MISTAKES = ROOT / "docs/errors.md"  # its commands are wrong on purpose
TEXT = {page: page.read_text(encoding="utf-8") for page in PAGES if page != MISTAKES}
README = TEXT[PAGES[0]]
OPENING = """\
```
./env.sh dtt pipeline -c configs/quickstart.yaml     # install, then raw text → tokens → model → verified HF export
./env.sh pytest                                      # install, then pass the tests
```
"""  # noqa: E501  as a reader sees them
OWN_CONFIG = "run.yaml"
"""The config that a reader writes; the README shows one."""


def blocks(language: str) -> list[str]:
    """The fenced blocks in a language, of all pages."""
    fence = re.compile(rf"^```{language}\n(.*?)^```$", re.M | re.S)
    return [block for text in TEXT.values() for block in fence.findall(text)]


def test_the_readme_opens_with_the_two_commands() -> None:
    before, opening, _ = README.partition(OPENING)
    assert opening
    title, sentence = before.strip().split("\n\n")
    assert title == "# dtt"
    assert sentence.count(".") == 1
    assert (ROOT / "configs/quickstart.yaml").is_file()


def test_no_cell_of_a_table_is_longer_than_200_characters() -> None:
    for page, text in TEXT.items():
        rows = [line for line in text.splitlines() if line.startswith("|")]
        cells = [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)]
        assert [cell for cell in cells if len(cell) > 200] == [], page.name


def generate(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_generated_pages_are_up_to_date() -> None:
    check = generate(ROOT / "docs/generate.py", "--check")
    assert check.returncode == 0, check.stderr


def test_stale_pages_are_named_and_rewritten(tmp_path: Path) -> None:
    script = tmp_path / "generate.py"
    script.write_text((ROOT / "docs/generate.py").read_text())
    (tmp_path / "cli.md").write_text("of long ago")
    pages = ("cli.md", "config.md")
    stale = generate(script, "--check", *pages)
    assert stale.returncode == 1
    assert "docs/cli.md is not" in stale.stderr
    assert "docs/config.md is not" in stale.stderr
    assert (tmp_path / "cli.md").read_text() == "of long ago"
    assert generate(script, *pages).returncode == 0
    for name in pages:
        assert (tmp_path / name).read_text() == (ROOT / "docs" / name).read_text()


def find_command(words: list[str]) -> tuple[Any, list[str]]:
    """The command that `dtt WORDS` runs, and what is left for it."""
    command: Any = typer.main.get_command(commands())
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        assert words[0] in command.commands, f"there is no dtt {' '.join(words)}"
        command, words = command.commands[words[0]], words[1:]
    return command, words


def test_every_command_named_in_a_sentence_exists() -> None:
    named = {name for text in TEXT.values() for name in re.findall(r"`dtt ([^`]+)`", text)}
    assert len(named) > 5
    for name in named:
        find_command(shlex.split(name))


def test_every_config_shown_is_valid(tmp_path: Path) -> None:
    shown = [text for text in blocks("yaml") if "parameters:" not in text]
    shown = [text for text in shown if not text.startswith("type:")]
    assert shown
    for text in blocks("python"):
        if found := re.match(r"# (\w+\.py)\n", text):
            (tmp_path / found[1]).write_text(text)
    for text in shown:
        (tmp_path / OWN_CONFIG).write_text(text)
        for stage in stage_names(tmp_path / OWN_CONFIG) or (None,):
            resolve(tmp_path / OWN_CONFIG, env={}, stage=stage)


def test_every_task_shown_is_valid(tmp_path: Path) -> None:
    shown = [text for text in blocks("yaml") if text.startswith("type:")]
    assert shown
    for number, text in enumerate(shown):
        (tmp_path / f"task{number}.yaml").write_text(text)
        load_tasks([str(tmp_path / f"task{number}.yaml")])


def test_every_sweep_shown_makes_trials_and_every_key_of_one_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = [("lr.yaml", text) for text in blocks("yaml") if "parameters:" in text]
    shown += [("lr.py", text) for text in blocks("python") if "def sweep" in text]
    assert len(shown) > 2
    for name, text in shown:
        Path(name).write_text(text)
        plan = trials.plan(Path(name))
        assert len(plan.trials) > 1
        assert not [one.why for one in plan.dropped if not one.why.startswith("excluded")]
    page = TEXT[ROOT / "docs/sweep.md"]
    assert SweepConfig.model_fields.keys() <= field_docs(SweepConfig).keys()  # in docs/files.md
    for kind in KINDS[1:]:
        assert f"| `{{{kind}:" in page


@pytest.mark.parametrize(
    "manifest", [CorpusManifest, TokensManifest, CheckpointManifest, DataManifest, ExportManifest]
)
def test_every_field_of_a_manifest_has_its_line(manifest: type[Manifest]) -> None:
    """docs/files.md shows them."""
    assert {*manifest.model_fields} - {"format"} - field_docs(manifest).keys() == set()


def test_every_key_named_exists() -> None:
    known = {".".join(key) for key, _, _ in explain.all_fields(entries=True)}
    dotted = re.compile(r"`([a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*)?`")
    files = (".json", ".jsonl", ".safetensors", ".py", ".yaml")
    named = {
        key
        for text in TEXT.values()
        for key in dotted.findall(text)
        if key.split(".")[0] in RunConfig.model_fields and not key.endswith(files)
    }
    assert len(named) > 5
    fields = {"eval.loss", "eval.bits_per_byte", "tokenizer.model"}  # of records; a file
    assert named - fields - known == set()


@pytest.mark.parametrize("page", TEXT, ids=lambda path: path.name)
def test_every_link_and_path_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXT[page]):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        titles = re.findall(r"^#+ (.*)$", path.read_text(), re.M) if anchor else []
        slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
        assert not anchor or anchor in slugs, target
    for name in re.findall(r"`([\w.-]+/[\w./-]+\.(?:py|md|yaml|sh))`", TEXT[page]):
        assert (ROOT / name).exists() or (ROOT / "src/dtt" / name).exists(), name


def test_the_pages_build_into_a_site_without_broken_links(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "tutorial-laptop" in (tmp_path / "index.html").read_text()
