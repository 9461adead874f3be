"""Text is taken as it is written, from every source, and survives the job's config.yaml."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dtt.base.errors import ConfigError
from dtt.config import explain
from dtt.config.layers import NULLS, from_arguments, from_environment
from dtt.config.load import resolve
from dtt.config.run import RunConfig

TYPES = explain.key_types()
HOSTILE = (
    *("issue #12 is closed", "# all", "a #", "007", "-0", "1e3", "1_000", "0x1F", "12:00:00"),
    *("2026-11-22", "2026-11-22 07:00:00", "1:30.5", ".inf", ".nan", "1." + "0" * 400),
    *("null", "~", "yes", "off", "True", "n", "=", "<<", "{a}", "{a: 1}", "[1, 2]", "[", "- x"),
    *("a: b", "a:", ": ", '"quoted"', "'007'", '"', "it's", "!!int 5", "!x", "&a", "*a", "%d"),
    *("@x", "`x`", "|", ">-", "?", "---", "...", " ", "  both  ", "Zürich", "日本", "\U0001f600"),
    *("\\n", "two\nlines", "a\tb", "9" * 30, "9" * 5000, "$HOME", "k=v", ","),
)
FREE = (
    "train.sample_prompt",
    "download.dataset",
    "download.revision",
    "chat.template",
    "eval.data",
)
"""Keys of any text."""


def test_every_key_of_text_is_known() -> None:
    """A new type that holds text has to be recognised; a number must not."""
    assert {("name",), ("train", "sample_prompt"), ("download", "out"), ("launch", "time")} <= {
        *TYPES.texts
    }
    assert {("tokenizer", "special_tokens", "*"), ("launch", "environment", "*")} <= {*TYPES.texts}
    assert not {("seed",), ("schedule", "warmup"), ("train", "compile"), ("chat", "kwargs")} & {
        *TYPES.texts
    }


@pytest.mark.parametrize("text", HOSTILE)
def test_text_is_taken_as_typed_for_every_key(text: str) -> None:
    for key, types in TYPES.texts.items():
        if key[-1] == "*" or (key[0] != "launch" and int in types):
            continue
        dotted = ".".join(key)
        wanted = None if text in NULLS and type(None) in types else text
        assert from_arguments([f"{dotted}={text}"], TYPES)[key].value == wanted
        variable = "DTT_" + "__".join(key).upper()
        if "\0" not in text and len(key) > 1:
            env = from_environment({variable: text}, RunConfig.model_fields, TYPES)
            assert env[key].value == wanted
        in_stage = from_arguments([f"stages.sft.{dotted}={text}"], TYPES)
        assert in_stage[("stages", "sft", *key)].value == wanted


@pytest.mark.parametrize("text", HOSTILE)
def test_text_survives_the_configuration_file_of_a_job(tmp_path: Path, text: str) -> None:
    arguments = [f"{key}={text}" for key in FREE]
    listed = json.dumps([text])
    arguments += [f"tokenizer.special_tokens={listed}", "track=[{type: wandb}]"]
    if "\n" not in text and "\t" not in text:
        arguments += [f"launch.environment.VALUE={text}", f"launch.setup={listed}"]
    first = resolve(None, arguments, env={})
    assert first.config.train.sample_prompt == text
    assert first.config.tokenizer.all_special_tokens[0] == text
    file = tmp_path / "config.yaml"
    file.write_text(explain.show(first))
    assert resolve(file, env={}).config == first.config


@pytest.mark.parametrize(
    "text", ["007", "1e3", "1_000", "yes", "null", "~", "=", "2026-11-22", "12:00:00", "-x", "a#b"]
)
def test_an_unquoted_value_of_a_file_is_text_where_text_is_meant(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"name: run\ntrain: {{sample_prompt: {text}}}\ntrain.device: cpu\n"
        f"tokenizer:\n  special_tokens: [{text}, b]\nlaunch.environment: {{FLAG: {text}}}\n"
        f"stages:\n- name: one\n  track: [{{type: wandb, project: {text}}}]\n"
        f"stages.one.launch.account: {'1' if text in NULLS or text in '=-x' else '007'}\n"
    )
    config = resolve(file, env={}, stage="one").config
    assert config.train.sample_prompt == text
    assert config.tokenizer.all_special_tokens == (text, "b")
    assert config.launch.environment == {"FLAG": text}
    assert config.track[0].project == text  # type: ignore[union-attr]


def test_a_number_stays_a_number_beside_text_that_looks_like_one(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("seed: &n 7\nname: *n\nlaunch: {time: 60, mem: 8G, environment: {A: 1}}\n")
    config = resolve(file, ["train.steps=1_000", "optim.lr=1e-3"], env={}).config
    assert (config.seed, config.name, config.train.steps, config.optim.lr) == (7, "7", 1000, 1e-3)
    assert config.launch.time == 60
    assert config.launch.environment == {"A": 1}


def test_null_unsets_text_that_may_be_null_and_is_text_elsewhere() -> None:
    config = resolve(None, ["download.name=null", "name=null"], env={}).config
    assert config.download.name is None
    assert config.name == "null"


@pytest.mark.parametrize(
    "text", ["5 # five", "# 5", "{type: wsd} # x", "0x_", "!!int a", "9" * 5000]
)
def test_other_values_are_not_cut_at_a_comment(text: str) -> None:
    for key in ("train.steps", "schedule", "track", "train.compile"):
        with pytest.raises(ConfigError, match=key):
            resolve(None, [f"{key}={text}"], env={})


@pytest.mark.parametrize(
    ("text", "key", "lines"),
    [
        ("train:\n  steps: 7\ntrain.steps: 8\n", "train.steps", (3, 2)),
        ("train.steps: 7\ntrain: {seq_len: 8, steps: 8}\n", "train.steps", (2, 1)),
        ("train: {steps: 7}\ntrain: {steps: 8}\n", "train", (2, 1)),
        ("seed: 1\nname: a\nseed: 1\n", "seed", (3, 1)),
        ("train.batch_schedule: {type: list}\ntrain: {batch_schedule.type: list}\n",
         "train.batch_schedule.type", (2, 1)),
        ("name: a\nname.b: c\n", "name", (2, 1)),
        ("name.b: c\nname: a\n", "name", (2, 1)),
        ("stages:\n- name: a\n  train: {steps: 7}\nstages.a.train.steps: 8\n",
         "stages.a.train.steps", (4, 3)),
        ("stages:\n- name: a\n  seed: 1\n  seed: 2\n", "seed", (4, 3)),
        ("stages.a.seed: 1\nstages: [{name: a}]\nstages.a: {seed: 2}\n", "stages.a.seed", (3, 1)),
        ("data.sources:\n- path: x\n  path: y\n", "data.sources.path", (3, 2)),
        ("launch.environment: {A: 1}\nlaunch.environment.A: 2\n", "launch.environment.A", (2, 1)),
        ('{"seed": 1,\n "seed": 2}\n', "seed", (2, 1)),
    ],
)  # fmt: skip
def test_a_key_given_twice_in_a_file_is_refused_with_both_lines(
    tmp_path: Path, text: str, key: str, lines: tuple[int, int]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        resolve(file, env={})
    assert f"{key} appears twice" in str(error.value)
    assert f"where: {file}:{lines[0]}\n" in str(error.value)
    assert f"set at {file}:{lines[1]}" in str(error.value).splitlines()[2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: !reset {dim: 64}\n", "the tag !reset"),
        ("track: !append [{type: wandb}]\n", "the tag !append"),
        ("data.sources: [{path: x}, !x {path: y}]\n", "the tag !x"),
        ("name: !x a\n", "the tag !x"),
        ("data.sources: [&x {path: x}, {<<: *x, weight: 2}]\n", "merge keys"),
        ("? [a, b]\n: 1\n", "a list or a mapping cannot be a key"),
    ],
)
def test_yaml_that_means_more_than_values_is_refused_with_its_line(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"{file}:1") as error:
        resolve(file, env={})
    assert message in str(error.value)


def test_sections_of_a_file_may_be_split_and_empty(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "train: {steps: 7}\ntrain.seq_len: 64\nmodel:\nmodel.dim: 64\ntrain.log_every: 3\n"
        "stages:\n- name: a\nstages.a.seed: 4\n"
    )
    config = resolve(file, env={}, stage="a").config
    assert (config.train.steps, config.train.seq_len, config.model.dim, config.seed) == (
        7,
        64,
        64,
        4,
    )


def test_of_several_arguments_for_a_key_the_last_counts() -> None:
    assert resolve(None, ["seed=1", "seed=2"], env={}).config.seed == 2


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("optim.groups=[{match: '*', split: abc}]",
         "split: input should be a valid integer or must be a list, such as [a, b] (got 'abc')"),
        ("optim.betas=[1]", "optim.betas: is for optim.type=adamw, not muon"),
        ("optim.adamw.betas=[0.9]", "betas.1: is missing: the list is too short (got [0.9])"),
        ("data.tokens.sources=5", "data.tokens"),
        ("data.sources=5", "argument  data.sources: must be a list, such as [a, b] (got 5)"),
        ("optim=5", "optim: is a section: set its keys"),
        ("train.steps=null", "train.steps: input should be a valid integer (got null)"),
        ("train.steps=[true]", "(got [true])"),
        ("name=my job", "name: must be letters, digits and . _ -"),
    ],
)  # fmt: skip
def test_the_message_is_about_the_value_that_the_user_meant(argument: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(None, [argument], env={})
    text = str(error.value)
    assert message in text
    assert text.startswith("1 mistake in the configuration\n")


def test_a_configuration_with_stages_and_an_odd_name_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    for name in ("[a]", "{a: 1}", ""):
        file.write_text(f"name: {name}\nstages: [{{name: a}}]\n")
        with pytest.raises(ConfigError, match="name"):
            resolve(file, env={}, stage="a")


def test_the_values_of_a_sweep_are_text_where_text_is_meant(tmp_path: Path) -> None:
    from dtt.config import sweep

    file = tmp_path / "words.yaml"
    file.write_text(
        "base: {train: {sample_prompt: 007}}\noverrides: [download.split=1e3]\n"
        "parameters: {download.name: [007, on, a], download.revision: {values: [1e3, 2, b]}}\n"
        "mode: zip\n"
    )
    found = sweep.read(file)
    configs = [
        found.resolve(v, f"words/{i}").config for i, v in enumerate(sweep.combinations(found.sweep))
    ]
    assert [c.download.name for c in configs] == ["007", "on", "a"]
    assert [c.download.revision for c in configs] == ["1e3", "2", "b"]
    assert {(c.train.sample_prompt, c.download.split) for c in configs} == {("007", "1e3")}
