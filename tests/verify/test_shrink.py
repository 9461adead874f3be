"""The small configuration keeps what decides whether a layout is right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import random_configurations

from dtt.config.base import Length
from dtt.config.load import resolve, stage_names
from dtt.config.run import RunConfig
from dtt.config.shipped import shipped_configs
from dtt.verify.layouts import layouts_of, not_covered
from dtt.verify.shrink import CLIP_NORM, SEQ_LEN, STEPS, WINDOW, shrink

SURFACE = Path(__file__).parents[1] / "surface.txt"
SHIPPED = sorted(
    str(path.relative_to(shipped_configs()))
    for folder in ("", "pretrain", "sft", "dpo", "models")
    for path in (shipped_configs() / folder).glob("*.yaml")
    # Common parts of the recipes, which name no model.
    if path.parent.name not in ("sft", "dpo") or path.stem not in ("full", "lora")
)


def config(*arguments: str, name: str | None = None) -> RunConfig:
    return resolve(name, arguments, env={}).config


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_configuration_has_a_small_one(name: str) -> None:
    for stage in stage_names(name) or (None,):
        cfg = resolve(name, (), env={}, stage=stage).config
        small = shrink(cfg)
        assert small.run.train.steps == STEPS
        for kept in ("family", "tie_embeddings", "init_std", "logit_softcap"):
            assert getattr(small.run.model, kept) == getattr(cfg.model, kept)
        assert small.run.data.type == cfg.data.type
        assert small.run.objective.type == cfg.objective.type
        assert small.run.adapter.type == cfg.adapter.type
        assert small.run.optim.type == cfg.optim.type
        assert small.run.train.remat == cfg.train.remat
        assert (small.base is None) == (cfg.init.source is None)
        # The layout adds the pipeline, for which a small model has a layer a stage.
        layers = {"n_layers": 2} if cfg.parallel.pipeline > 1 else {}
        assert shrink(small.run).run.model == small.run.model.model_copy(update=layers)


def test_kinds_of_sizes_are_kept() -> None:
    cfg = config(
        "model.family=gemma3", "model.dim=1152", "model.n_heads=4", "model.n_kv_heads=1",
        "model.head_dim=256", "model.ffn_dim=6912", "model.window=512", "train.seq_len=4096",
        "train.global_batch_tokens=65536", "model.max_seq_len=32768", "model.vocab_size=262144",
    )  # fmt: skip
    model = shrink(cfg).run.model
    assert model.n_heads // (model.n_kv_heads or 1) == 4
    # Narrower attention than the residual stream, as in the real model.
    assert model.resolved_head_dim * model.n_heads < model.dim
    assert model.window == WINDOW
    assert model.max_seq_len is not None
    assert model.max_seq_len > SEQ_LEN
    assert model.vocab_size is not None
    assert model.vocab_size % 2 == 0
    odd = shrink(config("model.n_heads=3", "model.dim=192", "model.ffn_dim=501")).run.model
    assert odd.n_heads % 2 == 1
    assert odd.ffn_dim is not None
    assert odd.ffn_dim % 2 == 1


def test_a_limit_clips_and_phases_fall_into_the_steps() -> None:
    cfg = config(
        "schedule={type: wsd, warmup: 2%, decay: 20%}",
        "train.batch_schedule={type: doubling, start: 8192}", "optim.lr=1e-7",
        "train.context_schedule=[[0, 256], [20%, 1024]]",
    )  # fmt: skip
    small = shrink(cfg).run
    assert small.train.clip_norm == CLIP_NORM
    two = Length(2)
    assert (small.schedule.warmup, small.schedule.decay) == (two, two)  # type: ignore[union-attr]
    assert small.train.context_schedule == ((Length(0), SEQ_LEN // 2), (Length(1), SEQ_LEN))
    assert small.optim.lr >= 1e-3
    assert shrink(config("train.clip_norm=null")).run.train.clip_norm is None


def test_what_is_not_kept_is_named() -> None:
    cfg = config(
        "model.dropout=0.1", "train.precision=fp8", "eval.tasks=[arc_easy]", "parallel.shard=16",
        "parallel.tensor=4", "parallel.context=2", "launch.nodes=32", "launch.gpus_per_node=8",
    )  # fmt: skip
    notes = "\n".join([*shrink(cfg).notes, *not_covered(cfg)])
    for named in (
        "model.dropout=0.1", "train.precision=fp8", "eval.tasks", "parallel.shard=16",
        "parallel.reduce=auto",
    ):  # fmt: skip
        assert named in notes
    assert "replicate 2 x shard 2 x context 2 x tensor 2" in notes
    assert "parallel.context" not in notes


def test_layouts_are_the_mesh_and_the_mesh_without_each_dimension() -> None:
    def names(*arguments: str) -> list[str]:
        return [layout.name for layout in layouts_of(config(*arguments))]

    assert names() == ["replicate 2"]
    assert names("parallel.replicate=1") == ["one process"]
    assert names("parallel.shard=8", "parallel.replicate=1") == ["shard 2"]
    assert names("parallel.shard=8", "parallel.tensor=4", "parallel.replicate=1") == [
        "tensor 2", "shard 2", "shard 2 x tensor 2",
    ]  # fmt: skip
    # `launch` decides what -1 is.
    one_node = ("launch.gpus_per_node=8", "parallel.shard=8")
    assert names(*one_node) == ["shard 2"]
    assert names(*one_node, "launch.nodes=4")[-1] == "replicate 2 x shard 2"
    # 16 processes are too many, so that only the parts run.
    sizes = [f"parallel.{dim}=2" for dim in ("replicate", "shard", "context", "tensor")]
    assert len(names(*sizes)) == 4


def test_every_alternative_of_a_feature_is_valid() -> None:
    for alternatives in random_configurations.FEATURES.values():
        for arguments in alternatives:
            assert shrink(config(*arguments)).run.train.steps == STEPS


def test_every_key_that_affects_training_has_values_to_try() -> None:
    keys = [line for line in SURFACE.read_text().splitlines() if re.match(r"[a-z_]+[\[.]", line)]
    tried = " ".join(
        a for feature in random_configurations.FEATURES.values() for one in feature for a in one
    )
    missing = [
        key
        for key in keys
        if not key.startswith(random_configurations.WITHOUT_EFFECT)
        and not re.search(rf"\b{re.split(r'[^a-z0-9_]+', key)[-1]}\b", tried)
    ]
    assert not missing, "add values to FEATURES or WITHOUT_EFFECT in random_configurations.py"
