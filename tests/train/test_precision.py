"""Pure bf16 trains, resumes and exports; fp8 is used only where it is faster."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.records import assert_same_tensors
from support.running import Dtt, in_this_process

from dtt.base.ranks import Ranks
from dtt.checkpoint import store
from dtt.config.model import ModelConfig
from dtt.config.schedule import RunFacts
from dtt.config.train import TrainConfig
from dtt.generate import run as generate
from dtt.hf import export
from dtt.mesh.dist import start
from dtt.model import families
from dtt.model.decoder import Decoder, params_of
from dtt.model.init import initialize
from dtt.model.linear import Linear
from dtt.optim import built
from dtt.optim.ema import Ema
from dtt.optim.muon.variant import MuonConfig
from dtt.parallel import fp8
from dtt.track import jsonl
from dtt.train import run as train
from dtt.train.precision import Precision, choose

PURE = {"train__precision": "bf16-pure", "train__stochastic_rounding": "true"}


@pytest.fixture(scope="module")
def pure(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A job of 12 steps in pure bf16, and what it said."""
    folder = tmp_path_factory.mktemp("pure")
    run = Dtt(folder)("train", *tiny(**PURE, train__ema_decay=0.9, optim__lr=1e-2))
    return folder / "jobs/t", run.stderr


@pytest.mark.slow
def test_pure_bf16_learns(pure: tuple[Path, str]) -> None:
    job, said = pure
    assert "bf16-pure on" in said
    evals = [r["loss"] for r in jsonl.read(job / "metrics.jsonl") if r["kind"] == "eval"]
    assert evals[-1] < evals[0] - 0.1


@pytest.mark.slow
def test_a_checkpoint_holds_bf16_but_for_counts_and_averages(pure: tuple[Path, str]) -> None:
    checkpoint = store.at_step(pure[0] / "checkpoints", 12)
    assert {t.dtype for t in checkpoint.tensors(store.MODEL).values()} == {torch.bfloat16}
    state = checkpoint.tensors(store.STATE)
    kinds = {path: tensor.dtype for path, tensor in state.items() if tensor.ndim == 2}
    for path, dtype in kinds.items():
        assert dtype == (torch.float32 if path.startswith("ema/") else torch.bfloat16), path
    assert any(path.startswith("muon/") for path in kinds)
    assert any(path.startswith("adamw/") for path in kinds)


@pytest.mark.slow
def test_a_resume_in_pure_bf16_ends_bit_for_bit_the_same(pure: tuple[Path, str], dtt: Dtt) -> None:
    job = dtt.folder / "jobs/t"
    shutil.copytree(pure[0], job)
    dtt("train", "jobs/t", "--from-step", 8)
    assert_same_tensors(pure[0], job, 12)


@pytest.mark.slow
def test_an_export_of_pure_bf16_gives_the_same_logits(
    pure: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with in_this_process(tmp_path):
        made = export.run(str(pure[0]), [], out=tmp_path / "out", upload=None, private=False)
        generate.run(str(pure[0]), ["one two"], generate.Sampling(max_tokens=4, temperature=0))
    assert made.max_logit_difference < 1e-4
    assert "one two" in capsys.readouterr().out


def make_model(dtype: torch.dtype = torch.float32) -> Decoder:
    config = ModelConfig(dim=32, ffn_dim=64, n_layers=2, n_heads=2)
    model = Decoder(families.get(config.family).architecture(config, 64, 16)).to(dtype)
    initialize(model, seed=0)
    return model


def trained(dtype: torch.dtype) -> tuple[Decoder, Any]:
    """A model after one step."""
    model = make_model(dtype)
    optimizers = built.build(MuonConfig(), params_of(model), RunFacts(1, dtype=torch.bfloat16))
    step(model, optimizers)
    return model, optimizers


def step(model: Decoder, optimizers: Any) -> None:
    ids = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(0))
    model(ids[:, :-1], ids[:, 1:]).loss.backward()
    for optimizer in optimizers.values():
        optimizer.step()
        optimizer.zero_grad()


def test_averages_stay_fp32_beside_weights_in_bf16() -> None:
    model, optimizers = trained(torch.bfloat16)
    ema = Ema(params_of(model), decay=0.9)
    step(model, optimizers)
    ema.update(torch.zeros(()))
    before = {key: tensor.clone() for key, tensor in ema.tensors().items()}
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    average = before["ema/head.weight/value"]
    assert average.dtype == torch.float32
    assert not torch.equal(average, average.bfloat16().float())
    with ema.swapped():
        assert model.head is not None
        assert torch.equal(model.head.weight, average.bfloat16())
    assert all(torch.equal(ema.tensors()[key], tensor) for key, tensor in before.items())
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())


def test_what_each_precision_computes_in() -> None:
    wide, narrow = torch.float32, torch.bfloat16
    kinds = {p.value: (p.weights, p.compute_dtype) for p in Precision}
    assert kinds == {
        "fp64": (torch.float64, torch.float64),
        "fp32": (wide, wide),
        "bf16": (wide, narrow),
        "bf16-pure": (narrow, narrow),
        "fp8": (wide, narrow),
    }
    assert choose("fp8", torch.device("cpu")) is Precision.FP8


def test_stochastic_rounding_of_other_weights_is_refused() -> None:
    [(_, why)] = TrainConfig(stochastic_rounding=True, precision="bf16").problems()
    assert "bf16-pure" in why


# ---- fp8 -----------------------------------------------------------------------------------------

SECONDS = {(32, 32): (1.0, 0.99), (32, 64): (1.0, 0.5), (64, 32): (1.0, 3.0)}
"""Of a layer's shape: in bf16 and in fp8."""


def in_fp8(layer: Linear) -> bool:
    return layer.product is fp8.linear


def timed(layer: Linear, *_: Any) -> float:
    return SECONDS[layer.in_features, layer.out_features][in_fp8(layer)]


def test_only_shapes_that_gain_are_in_fp8(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fp8, "_seconds", timed)
    model = make_model()
    with caplog.at_level(logging.INFO):
        fp8.convert(model, start(Ranks(), "cpu"), 64, compiled=False)
    taken = {name for name, layer in fp8.linear_layers(model).items() if in_fp8(layer)}
    assert taken == {f"layers.{i}.mlp.{name}" for i in (0, 1) for name in ("gate", "up")}
    assert caplog.messages == [
        "fp8: 4 of 32 x 64 (2.00x as fast); the other linear layers are in bf16"
    ]


@pytest.mark.slow
def test_a_resume_computes_the_layers_in_fp8_that_the_first_attempt_chose(
    monkeypatch: pytest.MonkeyPatch, tiny: Any, tmp_path: Path
) -> None:
    """They are chosen by timings, which vary: other layers give other bits."""
    gaining = {"wide": lambda layer: layer.out_features > layer.in_features, "all": bool}

    def weights(arguments: list[str], which: str, from_step: int | None = None) -> bytes:
        monkeypatch.setattr(
            fp8, "_seconds", lambda one, *_: 2.0 if gaining[which](one) and not in_fp8(one) else 1.0
        )
        train.run(None, arguments, [], from_step)
        return store.at_step(Path("jobs/t/checkpoints"), 12).files(store.MODEL)[0].read_bytes()

    with in_this_process(tmp_path):
        whole = weights(tiny(train__precision="fp8", checkpoint__keep_last=9), "wide")
        assert weights(["jobs/t"], "all", from_step=8) == whole
        # The claim: with the layers that it would choose now, it ends with other weights.
        position = store.Checkpoint.position
        monkeypatch.setattr(
            store.Checkpoint, "position", lambda one: {**position(one), "fp8_gains": []}
        )
        assert weights(["jobs/t"], "all", from_step=8) != whole


def test_tensor_parallel_ranks_time_the_part_of_a_layer_that_each_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, int, bool]] = []

    def seconds(layer: Linear, *_: Any) -> float:
        seen.append((layer.in_features, layer.out_features, layer.weight.requires_grad))
        return 1.0

    monkeypatch.setattr(fp8, "_seconds", seconds)
    model = make_model().requires_grad_(requires_grad=False)
    fp8.convert(model, start(Ranks(), "cpu"), 64, compiled=False, divided=2)
    # q, k, v; o; gate and up; down. A frozen weight needs no gradient.
    assert set(seen) == {(32, 16, False), (16, 32, False), (32, 32, False)}


def test_without_a_speedup_training_is_in_bf16_and_logs_so() -> None:
    layers = {Linear(*shape): shape for shape in [(32, 32), (64, 32), (24, 32)]}
    gains = fp8.find_gains(layers, timed)
    assert gains == {(32, 32): pytest.approx(1.01, abs=0.01), (64, 32): 1 / 3, (24, 32): 0.0}
    assert fp8.describe(layers.values(), gains) == (
        "fp8 gains nothing here: training is in bf16 (at best it is 1.01x as fast, over 3 shapes)"
    )


def test_a_trial_times_both_passes_of_a_real_layer() -> None:
    layer = Linear(32, 64, bias=False)
    torch.nn.init.ones_(layer.weight)
    assert fp8._seconds(layer, 16, torch.device("cpu"), compiled=False) > 0
    assert layer.weight.grad is not None
