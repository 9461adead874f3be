"""Three steps of LoRA on models of transformers: two ranks compute those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.library_types import JOINED, built, ids, initialized
from support.ranks import on_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtt.base.ranks import Ranks
from dtt.config.adapter import LoraConfig
from dtt.config.parallel import Sizes
from dtt.mesh.dist import World, start
from dtt.mesh.mesh import make_mesh
from dtt.model.lora import attach
from dtt.model.output import Output
from dtt.parallel.apply import apply
from dtt.train.warm_start import take_base

LORA = {"rank": 4, "alpha": 6.0}
ROWS, LENGTH, STEPS = 4, 15, 3
LAYOUTS = {"ddp": Sizes(replicate=2), "fsdp2": Sizes(shard=2)}


def adapted(kind: str) -> Any:
    """Return a model in fp64 with adapters that are not zero."""
    model = initialized(built(kind))
    attach(model, LoraConfig(**LORA), torch.float32)
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.double()


JAMBA = {
    "intermediate_size": 128, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4,
    "mamba_dt_rank": 64, "mamba_d_state": 8,
}  # fmt: skip
QLORA = LoraConfig(**LORA, base="nf4", targets=("in_proj", "x_proj", "q_proj", "down_proj"))


def in_4_bits(world: World, sizes: Sizes) -> tuple[Any, Any]:
    """Return a Jamba in 4 bits, of which each rank reads its part, and its wrapped module.

    It multiplies with the weight of `dt_proj` itself, which a shard has to be gathered for.
    """
    arch = built("jamba", **JAMBA)
    model = initialized(arch, torch.float64)
    weights = {name: one.clone() for name, one in model.state_dict().items()}
    attach(model, QLORA, torch.float64)
    torch.manual_seed(5)
    for name, parameter in model.double().named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    module = apply(model, world, make_mesh(sizes, world), compile_blocks=False, precision="fp64")
    take_base(model, weights, "the folder")
    return model, module


def trained_of(model: Any) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def optimizer(parameters: dict[str, Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters.values(), lr=1e-2, weight_decay=0.1)


def batch(step: int) -> tuple[Tensor, Tensor]:
    tokens = ids(STEPS, ROWS, LENGTH + 1)[step]
    return tokens[:, :-1], tokens[:, 1:]


def documents(*, separate: bool) -> Tensor | None:
    return (torch.arange(LENGTH) // 9).expand(ROWS, LENGTH) if separate else None


def steps(world: World, kind: str, layout: str) -> tuple[list[float], dict[str, Any]]:
    """Return the losses and the trained weights, as lists, of three steps on this layout."""
    torch.set_num_threads(1)
    sizes = LAYOUTS[layout] if world.size > 1 else Sizes()
    if kind == "jamba":
        model, module = in_4_bits(world, sizes)
    else:
        model, mesh = adapted(kind), make_mesh(sizes, world)
        module = apply(model, world, mesh, compile_blocks=False, precision="fp64")
    trained, losses = trained_of(model), []
    updates = optimizer(trained)
    for step in range(STEPS):
        inputs, targets = (part[world.rank :: world.size] for part in batch(step))
        packed = documents(separate=kind not in (*JOINED, "jamba"))
        output = module(
            inputs, targets, doc_ids_BT=None if packed is None else packed[: len(inputs)]
        )
        assert isinstance(output, Output)
        (output.loss * world.size / (ROWS * LENGTH)).backward()
        total = output.loss.detach().clone()
        if world.size > 1:
            torch.distributed.all_reduce(total)
        losses.append(float(total) / (ROWS * LENGTH))
        updates.step()
        updates.zero_grad()
    full = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in trained.items()}
    return losses, {name: tensor.tolist() for name, tensor in full.items()}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [*((kind, "fsdp2") for kind in ("lfm2", "granite", "ministral3", "nanochat")), ("lfm2", "ddp")],
)
def test_two_ranks_train_the_adapter_of_one_process(kind: str, layout: str) -> None:
    losses, expected = steps(start(Ranks(), "cpu"), kind, layout)
    before = trained_of(adapted(kind))
    assert all(before[name].tolist() != values for name, values in expected.items())
    for found, weights in on_ranks(2, steps, kind, layout):
        assert found == pytest.approx(losses, abs=1e-12)
        for name, values in expected.items():
            ours, alone = (
                torch.tensor(one, dtype=torch.float64) for one in (weights[name], values)
            )
            torch.testing.assert_close(ours, alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_an_adapter_on_a_base_in_4_bits_as_one_process(layout: str) -> None:
    """The library computes the state of Jamba in fp32."""
    alone = start(Ranks(), "cpu")
    before = trained_of(in_4_bits(alone, Sizes())[0])
    losses, expected = steps(alone, "jamba", layout)
    assert all(before[name].tolist() != values for name, values in expected.items())
    for found, weights in on_ranks(2, steps, "jamba", layout):
        assert found == pytest.approx(losses, abs=1e-6)
        for name, values in expected.items():
            torch.testing.assert_close(
                torch.tensor(weights[name]), torch.tensor(values), rtol=0, atol=1e-6
            )
