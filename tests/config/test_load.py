"""Layers, origins, and every mistake told at once."""

from __future__ import annotations

import os
from itertools import permutations
from pathlib import Path

import pytest

from dtt.base.errors import ConfigError, InputError
from dtt.config import explain
from dtt.config.key_types import Key
from dtt.config.layers import LARGEST_NODE, Leaf, read_file
from dtt.config.load import changes_on_resume, resolve, stage_names
from dtt.config.merging import merge
from dtt.config.shipped import shipped_configs
from dtt.optim.adamw import AdamWConfig, AdamWSettings
from dtt.optim.muon.variant import MuonConfig

SHIPPED = sorted(
    p for p in shipped_configs().rglob("*.yaml") if p.parent.name not in ("sweeps", "tasks")
)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: str(p.relative_to(shipped_configs())))
def test_every_shipped_config_loads(path: Path) -> None:
    for stage in stage_names(path) or [None]:
        # What the recipes with an adapter share has no weights to adapt.
        more = ["init.from=jobs/base"] if path.stem == "lora" else []
        assert resolve(path, more, env={}, stage=stage).config


def test_layers_go_from_defaults_to_options(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("seed: 1\nname: base\ntrain: {steps: 10, seq_len: 64}\n")
    (tmp_path / "over.yaml").write_text("train: {steps: 20}\n")
    run = tmp_path / "run.yaml"
    run.write_text("extends: [base.yaml, over.yaml]\nname: run\nmodel:\n  dim: 64\n")
    resolved = resolve(
        run,
        ["checkpoint.every=7", "seed=3"],
        {"seed": 4},
        env={"DTT_TRAIN__LOG_EVERY": "5", "DTT_SEED": "2", "DTT_DEBUG": "1"},
    )
    cfg = resolved.config
    assert (cfg.name, cfg.model.dim, cfg.train.steps, cfg.train.seq_len) == ("run", 64, 20, 64)
    assert (cfg.train.log_every, cfg.checkpoint.every, cfg.seed) == (5, 7, 4)
    assert resolved.origin("model.dim") == f"{run}:4"
    assert resolved.origin("train.steps") == f"{tmp_path / 'over.yaml'}:1"
    assert resolved.origin("train.log_every") == "environment DTT_TRAIN__LOG_EVERY"
    assert resolved.origin("checkpoint.every") == "argument"
    assert resolved.origin("seed") == "option"
    assert resolved.origin("train.clip_norm") == "default"


def test_explicit_zero_false_and_null_win() -> None:
    cfg = resolve(
        None, ["train.eval_every=0", "train.compile=false", "train.clip_norm=null"], env={}
    ).config
    assert cfg.train.eval_every == 0
    assert cfg.train.compile is False
    assert cfg.train.clip_norm is None


@pytest.mark.parametrize(
    ("text", "value"), [("3e-4", 3e-4), ("1E-3", 1e-3), ("1.5e2", 150.0), (".5", 0.5), ("1", 1.0)]
)
def test_numbers_are_numbers(text: str, value: float) -> None:
    assert resolve(None, [f"optim.lr={text}"], env={}).config.optim.lr == value


@pytest.mark.parametrize("text", [".inf", "-.inf", ".nan"])
def test_infinity_is_not_a_number(text: str) -> None:
    with pytest.raises(ConfigError, match="finite number"):
        resolve(None, [f"optim.weight_decay={text}"], env={})


def test_a_plus_behind_a_key_is_an_unknown_key(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("launch:\n  setup+: [b]\n")
    for config, arguments in ((tmp_path / "a.yaml", []), (None, ["launch.setup+=[b]"])):
        with pytest.raises(ConfigError, match=r"launch\.setup\+: .*did you mean launch\.setup\?"):
            resolve(config, arguments, env={})


def test_json_is_read_as_yaml_is_and_toml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"train": {"steps": 3}, "optim": {"type": "adamw"}}')
    (tmp_path / "a.yaml").write_text("train: {steps: 3}\noptim: {type: adamw}\n")
    configs = [resolve(tmp_path / f"a.{kind}", env={}).config for kind in ("json", "yaml")]
    assert configs[0] == configs[1]
    assert isinstance(configs[0].optim, AdamWConfig)
    (tmp_path / "a.toml").write_text("seed = 3\n")  # also valid YAML
    with pytest.raises(ConfigError, match="write it as YAML or JSON"):
        resolve(tmp_path / "a.toml", env={})


def test_a_section_in_flow_style_sets_its_keys(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("optim: {type: adamw, eps: 1e-6}\n")
    for arguments in (["optim={lr: 0.2}"], ["optim={type: adamw, lr: 0.1}", "optim.lr=0.2"]):
        assert resolve(run, arguments, env={}).config.optim == AdamWConfig(lr=0.2, eps=1e-6)
    inline = resolve(run, ["optim.lr=0.1"], env={"DTT_OPTIM": "{lr: 0.2}"}).config.optim
    assert inline == AdamWConfig(lr=0.1, eps=1e-6)


def test_a_new_type_keeps_the_keys_that_it_has_and_names_the_others(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("optim: {type: muon, momentum: 0.9, lr: 0.1, adamw: {lr: 0.2}}\n")
    resolved = resolve(run, ["optim.type=adamw"], env={})
    assert resolved.config.optim == AdamWConfig(lr=0.1)
    assert {*resolved.dropped} == {("optim", "momentum"), ("optim", "adamw", "lr")}
    shown = explain.show(resolved)
    assert f"  # optim.momentum = 0.9 ({run}:1) is not used: optim.type=adamw has no such" in shown
    again = tmp_path / "again.yaml"
    again.write_text(shown)
    assert resolve(again, env={}).config == resolved.config
    wanted = MuonConfig(momentum=0.9, lr=0.1, adamw=AdamWSettings(lr=0.2))
    assert resolve(run, ["optim.type=muon"], env={}).config.optim == wanted
    # Back again, in a higher layer: nothing was lost on the way.
    there = resolve(run, ["optim.type=muon"], env={"DTT_OPTIM__TYPE": "adamw"})
    assert (there.config.optim, there.dropped) == (wanted, {})


@pytest.mark.parametrize("section", sorted(explain.key_types().variants))
def test_every_tagged_section_keeps_the_keys_that_both_types_have(section: Key) -> None:
    """Any value stands for the key, since merging comes before validation."""
    fields = explain.key_types().variants[section]
    for old, new in permutations(fields, 2):
        keys = {(*section, name): Leaf(7, "file:1") for name in fields[old] - {"type"}}
        kind = (*section, "type")
        merged, dropped = merge(
            [{kind: Leaf(old, "default")}, keys, {kind: Leaf(new, "argument")}], {section: fields}
        )
        both = {(*section, name) for name in fields[old] & fields[new]}
        assert ({*merged}, {*dropped}) == (both | {kind}, {*keys} - both)


def test_a_mistyped_key_of_the_old_type_is_still_reported(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("schedule: {type: cosine, warmpu: 5}\n")
    with pytest.raises(ConfigError, match=r"schedule\.warmpu: unknown key"):
        resolve(run, ["schedule.type=wsd"], env={})


def test_a_section_with_every_line_commented_out_sets_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("train:\n#  steps: 3\n")
    assert resolve(run, env={}).config == resolve(None, env={}).config


def test_all_mistakes_are_reported_at_once_with_location_and_nearest_key(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(
        "modle: {dim: 3}\ntrain:\n  stesp: 5\n  seq_len: long\n"
        "optim: {type: adamw, momentum: 0.9}\n"
    )
    with pytest.raises(ConfigError) as caught:
        resolve(run, ["schedule.decay=1.5"], env={})
    message = str(caught.value)
    assert message.startswith("5 mistakes in the configuration")
    assert f"{run}:1  modle: unknown key; did you mean model?" in message
    assert f"{run}:3  train.stesp: unknown key; did you mean train.steps?" in message
    assert f"{run}:4  train.seq_len: input should be a valid integer" in message
    assert f"{run}:5  optim.momentum: is for optim.type=muon, not adamw" in message
    assert (
        "argument  schedule.decay: must be steps (500), a share of the run (0.2, 20%) or" in message
    )


def test_combinations_that_cannot_work_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(None, ["model.n_heads=3", "train.global_batch_tokens=1000"], env={})
    message = str(caught.value)
    assert "model.n_heads: n_heads (3) does not divide dim (256)" in message
    assert "train.global_batch_tokens: 1000 is not a multiple of train.seq_len = 1024" in message


def test_a_tokenizer_that_transformers_would_change_is_refused_before_training() -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.pre_tokenizer: qwen2 needs qwen2"):
        resolve(None, ["model.family=qwen2"], env={})
    library = ["model.family=transformers", "model.config.model_type=qwen3_5_moe_text"]
    with pytest.raises(ConfigError, match=r"qwen3_5_moe_text needs qwen3\.5"):
        resolve(None, [*library, "tokenizer.pre_tokenizer=qwen2"], env={})
    resolve(None, [*library, "tokenizer.pre_tokenizer=qwen3.5"], env={})
    resolve(None, ["model.family=qwen2", "tokenizer.pre_tokenizer=qwen2"], env={})
    resolve(None, ["model.family=qwen2", "data.tokens=other"], env={})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: [1", "is not YAML"),
        ("- 1\n", "does not contain `key: value` lines"),
        ("seed: 1\nseed: 2\n", "seed appears twice"),
        ("extends: run.yaml\n", "extends itself"),
    ],
)
def test_a_file_that_is_not_a_configuration_is_reported_with_its_line(
    tmp_path: Path, text: str, why: str
) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(text)
    with pytest.raises(ConfigError, match=why):
        resolve(run, env={})


@pytest.mark.parametrize("text", ["a.b: 1\na:\n", "a:\na.b: 1\n"])
def test_an_empty_section_sets_nothing_wherever_it_stands(tmp_path: Path, text: str) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(text)
    layer = read_file(run, explain.key_types())
    assert {key: leaf.value for key, leaf in layer.items()} == {("a", "b"): 1}


def test_an_unknown_config_name_names_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean quickstart"):
        resolve("quikstart", env={})


@pytest.mark.parametrize("name", ["DTT_TRAIN_STEPS", "DTT_FOO", "DTT_TRIAN__STEPS"])
def test_a_mistyped_environment_variable_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        resolve(None, env={name: "5"})


def test_a_shipped_dataset_sets_its_keys_below_explicit_values() -> None:
    cfg = resolve(None, ["download.dataset=fineweb-edu", "download.split=test"], env={}).config
    assert cfg.download.dataset == "HuggingFaceFW/fineweb-edu"
    assert cfg.download.split == "test"


def test_a_file_beside_a_folder_is_not_what_the_path_of_the_folder_names(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts.yaml").write_text("seed: 4242\n")
    folder = tmp_path / "texts"
    for name in (folder, os.path.relpath(folder, shipped_configs() / "datasets")):
        one = resolve(None, [], {"download.dataset": str(name)}, env={}).config
        several = [f"download.datasets=[{{dataset: {name}, out: x}}]"]
        assert (one.seed, one.download.dataset) == (0, str(name))
        assert resolve(None, several, env={}).config.download.datasets[0].dataset == str(name)
    with pytest.raises(ConfigError, match="is a folder, not a config"):
        resolve(folder, env={})


def test_a_job_config_is_the_base_of_a_resume(tmp_path: Path) -> None:
    job = tmp_path / "config.yaml"
    job.write_text("train: {steps: 77}\noptim: {type: adamw, lr: 0.5}\n")
    run = tmp_path / "run.yaml"
    run.write_text("optim: {type: adamw, lr: 0.25}\n")
    cfg = resolve(run, job_config=job, env={}).config
    assert cfg.train.steps == 77
    assert cfg.optim.lr == 0.25


def test_only_keys_that_decide_what_is_trained_count_as_changes() -> None:
    old = resolve(None, env={}).config
    harmless = ["train.log_every=1", "checkpoint.keep_last=9", "launch.container.type=apptainer"]
    free = resolve(None, [*harmless, "launch.container.image=a.sif"], env={}).config
    other = resolve(None, ["optim.lr=1", "train.steps=5", "schedule.type=constant"], env={}).config
    assert changes_on_resume(old, free) == []
    assert {"optim.lr", "train.steps", "schedule.type"} <= set(changes_on_resume(old, other))


# ---- aliases of YAML may repeat values, but not multiply them without bound ---------------------

ROWS = [f"  x{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 11)]
BOMB = "\n".join(["launch.environment:", "  x0: &a0 [1, 1, 1]", *ROWS])


def test_aliases_that_multiply_are_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(BOMB)
    with pytest.raises(ConfigError, match=f"{LARGEST_NODE:,} values") as error:
        read_file(path, explain.key_types())
    assert "run.yaml:" in str(error.value)


def test_aliases_repeat_values(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("a: &n 32\nb: *n\nc: &l [1, 2]\nd: [*l, *l]\n")
    layer = read_file(path, explain.key_types())
    values = {key: leaf.value for key, leaf in layer.items()}
    assert values == {("a",): 32, ("b",): 32, ("c",): [1, 2], ("d",): [[1, 2], [1, 2]]}
