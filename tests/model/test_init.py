from __future__ import annotations

import hashlib
import math
import threading
from typing import Any

import pytest
import torch
from support.ranks import on_ranks
from support.running import TIMEOUT
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dtt.base.errors import ConfigError
from dtt.config.load import resolve
from dtt.config.model import ModelConfig
from dtt.config.scaling import MupConfig
from dtt.mesh.dist import World
from dtt.mesh.sharding import local, local_shard
from dtt.model import families, init
from dtt.model.architecture import Architecture
from dtt.model.decoder import Decoder
from dtt.model.init import RESIDUAL_WRITERS, init_std, initialize, normal
from dtt.model.scaling import scaled


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


BY_ROLE = "model.init_std={matrix: 0.03, embed: 1.0, head: 0.01, output: 0.05}"


def test_each_role_has_its_own_spread() -> None:
    """The reference draws with torch's own initialisers and compares the moments."""
    cfg = resolve(None, [BY_ROLE, "model.dim=256", "model.n_heads=4"], env={}).config.model
    arch = families.get("llama").architecture(cfg, 1024, 64)
    stds = {"embed.weight": 1.0, "head.weight": 0.01}
    for name, value in state(arch, 0).items():
        if value.ndim == 2:
            std = stds.get(name, 0.05 if name.endswith(RESIDUAL_WRITERS) else 0.03)
            reference = nn.init.normal_(torch.empty_like(value), std=std)
            assert abs(value.std() / reference.std() - 1) < 0.03, name
            assert abs(value.mean().item()) < 0.05 * std, name


def test_roles_left_out_have_the_spread_of_matrices_and_the_values_of_one_number() -> None:
    cfg = ModelConfig(init_std=0.03)
    arch = families.get("llama").architecture(cfg, 100, 24)
    assert arch == families.get("llama").architecture(
        cfg.model_copy(update={"init_std": {"matrix": 0.03}}), 100, 24
    )
    zero = cfg.model_copy(update={"init_std": {"matrix": 0.03, "output": 0.0, "head": 0.0}})
    values = state(families.get("llama").architecture(zero, 100, 24), 7)
    for name, value in state(arch, 7).items():
        is_zero = name == "head.weight" or name.endswith(RESIDUAL_WRITERS)
        assert torch.equal(values[name], torch.zeros_like(value) if is_zero else value), name


def test_mup_multiplies_the_spread_of_outputs_as_that_of_matrices() -> None:
    cfg = resolve(None, [BY_ROLE, "model.dim=256", "model.n_heads=4"], env={}).config
    wide = scaled(cfg.model_copy(update={"scaling": MupConfig(base_dim=64)}), 100)
    names = ("embed.weight", "head.weight", "layers.0.mlp.up.weight", "layers.0.mlp.down.weight")
    stds = [init_std(name, wide.arch, wide.base) for name in names]
    assert stds == pytest.approx([1.0, 0.01, 0.03 / 2, 0.05 / 2])


@pytest.mark.parametrize(
    "value", ["0", "-1", "{matrix: 0}", "{embed: 0}", "{output: -1}", "{heads: 1}", "true",
              "{head: x}", "[0.1]", ".inf"],
)  # fmt: skip
def test_a_spread_that_cannot_train_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.init_std: must be a number above 0"):
        resolve(None, [f"model.init_std={value}"], env={})


def test_a_tied_head_has_the_spread_of_the_embedding() -> None:
    with pytest.raises(ConfigError, match="the head is tied to the embedding"):
        resolve(None, ["model.init_std={head: 0}", "model.tie_embeddings=true"], env={})
    resolve(None, ["model.init_std={head: 0}"], env={})


def test_one_role_may_be_set_alone_and_a_number_replaces_them() -> None:
    roles = ["model.init_std={head: 0, output: 0}", "model.init_std.embed=0.5"]
    found = resolve(None, roles, env={}).config.model.init_std
    assert found == {"head": 0.0, "output": 0.0, "embed": 0.5}
    assert resolve(None, [*roles, "model.init_std=0.1"], env={}).config.model.init_std == 0.1


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
    init._draw(normal(parameter, 0.02, 7, "layers.0.mlp.experts.gate"))
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
        init._draw(normal(parameter, 0.02, 7, "layers.0.mlp.experts.gate"))
        equal.append(torch.equal(local(parameter), full[local_shard(parameter).box.slices]))
    return all(equal)


def test_a_shard_of_a_stack_is_filled_with_its_part_of_the_values() -> None:
    assert on_ranks(4, sharded) == [True] * 4


def test_an_expert_larger_than_a_block_is_the_same_in_every_stack(monkeypatch: Any) -> None:
    monkeypatch.setattr("dtt.model.init.BLOCK_ELEMENTS", 8)
    eight, three = stack(8), stack(3)
    assert torch.equal(eight[:3], three)
    assert len(eight.unique()) == eight.numel()


def test_blocks_are_drawn_in_several_threads(monkeypatch: Any) -> None:
    monkeypatch.setattr("dtt.model.init.BLOCK_ELEMENTS", 8)
    expected = stack(4)
    monkeypatch.setattr("dtt.model.init.machine.cores", lambda: 2)
    both, generator = threading.Barrier(2), init._generator

    def met(key: str, block: int) -> torch.Generator:
        both.wait(TIMEOUT)  # one thread alone would wait for ever
        return generator(key, block)

    monkeypatch.setattr(init, "_generator", met)
    assert torch.equal(stack(4), expected)


def test_stacks_that_write_into_the_residual_stream_are_as_small_as_matrices(
    arch: Architecture,
) -> None:
    for stacked, matrix in (("experts.down", "down.weight"), ("experts.up", "up.weight")):
        names = (f"layers.0.mlp.{name}" for name in (stacked, matrix))
        assert len({init_std(name, arch, arch) for name in names}) == 1


def test_values_of_a_known_seed_and_name_stay_the_same() -> None:
    """Jobs of earlier versions resume, and results can be repeated."""
    parameter = nn.Parameter(torch.empty(2, 2))
    init._draw(normal(parameter, 1.0, 0, "embed.weight"))
    generator = torch.Generator().manual_seed(
        int.from_bytes(hashlib.sha256(b"0:embed.weight").digest()[:8], "big", signed=True)
    )
    assert torch.equal(parameter, torch.empty(2, 2).normal_(generator=generator))
