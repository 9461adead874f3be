"""A checkpoint is restored bit for bit, and only into the objects that it came from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from support.tables import table
from torch import Tensor
from torch.optim import Optimizer

from dtt.base.errors import ConfigError
from dtt.checkpoint import tensors as files
from dtt.config.model import ModelConfig
from dtt.config.optim import Optimizer as OptimConfig
from dtt.config.schedule import RunFacts
from dtt.mesh.sharding import on_every_rank
from dtt.model import families
from dtt.model.decoder import Decoder, params_of
from dtt.model.init import initialize
from dtt.optim import built
from dtt.optim.adamw import AdamWConfig
from dtt.optim.muon.variant import MuonConfig, MuonGroup
from dtt.train.state import (
    load_optimizers,
    load_parameters,
    optimizer_tensors,
    restore_rng,
    rng_tensors,
    seed_rank,
)

CPU = torch.device("cpu")
CONFIGS: list[OptimConfig] = [
    MuonConfig(),
    MuonConfig(momentum_warmup=4, normuon_beta2=0.9),  # all the state there is
    AdamWConfig(),
    AdamWConfig(state="8bit"),
]


def make(config: OptimConfig, n_layers: int = 2) -> tuple[Decoder, dict[str, Optimizer]]:
    # Large enough for state of 8 bits.
    sizes = ModelConfig(dim=32, n_layers=n_layers, n_heads=2)
    model = Decoder(families.get(sizes.family).architecture(sizes, 64, 16))
    initialize(model, seed=0)
    return model, built.build(config, params_of(model), RunFacts(1))


def train(model: Decoder, optimizers: Mapping[str, Optimizer], steps: range) -> None:
    for step in steps:
        ids = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(step))
        (model(ids[:, :-1], ids[:, 1:]).loss / 64).backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()


def through_a_file(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    folder.mkdir(exist_ok=True)
    files.write(folder / "x.safetensors", files.cut(on_every_rank(tensors, 1), 0))
    found = files.read([folder / "x.safetensors"])
    return {name: stored[()] for name, stored in found.items()}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.type)
def test_training_continues_bit_for_bit_with_restored_optimizers(
    config: OptimConfig, tmp_path: Path
) -> None:
    model, optimizers = make(config)
    train(model, optimizers, range(3))
    weights = through_a_file(tmp_path / "model", model.state_dict())
    state = through_a_file(tmp_path / "optimizer", optimizer_tensors(optimizers))
    train(model, optimizers, range(3, 6))

    resumed, restored = make(config)
    resumed.load_state_dict(weights)
    load_optimizers(restored, state)
    train(resumed, restored, range(3, 6))
    for name, parameter in resumed.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    ours, theirs = optimizer_tensors(restored), optimizer_tensors(optimizers)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_every_parameter_has_its_state_under_its_name() -> None:
    model, optimizers = make(MuonConfig())
    train(model, optimizers, range(1))
    state = optimizer_tensors(optimizers)
    named = {path.split("/")[1] for path in state}
    assert named == {name for name, _ in model.named_parameters()}
    assert state["muon/layers.0.attn.o.weight/momentum"].shape == (32, 32)
    assert state["adamw/norm.weight/exp_avg"].shape == (32,)


def test_loaded_state_does_not_share_memory_with_the_checkpoint() -> None:
    model, optimizers = make(AdamWConfig())
    train(model, optimizers, range(1))
    state = {key: value.clone() for key, value in optimizer_tensors(optimizers).items()}
    before = {key: value.clone() for key, value in state.items()}
    load_optimizers(optimizers, state)
    train(model, optimizers, range(1, 2))
    assert all(torch.equal(state[key], before[key]) for key in before)


@pytest.mark.parametrize("config", [MuonConfig(), AdamWConfig()], ids=lambda c: c.type)
def test_state_takes_the_precision_that_its_parameter_has_now(config: OptimConfig) -> None:
    model, optimizers = make(config)
    train(model, optimizers, range(2))
    saved = optimizer_tensors(optimizers)
    pure, _ = make(config)
    pure.to(torch.bfloat16)
    restored = built.build(config, params_of(pure), RunFacts(1))
    load_optimizers(restored, saved)
    for path, value in optimizer_tensors(restored).items():
        assert value.dtype == (torch.bfloat16 if value.ndim else torch.float32), path
        assert torch.equal(value, saved[path].to(value.dtype)), path
    train(pure, restored, range(2, 3))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.type)
def test_the_state_of_other_optimizers_or_parameters_is_refused(config: OptimConfig) -> None:
    other = AdamWConfig() if isinstance(config, MuonConfig) else MuonConfig()
    for theirs, n_layers in ((other, 2), (config, 3)):
        model, optimizers = make(theirs, n_layers)
        train(model, optimizers, range(1))
        with pytest.raises(ConfigError, match="which does not train it here"):
            load_optimizers(make(config)[1], optimizer_tensors(optimizers))


@pytest.mark.parametrize("config", [MuonConfig(), AdamWConfig()], ids=lambda c: c.type)
def test_parameters_that_never_had_a_gradient_do_not_prevent_a_resume(config: OptimConfig) -> None:
    def without(model: Decoder) -> None:
        for name in ("layers.1.attn.o.weight", "norm.weight"):
            model.get_parameter(name).requires_grad_(False)

    model, optimizers = make(config)
    without(model)
    train(model, optimizers, range(2))
    resumed, restored = make(config)
    without(resumed)
    resumed.load_state_dict({name: p.clone() for name, p in model.state_dict().items()})
    load_optimizers(restored, {k: t.clone() for k, t in optimizer_tensors(optimizers).items()})
    train(model, optimizers, range(2, 4))
    train(resumed, restored, range(2, 4))
    ours, theirs = optimizer_tensors(restored), optimizer_tensors(optimizers)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert all(torch.equal(p, model.get_parameter(n)) for n, p in resumed.named_parameters())


def test_other_groups_of_the_same_optimizer_take_up_the_state_that_there_is() -> None:
    model, optimizers = make(MuonConfig())
    train(model, optimizers, range(2))
    state = {key: value.clone() for key, value in optimizer_tensors(optimizers).items()}
    entries = (MuonGroup(match="layers.*.attn.*.weight", lr=1e-3, split=2),)
    resumed, regrouped = make(MuonConfig(groups=entries, momentum_warmup=4))
    load_optimizers(regrouped, state)
    taken = optimizer_tensors(regrouped)
    assert all(torch.equal(taken[key], state[key]) for key in state | taken)
    train(resumed, regrouped, range(2, 3))
    assert optimizer_tensors(regrouped)["muon/layers.0.attn.q.weight/step"] == 1


def test_a_parameter_that_another_optimizer_takes_now_is_refused() -> None:
    model, optimizers = make(MuonConfig())
    train(model, optimizers, range(1))
    entries = (MuonGroup(match="layers.0.attn.q.weight", optimizer="adamw"),)
    _, regrouped = make(MuonConfig(groups=entries))
    with pytest.raises(ConfigError, match=r"layers.0.attn.q.weight has state of muon"):
        load_optimizers(regrouped, optimizer_tensors(optimizers))


def test_optimizers_that_have_not_stepped_can_be_saved_and_restored(tmp_path: Path) -> None:
    _, optimizers = make(MuonConfig())
    state = through_a_file(tmp_path, optimizer_tensors(optimizers))
    assert state == {}
    state |= rng_tensors(0, CPU)  # of no optimizer
    model, restored = make(MuonConfig())
    load_optimizers(restored, state)
    train(model, restored, range(1))


def test_the_weights_of_another_model_are_refused() -> None:
    parameters = dict(make(AdamWConfig())[0].named_parameters())
    deeper = dict(make(AdamWConfig(), n_layers=3)[0].named_parameters())
    wider = parameters | {"norm.weight": torch.ones(17)}
    for other, what in ((deeper, "layers.2.attn.k.weight"), (wider, "norm.weight")):
        with pytest.raises(ConfigError, match=f"{what} is"):
            load_parameters(table(parameters), other)


def test_random_numbers_continue_where_they_were() -> None:
    seed_rank(3, 0)
    torch.rand(5)
    state = rng_tensors(0, CPU)
    expected = torch.rand(5)
    seed_rank(99, 0)
    restore_rng(state, rank=0, seed=3, device=CPU)
    assert torch.equal(torch.rand(5), expected)


def test_a_rank_that_is_new_gets_numbers_of_its_own_as_does_each_seed() -> None:
    seed_rank(3, 0)
    state = rng_tensors(0, CPU)
    drawn = []
    for rank in (0, 1, 2, 1):
        restore_rng(state, rank, seed=3, device=CPU)
        drawn.append(tuple(torch.rand(4).tolist()))
    seed_rank(4, 1)
    drawn.append(tuple(torch.rand(4).tolist()))
    assert drawn[1] == drawn[3]
    assert len(set(drawn)) == 4
