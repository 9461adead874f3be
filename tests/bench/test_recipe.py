"""Recipe files are strict, and the shipped ones describe runs that can be trained and scored."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.running import ROOT

from dtt.base.errors import ConfigError, InputError
from dtt.bench.recipe import RecipeFile, ScoreRule, find, read, shipped
from dtt.config.load import Mistakes, resolve

MINIMAL = """\
description: a test
needs: nothing
config: quickstart
runs: 2
score: {metric: eval.loss, label: loss}
"""
TOKENS = 'tokens: {repo: a/b, files: ["NAME"], tokenizer: c, folder: d}'
POINT = "references: [{name: a, value: 1, unit: s, hardware: b, date: then, source: https://a}]"


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("file", shipped(), ids=lambda file: file.name)
def test_a_shipped_recipe_describes_runs_that_can_be_scored(file: RecipeFile) -> None:
    recipe, cfg = file.recipe, resolve(file.recipe.config, file.arguments(), env={}).config
    if recipe.score.target is not None and recipe.score.metric.startswith("eval."):
        assert cfg.train.eval_every % cfg.train.log_every == 0, "the time would be inexact"
    if recipe.tokens is not None:
        assert not cfg.reads_corpus
        assert [source.path for source in cfg.token_sources] == [recipe.tokens.folder]
        files = [name for name in recipe.tokens.names() if "train" in name]
        tokens = cfg.train.steps * cfg.train.global_batch_tokens
        assert tokens <= len(files) * 10**8, "samples would repeat"
    assert recipe.score.metric.startswith("eval.") or cfg.eval.tasks


def test_the_speedrun_validates_on_its_first_10485760_tokens() -> None:
    file = find("fineweb-3.28")
    cfg = resolve(file.recipe.config, file.arguments(), env={}).config
    assert cfg.train.eval_tokens == 10_485_760
    assert cfg.train.eval_tokens % cfg.train.seq_len == 0


def test_the_page_plans_the_steps_of_the_recipe() -> None:
    """dtt plan takes the configuration of a recipe and those overrides that change the estimate."""
    recipe = find("fineweb-3.28").recipe
    [steps] = [one for one in recipe.overrides if one.startswith("train.steps=")]
    page = (ROOT / "docs/bench.md").read_text()
    for gpus in (1, 8):
        devices = f"launch.nodes=1 launch.gpus_per_node={gpus}"
        line = f"dtt plan -c {recipe.config} {steps} --gpu H100 {devices}"
        assert f"{line}\n" in page
    assert "4,400 steps" in page


def test_a_recipe_is_found_by_name_and_by_path(tmp_path: Path) -> None:
    assert find("laptop").name == "laptop"
    assert find(str(write(tmp_path, MINIMAL))).name == "mine"
    with pytest.raises(InputError, match=r"no recipe 'laptob'[\s\S]*dtt bench laptop"):
        find("laptob")
    path = tmp_path / "laptop.yaml"
    path.write_text(MINIMAL)
    with pytest.raises(ConfigError, match=r"name of a shipped recipe[\s\S]*my-laptop\.yaml"):
        find(str(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("runs: 2", "runs: 0"), r"mine\.yaml:4  runs: .*greater than 0"),
        (("runs: 2", "runs: 2\nrun: 3"), r"mine\.yaml:5  run: unknown key"),
        (("eval.loss", "eval.los"), r"mine\.yaml:5  score\.metric"),
        (("label: loss", "label: loss, margin: 0.1"), r"score\.margin: needs a target"),
        (("runs: 2", f"runs: 2\n{TOKENS.replace('NAME', '../a.bin')}"),
         r"tokens\.files: must be names of \.bin files without folders"),
        (("runs: 2", f"runs: 2\n{TOKENS.replace('NAME', 'a{2..1}.bin')}"),
         r"tokens\.files: \{2\.\.1\} must name between 1 and"),
        (("runs: 2", f"runs: 2\n{POINT}"), r"references\.0\.date"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_line(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    with pytest.raises(Mistakes, match=message):
        read(write(tmp_path, MINIMAL.replace(*change)))


def test_a_recipe_extends_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot extend"):
        read(write(tmp_path, "extends: [laptop.yaml]\n" + MINIMAL))


def test_braces_stand_for_all_numbers() -> None:
    tokens = find("fineweb-3.28").recipe.tokens
    assert tokens is not None
    names = tokens.names()
    assert names[:2] == ["fineweb_val_000000.bin", "fineweb_train_000001.bin"]
    assert names[-1] == "fineweb_train_000024.bin"
    assert len(names) == 25


def test_a_target_is_reached_in_its_direction() -> None:
    low = ScoreRule(metric="eval.loss", label="loss", target=3.28)
    high = ScoreRule(metric="task.*.centred", label="CORE", goal="max", target=0.25)
    assert [low.reached(value) for value in (3.29, 3.28)] == [False, True]
    assert [high.reached(value) for value in (0.24, 0.25)] == [False, True]
    assert not ScoreRule(metric="eval.loss", label="loss").reached(0.0)
