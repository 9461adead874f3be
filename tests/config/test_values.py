"""Values with forms of their own: what each form means, and what is refused, with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dtt.base.errors import ConfigError
from dtt.config import explain
from dtt.config.load import changes_on_resume, resolve
from dtt.config.model import ModelConfig
from dtt.config.parallel import ParallelConfig, Sizes, mesh_sizes
from dtt.config.value_types import parse_decay, seconds
from dtt.model import families
from dtt.model.mesh_divisibility import check_experts

BUDGET = "train.budget=6h"
DOTS = ("model.family=dots1", "model.n_experts=8")
BATCH = ("train.batch_schedule.type=doubling", "train.batch_schedule.start=1024")
DECAY = r"weight_decay: must be a finite number(.|\n)*horizon: true"
NO_LENGTHS = ("-1", "1.5", "true", "5 steps", "5 apples", "101%", "null")
NO_AVERAGES = (
    "0", "1", "1.0", "0.0", "-0.9", "true", "'0.9'", "0.9 from 120%", "[0.9]", ".nan",
    "{decay: 0.9}",
)  # fmt: skip
NO_DECAYS = (
    "-0.1", "horizon 0", "horizon", "horizon -1", "horizon 20%", "0.1 horizon", "'0.1'", "cautious",
    "horizon cautious 0.1", "Cautious 0.1", ".inf", "true", "horizon 1e999", "[0.1]", "{}",
    "{cautious: true}", "{value: 0.1, horizon: 0.2}", "{value: 0, horizon: true}", "{value: true}",
    "{value: 0.1, cautious: 1}", "{value: 0.1, careful: true}",
)  # fmt: skip
REFUSED: list[tuple[tuple[str, ...], str]] = [
    *(((f"schedule.warmup={text}",), r"schedule\.warmup: must be steps \(500\), a share")
      for text in NO_LENGTHS),
    (("schedule.warmup=" + "9" * 30,), r"schedule\.warmup: must be"),
    (("schedule.warmup=1e-40",), r"schedule\.warmup: must be 0 or between 1e-38 and 3e38"),
    (("schedule.shape=exponential",), r"schedule\.floor: an exponential decay never reaches 0"),
    *(((f"train.ema_decay={text}",), r"train\.ema_decay: ")
      for text in NO_AVERAGES),
    *(((f"train.budget={text}",), "train.budget: must be a duration of at most 10000d: 6h, 90m")
      for text in ("six hours", "6", "0h", "10001d")),
    ((BUDGET, "schedule.type=cosine"), "train.budget: needs schedule.type=wsd, not cosine"),
    ((BUDGET, "schedule.warmup=2%"), "schedule.warmup: the time budget determines the length"),
    *(((f"optim.weight_decay={text}",), DECAY) for text in NO_DECAYS),
    *(((f"optim.groups=[{{match: '*', weight_decay: {text}}}]",), DECAY) for text in NO_DECAYS),
    ((BUDGET, "optim.weight_decay={value: 0.2, horizon: true}"),
     "specify the weight decay as a number"),
    ((BUDGET, "optim.groups=[{match: '*', weight_decay: {value: 0.2, horizon: true}}]"),
     "specify the weight decay as a number"),
    (("train.balance_loss=0.1",), "llama has no experts"),
    (("train.router_z_loss=0.1",), "llama has no experts"),
    (("parallel.expert=2",), "llama has no experts"),
    (("model.n_experts=4",), "llama has no n_experts"),
    ((*DOTS, "train.precision=fp8"), "not for stacks of experts"),
    ((*DOTS, "scaling={type: mup, base_dim: 128}"), "muP has no rule for routers"),
    ((*DOTS, "model.n_expert_groups=3"), "3 groups do not divide 8 experts"),
    ((*DOTS, "model.n_expert_groups=8"), "at least two experts"),
    ((*DOTS, "model.expert_groups_per_token=2"), "more than the 1 groups"),
    ((*DOTS, "model.experts_per_token=9"), "only 8 experts"),
    (("model.family=olmoe", "model.n_shared_experts=2"), "olmoe has no n_shared_experts"),
    ((*DOTS, "data.type=preference", "objective.type=dpo", "train.balance_loss=0.1"),
     "the loss is per pair"),
    (("model={family: transformers, config: {model_type: mixtral, output_router_logits: true}}",
      "data.type=preference", "objective.type=dpo"), "adds a loss per token to objective.type=dpo"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "why"), REFUSED, ids=[" ".join(keys)[:60] for keys, _ in REFUSED])
def test_what_cannot_be_is_refused_with_the_reason(keys: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        resolve(None, keys, env={})


# ---- lengths: 1, a step, is not 1.0, the whole run -----------------------------------------------


@pytest.mark.parametrize("key", ["schedule.warmup", "schedule.decay", "train.batch_schedule.every"])
def test_a_step_and_the_whole_run_are_a_change_on_resume(tmp_path: Path, key: str) -> None:
    step, whole, percent = (
        resolve(None, [*BATCH, f"{key}={text}"], env={}) for text in ("1", "1.0", "100%")
    )
    assert changes_on_resume(step.config, whole.config) == [key]
    assert step.config != whole.config
    assert changes_on_resume(whole.config, percent.config) == []
    for resolved in (step, whole, percent):
        (tmp_path / "run.yaml").write_text(explain.show(resolved))
        again = resolve(tmp_path / "run.yaml", env={}).config
        assert again == resolved.config
        assert json.dumps(again.model_dump(mode="json")) == json.dumps(
            resolved.config.model_dump(mode="json")
        )


# ---- durations, weight decay -----------------------------------------------------------


@pytest.mark.parametrize(
    ("stretch", "expected"),
    [("6h", 21_600), ("90m", 5400), ("1h 30m", 5400), ("1.5h", 5400), ("2d", 172_800), ("45s", 45)],
)
def test_a_stretch_of_time_is_numbers_with_units(stretch: str, expected: float) -> None:
    assert seconds(stretch) == expected


def test_with_a_budget_lengths_and_decays_may_be_absolute() -> None:
    resolve(None, [BUDGET, "schedule.warmup=600", "optim.weight_decay=0.2"], env={})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0),
        (0.1, 0.1),
        (3, 3),
        ("{value: 0.2, horizon: true}", {"value": 0.2, "horizon": True}),
        (
            "{value: 2, horizon: true, cautious: true}",
            {"value": 2, "horizon": True, "cautious": True},
        ),
        ("{value: 0.1, cautious: false}", {"value": 0.1, "cautious": False}),
    ],
)
def test_a_number_and_a_horizon_are_accepted_wherever_a_decay_stands(
    value: float | str, expected: Any
) -> None:
    for optimizer in ("muon", "adamw"):
        entry = f"[{{match: '*', weight_decay: {value}}}]"
        arguments = [f"optim.type={optimizer}", f"optim.weight_decay={value}"]
        optim = resolve(None, [*arguments, f"optim.groups={entry}"], env={}).config.optim
        assert optim.weight_decay == optim.groups[0].weight_decay == expected
        # Configurations of jobs store numbers as they did before.
        assert isinstance(optim.weight_decay, dict if isinstance(expected, dict) else float)


def test_an_argument_sets_one_of_the_names_of_a_decay() -> None:
    cfg = resolve("quickstart", ["optim.weight_decay.cautious=false"], env={}).config
    assert cfg.optim.weight_decay == {"value": 0.143, "cautious": False}
    assert (
        resolve("quickstart", ["optim.weight_decay=0.2"], env={}).config.optim.weight_decay == 0.2
    )


def test_a_horizon_is_the_decay_over_which_weights_are_averaged() -> None:
    """Wang & Aitchison, equation 2: the time constant in steps is 1 / (lr * decay)."""
    decay = parse_decay({"value": 0.2, "horizon": True}).resolve(lr=4e-3, steps=500)
    assert 1 / (4e-3 * decay) == pytest.approx(0.2 * 500)
    assert parse_decay(0.3).resolve(lr=4e-3, steps=None) == 0.3
    with pytest.raises(ValueError, match="number of steps"):
        parse_decay({"value": 0.2, "horizon": True}).resolve(lr=4e-3, steps=None)


# ---- meshes of devices ---------------------------------------------------------------------------


def test_minus_one_takes_the_remaining_devices() -> None:
    assert mesh_sizes(ParallelConfig(tensor=2), 8) == (1, 4, 1, 1, 2)
    assert mesh_sizes(ParallelConfig(replicate=2, shard=-1, context=2), 8) == (1, 2, 2, 2, 1)


def test_the_suggested_mesh_fits_the_number_of_processes() -> None:
    with pytest.raises(ConfigError) as caught:
        mesh_sizes(ParallelConfig(tensor=2), 3)
    for change in ("parallel.shard=-1", "parallel.replicate=1", "parallel.tensor=1"):
        assert change in str(caught.value)
    assert mesh_sizes(ParallelConfig(shard=-1, replicate=1, tensor=1), 3) == (1, 1, 3, 1, 1)


@pytest.mark.parametrize(
    ("expert", "sizes", "why", "fitting"),
    [
        (4, Sizes(shard=2), "shard x context x tensor is 2", 2),
        (3, Sizes(shard=3), "model.n_experts is 8", 1),
        (4, Sizes(replicate=4, tensor=2), "is 2", 2),
    ],
)
def test_experts_are_divided_evenly(expert: int, sizes: Sizes, why: str, fitting: int) -> None:
    cfg = ModelConfig(family="mixtral", n_experts=8)
    arch = families.get("mixtral").architecture(cfg, 300, 64)
    with pytest.raises(ConfigError, match=why) as refused:
        check_experts(expert, sizes, arch)
    assert f"parallel.expert={fitting}" in str(refused.value)
    check_experts(fitting, sizes, arch)
