"""Whatever the configuration holds, dtt writes so that it reads the same again."""

from __future__ import annotations

import json
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dtt.base.errors import ConfigError
from dtt.config import explain
from dtt.config.layers import Leaf, from_arguments, from_environment, from_mapping, read_file
from dtt.config.load import resolve
from dtt.config.merging import Resolved, merge, nested, take_extends
from dtt.config.run import RunConfig

TYPES = explain.key_types()
WORDS = (
    *("on", "yes", "null", "~", "true", "=", "<<", "007", "1e3", "1_000", "0x1F", "12:00:00", "-0"),
    *("2026-11-22", ".inf", "mlp.down", "[qk]", r"layers\.0\..*", "a: b", "a #b", "- x", "? x", ""),
    *('"', "'", "{a}", "&a", "*a", "!t", "%d", "@x", "`", "|", ">-", "---", "...", " a ", "type"),
    *("two\nlines", "a\tb", "\r", "\x85", "\u2028", "\ufeff", "日本", "\U0001f600", "a__B"),
    *("x" * 1100, "extends", "stages", "values", "_"),
)
TEXT = st.sampled_from(WORDS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.floats(-9, 9) | TEXT,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, min_size=1, max_size=3)
    ),
    max_leaves=6,
)
LENGTHS = st.sampled_from([0, 1, 0.5, 1.0, "20%", "50M tokens", "1.5 B tokens"])
HOSTILE: dict[tuple[str, ...], st.SearchStrategy[Any]] = {
    ("train", "sample_prompt"): TEXT,
    ("download", "include"): st.lists(TEXT, max_size=3),
    ("chat", "kwargs"): st.dictionaries(TEXT, VALUES, max_size=3),
    ("adapter", "rank_pattern"): st.dictionaries(TEXT, st.integers(1, 9), max_size=3),
    ("adapter", "alpha_pattern"): st.dictionaries(TEXT, st.floats(0.5, 9), max_size=3),
    ("launch", "environment"): st.dictionaries(TEXT, TEXT | st.integers(0, 9), max_size=3),
    ("model", "init_std"): st.dictionaries(TEXT, st.floats(0.5, 9), min_size=1, max_size=3),
    ("schedule", "warmup"): LENGTHS,
    ("schedule", "decay"): LENGTHS,
    ("track",): st.lists(st.fixed_dictionaries({"type": TEXT, "tags": st.lists(TEXT)}), max_size=2),
    ("data", "weights"): st.lists(
        st.fixed_dictionaries({"step": LENGTHS, "weights": st.dictionaries(TEXT, LENGTHS)}),
        max_size=2,
    ),
}
"""Values of the keys that hold free text, free names or lengths, before any check."""
DEFAULTS = from_mapping(RunConfig().model_dump(mode="json"), "default")


@st.composite
def hostile_values(draw: st.DrawFn) -> dict[str, Any]:
    """Return plain values of the keys in HOSTILE, nested."""
    return nested({key: Leaf(draw(strategy), "") for key, strategy in HOSTILE.items()})


class Unchecked:
    """A configuration that no check has seen."""

    model_fields = RunConfig.model_fields

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def model_dump(self, mode: str) -> dict[str, Any]:
        """Return the values."""
        return self.values


@settings(
    max_examples=40,
    phases=[Phase.explicit, Phase.generate],  # shrinking so large an example takes minutes
)
@given(values=hostile_values())
def test_what_dtt_writes_it_reads(tmp_path: Path, values: dict[str, Any]) -> None:
    """The file of a job, and the same values as JSON, over the defaults that lie below them."""
    (tmp_path / "run.yaml").write_text(explain.show(Resolved(Unchecked(values), {})))  # type: ignore[arg-type]
    (tmp_path / "run.json").write_text(json.dumps(values))
    long_name = "x" * 1100 in json.dumps(values)  # which YAML has only after a `?`
    for name in ("run.yaml",) if long_name else ("run.yaml", "run.json"):
        extends, layer = take_extends(read_file(tmp_path / name, TYPES))
        found = nested(merge([DEFAULTS, layer], TYPES.variants)[0])
        assert not extends
        for key in HOSTILE:
            assert reduce(getitem, key, found) == reduce(getitem, key, values)


PATTERN = ("adapter", "rank_pattern")
FREE = {"mlp.down": 3, "[qk]": 4, "a.b.C": 5}


@pytest.mark.parametrize(
    "text",
    [
        'adapter: {rank_pattern: {mlp.down: 3, "[qk]": 4, a.b.C: 5}}',
        'adapter.rank_pattern: {mlp.down: 3, "[qk]": 4, a.b.C: 5}',
        "adapter.rank_pattern: {mlp.down: 3, '[qk]': 4}\nadapter.rank_pattern.a.b.C: 5",
        'adapter:\n  rank_pattern.mlp.down: 3\n  "rank_pattern.[qk]": 4\n  rank_pattern.a.b.C: 5',
        '{"adapter": {"rank_pattern": {"mlp.down": 3, "[qk]": 4, "a.b.C": 5}}}',
        "stages: [{name: s, adapter.rank_pattern: {mlp.down: 3, a.b.C: 5, '[qk]': 4}}]",
    ],
)
def test_a_free_name_is_taken_whole_from_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(f"adapter.type: lora\ninit.from: jobs/a\n{text}\n")
    if text.startswith("{"):
        (tmp_path / "run.yaml").write_text(text)
    arguments = ["adapter.type=lora", "init.from=jobs/a", "optim.type=adamw"]
    stage = "s" if "stages" in text else None
    config = resolve(tmp_path / "run.yaml", arguments, env={}, stage=stage).config
    assert config.adapter.rank_pattern == FREE  # type: ignore[union-attr]


def test_a_free_name_is_taken_whole_from_arguments_and_the_environment() -> None:
    wanted = {(*PATTERN, name): Leaf(rank, "argument") for name, rank in FREE.items()}
    one = ['adapter.rank_pattern={mlp.down: 3, "[qk]": 4, a.b.C: 5}']
    each = [f"adapter.rank_pattern.{name}={rank}" for name, rank in FREE.items()]
    assert from_arguments(one, TYPES) == from_arguments(each, TYPES) == wanted
    env = {
        "DTT_LAUNCH__ENVIRONMENT__NCCL_DEBUG": "INFO",
        "DTT_LAUNCH__ENVIRONMENT__a__B": "1",
        "DTT_STAGES__SFT__LAUNCH__ENVIRONMENT__Name": "x",
        "DTT_CLEAN__LIMITS__gopher__min_words": "20",
        "DTT_CHAT__KWARGS__a__B": "on",
        "DTT_TRAIN__STEPS": "5",
    }
    assert {*from_environment(env, RunConfig.model_fields, TYPES)} == {
        ("launch", "environment", "NCCL_DEBUG"),
        ("launch", "environment", "a__B"),
        ("stages", "sft", "launch", "environment", "Name"),
        ("clean", "limits", "gopher", "min_words"),
        ("chat", "kwargs", "a", "B"),
        ("train", "steps"),
    }


def test_the_names_of_an_outer_mapping_may_be_dotted(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("clean: {rules: [gopher], limits: {gopher.min_words: 20}}\n")
    for config, more in ((tmp_path / "run.yaml", []), (None, ["clean.limits.gopher.min_words=20"])):
        cfg = resolve(config, ["clean.rules=[gopher]", *more], env={}).config
        assert cfg.clean is not None
        assert cfg.clean.limits == {"gopher": {"min_words": 20.0}}


def test_the_base_of_a_sweep_takes_free_names_whole(tmp_path: Path) -> None:
    from dtt.config import sweep

    keys = "{adapter: {type: lora, rank_pattern: {mlp.down: 3}}, optim.type: adamw, init.from: a}"
    (tmp_path / "a.yaml").write_text(f"base: {keys}\nparameters: {{optim: {{lr: [0.1]}}}}\n")
    found = sweep.read(tmp_path / "a.yaml")
    [values] = sweep.combinations(found.sweep)
    adapter = found.resolve(values, "a/1").config.adapter
    assert adapter.rank_pattern == {"mlp.down": 3}  # type: ignore[union-attr]
    (tmp_path / "b.py").write_text("sweep = {}\n")
    with pytest.raises(ConfigError, match="is Python"):
        sweep.read(tmp_path / "b.py")
