"""A configuration with stages of training: overlays, origins, and every mistake with its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dtt.base.errors import ConfigError
from dtt.config.explain import show_stages
from dtt.config.load import Mistakes, resolve, stage_names
from dtt.config.merging import Resolved

TINY = """\
name: tiny
seed: 3
model: {dim: 32, n_heads: 2}
download: {dataset: books.jsonl}
train:
  steps: 20
stages:
  - name: pretrain
    optim: {lr: 1e-3}
  - name: midtrain
    download: {dataset: code.jsonl}
    optim: {lr: 5e-4}
    train: {steps: 10}
  - name: last
    optim: {lr: 1e-4}
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


def stages(config: Path, *arguments: str, **env: str) -> dict[str, Resolved]:
    names = stage_names(config, arguments)
    return {name: resolve(config, arguments, env=env, stage=name) for name in names}


def test_a_stage_is_the_common_part_with_its_entry_on_top(tiny: Path) -> None:
    found = stages(tiny)
    assert list(found) == ["pretrain", "midtrain", "last"]
    assert [r.config.name for r in found.values()] == [
        "tiny/pretrain", "tiny/midtrain", "tiny/last",
    ]  # fmt: skip
    assert [r.config.train.steps for r in found.values()] == [20, 10, 20]
    assert [r.config.optim.lr for r in found.values()] == [1e-3, 5e-4, 1e-4]
    assert {r.config.seed for r in found.values()} == {3}
    assert found["midtrain"].origin("optim.lr") == f"{tiny}:12"
    assert found["midtrain"].origin("model.dim") == f"{tiny}:3"


def test_a_stage_starts_from_the_job_before_it(tiny: Path) -> None:
    sources = [r.config.init.source for r in stages(tiny, "init.from=jobs/base").values()]
    assert sources == ["jobs/base", "jobs/tiny/pretrain", "jobs/tiny/midtrain"]


def test_later_stages_use_the_tokenizer_that_the_first_one_trains(tiny: Path) -> None:
    tokenizers = [r.config.tokenizer for r in stages(tiny).values()]
    assert [tokenizer.type for tokenizer in tokenizers] == ["bpe", "file", "bpe"]
    assert tokenizers[1].path == "data/tokens/books-bpe4096/tokenizer.json"  # type: ignore[union-attr]
    assert stages(tiny)["last"].config.tokenize_dir == Path("data/tokens/books-bpe4096")
    own = stages(tiny, "stages.midtrain.tokenizer.vocab_size=300")["midtrain"].config.tokenizer
    assert (own.type, own.vocab_size) == ("bpe", 300)  # type: ignore[union-attr]


def test_later_stages_have_the_model_of_the_first_one(tiny: Path) -> None:
    found = stages(tiny, "stages.pretrain.model.n_layers=3", "stages.last.model.dropout=0.1")
    assert [r.config.model.n_layers for r in found.values()] == [3, 3, 3]
    assert [r.config.model.dropout for r in found.values()] == [0.0, 0.0, 0.1]


def test_an_argument_changes_the_common_part_and_one_with_a_stage_that_stage(tiny: Path) -> None:
    found = stages(
        tiny, "train.steps=5", "stages.last.train.steps=7",
        DTT_STAGES__LAST__OPTIM__LR="0.5", DTT_SEED="8",
    )  # fmt: skip
    assert [r.config.train.steps for r in found.values()] == [5, 10, 7]
    assert [r.config.optim.lr for r in found.values()] == [1e-3, 5e-4, 0.5]
    assert {r.config.seed for r in found.values()} == {8}


def test_a_plain_configuration_ignores_the_environment_of_stages() -> None:
    env = {"DTT_STAGES__LAST__TRAIN__STEPS": "3", "DTT_SEED": "8"}
    assert resolve(None, env=env).config.seed == 8
    with pytest.raises(ConfigError, match=r"stages\.last\.train\.steps: no such stage"):
        resolve(None, ["stages.last.train.steps=3"], env={})


def test_a_file_may_change_one_stage_of_the_file_it_extends(tiny: Path) -> None:
    other = tiny.with_name("other.yaml")
    other.write_text("extends: tiny.yaml\nname: other\nstages.last.train: {steps: 3}\n")
    found = stages(other)
    assert [r.config.train.steps for r in found.values()] == [20, 10, 3]
    assert found["last"].origin("train.steps") == f"{other}:3"
    other.write_text("extends: tiny.yaml\nstages: [{name: only, seed: 1}]\n")
    assert list(stages(other)) == ["only"]


def test_the_shown_stages_are_a_configuration_of_the_same_stages(tiny: Path) -> None:
    found = stages(tiny)
    shown = tiny.with_name("shown.yaml")
    shown.write_text(show_stages([*found.values()]))
    assert {n: r.config for n, r in stages(shown).items()} == {
        name: resolved.config for name, resolved in found.items()
    }


def test_without_a_stage_the_configuration_of_several_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"stages: pretrain, midtrain, last(.|\n)*--stage"):
        resolve(tiny, env={})
    with pytest.raises(ConfigError, match=r"no stage 'midtran'(.|\n)*did you mean midtrain"):
        resolve(tiny, env={}, stage="midtran")
    with pytest.raises(ConfigError, match="defines no stages"):
        resolve(None, env={}, stage="midtrain")


MISTAKES = {
    "stages: []": "a list with at least one stage",
    "stages: 3": "a list with at least one stage",
    "stages: {a: {seed: 1}}": r"stages.a.seed: no such stage",
    "stages: [pretrain]": "a section with a name(.|\n)*'pretrain'",
    "stages: [{seed: 1}]": "a stage needs a name(.|\n)*it has none",
    "stages: [{name: [3]}]": r'a stage needs a name(.|\n)*got \["3"\]',
    "stages: [{name: a/b}]": "a stage needs a name",
    "stages: [{name: a}, {name: a}]": "no stage can be named a(.|\n)*two stages have it",
    "stages: [{name: logs}]": "no stage can be named logs",
    "stages: [{name: a, stages: [{name: b}]}]": "stages cannot be part of a stage",
    "stages: [{name: a, extends: [x]}]": "extends cannot be part of a stage",
    "stages: [{name: a, train: {stpes: 3}}]": r"stage a(.|\n)*train.stpes: unknown key; did you",
    "stages: [{name: a, train: {steps: x}}]": r"stage a(.|\n)*train.steps: .*integer",
    "stages: [{name: a}, {name: b, init: {from: jobs/x}}]": "init.from of stage b cannot be",
    "stages: [{name: a}, {name: b, model: {dim: 64}}]": r"stage b(.|\n)*model.dim: 64 here",
    "stages: [{name: a, init: {optimizer: carry}}]": r"init.optimizer: requires a dtt checkpoint",
    "stages: [{name: a, init: {average: true}}]": r"init.average: requires a dtt checkpoint",
    "stages: [{name: a, seed: 1}]\nstages.b.seed: 3": "no stage 'b'",
    "stages: [{name: a, seed: 1}]\nstages.a: 3": "stages.a does not name a key of a stage",
}


@pytest.mark.parametrize("text", MISTAKES, ids=lambda text: text.replace("\n", " "))
def test_a_mistake_is_reported_with_its_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"name: run\n\n{text}\n")
    with pytest.raises(ConfigError, match=MISTAKES[text]) as error:
        stages(path)
    lines = {int(n) for n in re.findall(r"run\.yaml:(\d+)", str(error.value))}
    assert lines & {3, 4}


def test_two_stages_cannot_write_other_text_into_one_folder(tiny: Path) -> None:
    with pytest.raises(
        Mistakes,
        match=r"tokenize.out: .* contains the tokens of other text "
        r"in stage",
    ):
        stages(tiny, "tokenize.out=tokens")


def test_a_name_with_a_slash_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be named 'sweep/one'"):
        stages(tiny, "name=sweep/one")
