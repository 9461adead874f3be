"""A sweep file says which values; every way to say it comes to the numbers one expects."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtt.base.errors import ConfigError, InputError
from dtt.config import sweep
from dtt.config.shipped import shipped_configs
from dtt.config.sweep import SweepConfig, combinations
from dtt.config.validation import validate

SHIPPED = sorted((shipped_configs() / "sweeps").glob("*.yaml"))


def checked(**said: Any) -> SweepConfig:
    config, problems = validate(SweepConfig, {"name": "s"} | said)
    assert config is not None, problems
    return config


def values(said: Any, **more: Any) -> list[Any]:
    """What one key takes."""
    config = checked(parameters={"optim.lr": said}, **more)
    return [combination["optim.lr"] for combination in combinations(config)]


def test_listed_values_keep_their_types() -> None:
    listed = [3, "a-b c", None, [1, 2], 1.0]
    got = values({"values": listed})
    assert got == listed
    assert list(map(type, got)) == list(map(type, listed))


@pytest.mark.parametrize("kind", ["uniform", "loguniform"])
def test_drawn_values_depend_on_the_seed_alone(kind: str) -> None:
    said, often = {kind: [1e-4, 1e-1]}, {"mode": "random", "samples": 200}
    got = values(said, **often)
    assert got == values(said, **often)
    assert got != values(said, draw_seed=1, **often)
    assert all(1e-4 <= value <= 1e-1 for value in got)
    middle = math.sqrt(1e-4 * 1e-1) if kind == "loguniform" else 0.05
    assert 70 < sum(value < middle for value in got) < 130


def test_random_draws_every_key_anew() -> None:
    config = checked(
        mode="random", samples=40,
        parameters={"optim.lr": {"loguniform": [1e-4, 1e-2]}, "model.dim": {"values": [64, 128]}},
    )  # fmt: skip
    drawn = combinations(config)
    assert len(drawn) == 40
    assert len({c["optim.lr"] for c in drawn}) > 35
    assert {c["model.dim"] for c in drawn} == {64, 128}


KEYS = ["optim.lr", "model.dim", "train.steps", "train.sample_prompt"]
lists = st.lists(st.integers(0, 9) | st.text(max_size=3), min_size=1, max_size=4)


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(KEYS), lists, min_size=1), st.integers(0, 3))
def test_a_product_is_every_combination_with_every_seed(
    parameters: dict[str, list[Any]], seeds: int
) -> None:
    config = checked(
        parameters={key: {"values": said} for key, said in parameters.items()},
        seeds=list(range(seeds)),
    )
    got = [tuple(c.values()) for c in combinations(config)]
    columns = [*parameters.values(), *([range(seeds)] if seeds else [])]
    assert got == list(itertools.product(*columns))


@given(st.integers(1, 5), st.integers(1, 3))
def test_zip_goes_through_all_lists_together(n: int, seeds: int) -> None:
    parameters = {key: {"values": [f"{key}{i}" for i in range(n)]} for key in KEYS}
    config = checked(parameters=parameters, mode="zip", seeds=list(range(seeds)))
    expected = [
        {key: f"{key}{i}" for key in KEYS} | {"seed": s} for i in range(n) for s in range(seeds)
    ]
    assert combinations(config) == expected


def test_zip_refuses_lists_of_unequal_length() -> None:
    with pytest.raises(ConfigError, match=r"2 of optim\.lr, 1 of model\.dim"):
        combinations(
            checked(
                mode="zip",
                parameters={"optim.lr": {"values": [1, 2]}, "model.dim": {"values": [1]}},
            )
        )


def test_a_product_beyond_reason_is_refused_before_it_is_made() -> None:
    parameters = {key: {"values": list(range(1000))} for key in KEYS}
    with pytest.raises(ConfigError, match=r"1,000,000,000,000 combinations"):
        combinations(checked(parameters=parameters))


SAID = {
    "name": "s",
    "base": "quickstart",
    "parameters": {"optim.lr": [1e-3, -1e-3], "train.sample_prompt": ["a-b c", '"', "-1e-3"]},
    "seeds": [0, 1],
}
FILES = {
    "s.yaml": """\
name: s
base: quickstart
parameters:
  optim.lr: [1e-3, -1e-3]
  train: {sample_prompt: [a-b c, '"', "-1e-3"]}
seeds: [0, 1]
""",
    "s.json": '{"name": "s", "base": "quickstart", "seeds": [0, 1], "parameters": '
    '{"optim.lr": [1e-3, -1e-3], "train.sample_prompt": ["a-b c", "\\"", "-1e-3"]}}',
}


@pytest.mark.parametrize("name", FILES)
def test_every_file_format_yields_the_same_sweep(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FILES[name])
    file = sweep.read(tmp_path / name)
    expected = checked(
        **SAID | {"parameters": {k: {"values": v} for k, v in SAID["parameters"].items()}}  # type: ignore[attr-defined]
    )
    assert file.sweep == expected
    assert file.base == "quickstart"


def test_all_mistakes_are_reported_at_once_each_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("""\
name: a/b
base: quickstart
mode: grid
parameters:
  optim.lr: {loguniform: [0, 1]}
  optim.lrr: [1]
  model.dim: 64
  model.n_layers: {range: [4, 2, 1]}
  model.n_heads: {uniform: [1, 2]}
  name: [a]
seds: [1]
""")
    with pytest.raises(ConfigError) as first:
        sweep.read(path)
    text = str(first.value)
    for line, key in ((1, "name"), (3, "mode"), (7, "parameters.model.dim"), (11, "seds")):
        assert f"{path}:{line}  {key}" in text
    assert "did you mean seeds?" in text

    path.write_text(
        path.read_text()
        .replace("a/b", "a").replace("grid", "product").replace(": 64", ": [64]")
        .replace("seds", "seeds")
    )  # fmt: skip
    with pytest.raises(ConfigError) as second:
        sweep.read(path)
    text = str(second.value)
    for line, key, why in (
        (5, "optim.lr.loguniform", "positive bounds"),
        (6, "optim.lrr", "did you mean optim.lr?"),
        (8, "model.n_layers.range", "no longer exists: write the values out"),
        (9, "model.n_heads", "is drawn: mode: product needs a list"),
        (10, "name", "not a key"),
    ):
        assert any(
            f"{path}:{line}  parameters.{key}" in said and why in said for said in text.splitlines()
        ), (line, text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("base: quickstart", "nothing varies"),
        ("parameters: [1, 2]", "parameters"),
        ("parameters: {optim.lr: {list: [1]}}", "list"),
        ("parameters: {optim.lr: {values: [1], uniform: [1, 2]}}", "values and uniform"),
        ("parameters: {optim: [{lr: 1}]}", "not a key that a sweep can change"),
        ("parameters: {optim.lr: [1]}\nmode: random", "samples"),
        ("parameters: {optim.lr: [1]}\nsamples: 3", "samples"),
        ("parameters: {seed: [1]}\nseeds: [1]", "already contain a seed"),
        ("parameters: {optim.lr: [1]}\nextends: quickstart", "base: quickstart"),
        ("parameters: {optim.lr: []}", "at least 1"),
        ("parameters: {optim.lr: {logspace: [1, 2, 3]}}", "no longer exists"),
        ("parameters: {optim.lr: [1]}\nmode: random\nsamples: 1001", "equal to 1000"),
        ("parameters: {optim.lr: [1]}\nmetric: loss", "metric"),
        ("parameters: {launch.setup+: [[a], [b]]}", "did you mean launch.setup?"),
        ("parameters: {optim.lr: [1]}\nexclude: [{optim.lr: 1}]", "exclude: unknown key"),
    ],
)
def test_invalid_sweeps_are_refused(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        sweep.read(tmp_path / "s.yaml")
    assert why in str(error.value)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.yaml"):
        sweep.read(tmp_path / "absent.yaml")


def test_a_shipped_sweep_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sweep.read(Path("quickstart-lr")).sweep.name == "quickstart-lr"
    Path("lr.yaml").write_text("seeds: [0]")
    with pytest.raises(InputError, match=r"no sweep 'lr'[\s\S]*did you mean lr\.yaml\?"):
        sweep.read(Path("lr"))
    with pytest.raises(ConfigError, match="is a folder, not a sweep"):
        sweep.read(tmp_path)


def test_the_base_may_be_a_file_a_shipped_name_or_keys(tmp_path: Path) -> None:
    (tmp_path / "beside.yaml").write_text("train.steps: 7")
    tail = "\nparameters: {optim.lr: [1e-3]}\noverrides: [train.seq_len=64]"
    for base, steps in (
        ("beside.yaml", 7),
        ("quickstart", 500),
        ("{extends: quickstart, train: {steps: 90}, model.dim: 96}", 90),
    ):
        (tmp_path / "s.yaml").write_text(f"base: {base}{tail}")
        config = sweep.read(tmp_path / "s.yaml").resolve({"optim.lr": 5e-3}, "s/1").config
        assert config.train.steps == steps
        assert config.train.seq_len == 64
        assert config.optim.lr == 5e-3
        assert config.name == "s/1"
    assert config.model.dim == 96


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_sweep_makes_trials(path: Path) -> None:
    file = sweep.read(path)
    found = combinations(file.sweep)
    assert len(found) > 1
    for combination in found:
        file.resolve(combination, "s/1")
