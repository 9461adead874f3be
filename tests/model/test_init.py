from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dtt.config.model import ModelConfig
from dtt.model import families
from dtt.model.architecture import Architecture
from dtt.model.decoder import Decoder
from dtt.model.init import fill_normal, init_std, initialize
from dtt.runtime.dist import World
from dtt.runtime.sharding import local, local_shard


def state(arch: Architecture, seed: int) -> dict[str, torch.Tensor]:
    model = Decoder(arch)
    initialize(model, seed)
    return model.state_dict()


def test_weights_have_the_published_spread() -> None:
    cfg = ModelConfig(family="gpt2", dim=256, n_layers=8, n_heads=4)
    arch = families.get("gpt2").architecture(cfg, 1024, 64)
    for name, value in state(arch, 0).items():
        if value.ndim == 1:
            assert torch.all(value == (0.0 if name.endswith("bias") else 1.0)), name
        else:
            writes_residual = name.endswith(("attn.o.weight", "mlp.down.weight"))
            std = 0.02 / math.sqrt(16) if writes_residual else 0.02
            assert abs(value.std().item() / std - 1) < 0.03, name
            assert abs(value.mean().item()) < 0.05 * std, name


def test_a_seed_and_a_name_decide_a_parameter_alone(arch: Architecture) -> None:
    first, again, other = state(arch, 7), state(arch, 7), state(arch, 8)
    for name, value in first.items():
        assert torch.equal(value, again[name])
        assert value.ndim == 1 or not torch.equal(value, other[name])
    torch.manual_seed(99)
    deeper = Decoder(arch)
    deeper.layers.append(Decoder(arch).layers[0])
    initialize(deeper, 7)
    assert all(torch.equal(deeper.state_dict()[name], value) for name, value in first.items())


def stack(experts: int, rows: int = 6, columns: int = 4) -> Tensor:
    parameter = nn.Parameter(torch.empty(experts, rows, columns))
    with torch.no_grad():
        fill_normal(parameter, 0.02, 7, "layers.0.mlp.experts.gate")
    return parameter.detach()


def test_values_of_an_expert_do_not_depend_on_the_number_of_experts() -> None:
    eight, three = stack(8), stack(3)
    assert torch.equal(eight[:3], three)
    assert len(set(map(float, eight[:, 0, 0]))) == 8
    assert abs(stack(8, 64, 64).std().item() / 0.02 - 1) < 0.03


def sharded(world: World) -> bool:
    """Compare this rank's shard with the same part of the complete stack, for pairs of axes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    full = stack(5)
    equal = []
    for axes in ((0, 1), (0, 2), (1, 2)):
        parameter = nn.Parameter(
            distribute_tensor(torch.empty(5, 6, 4), mesh, list(map(Shard, axes)))
        )
        with torch.no_grad():
            fill_normal(parameter, 0.02, 7, "layers.0.mlp.experts.gate")
        equal.append(torch.equal(local(parameter), full[local_shard(parameter).box.slices]))
    return all(equal)


def test_a_shard_of_a_stack_is_filled_with_its_part_of_the_values() -> None:
    assert on_ranks(4, sharded) == [True] * 4


def test_an_expert_larger_than_a_block_is_the_same_in_every_stack(monkeypatch: Any) -> None:
    monkeypatch.setattr("dtt.model.init.BLOCK_ELEMENTS", 8)
    eight, three = stack(8), stack(3)
    assert torch.equal(eight[:3], three)
    assert len(eight.unique()) == eight.numel()


def test_stacks_that_write_into_the_residual_stream_are_as_small_as_matrices(
    arch: Architecture,
) -> None:
    for stacked, matrix in (("experts.down", "down.weight"), ("experts.up", "up.weight")):
        names = (f"layers.0.mlp.{name}" for name in (stacked, matrix))
        assert len({init_std(name, arch, arch) for name in names}) == 1


def test_values_of_a_known_seed_and_name_stay_the_same() -> None:
    """Jobs of earlier versions resume, and results can be repeated."""
    parameter = nn.Parameter(torch.empty(2, 2))
    with torch.no_grad():
        fill_normal(parameter, 1.0, 0, "embed.weight")
    generator = torch.Generator().manual_seed(
        int.from_bytes(hashlib.sha256(b"0:embed.weight").digest()[:8], "big", signed=True)
    )
    assert torch.equal(parameter, torch.empty(2, 2).normal_(generator=generator))
