"""Stacks of experts in dtt, one tensor per expert in a Hugging Face folder, in both directions."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from dtt.base.errors import DamagedError
from dtt.hf.weights import HFTensors, apply_rules
from dtt.model.families.base import WeightRule, renamed

EXPERTS, DIM, FFN = 12, 4, 6
LAYER = "model.layers.{i}.mlp"
QWEN3_MOE = (
    *renamed({"model.embed_tokens": "embed", f"{LAYER}.gate": "layers.{i}.mlp.router"}),
    WeightRule(f"{LAYER}.experts.{{e}}.gate_proj.weight", ("layers.{i}.mlp.experts.gate",)),
    WeightRule(f"{LAYER}.experts.{{e}}.up_proj.weight", ("layers.{i}.mlp.experts.up",)),
    WeightRule(f"{LAYER}.experts.{{e}}.down_proj.weight", ("layers.{i}.mlp.experts.down",)),
)
"""The names of Qwen3-MoE on disk."""
FUSED = (
    *QWEN3_MOE[:2],
    WeightRule(
        f"{LAYER}.experts.{{e}}.gate_up_proj.weight",
        ("layers.{i}.mlp.experts.gate", "layers.{i}.mlp.experts.up"),
    ),
    WeightRule(f"{LAYER}.experts.down_proj", ("layers.{i}.mlp.experts.down",), transpose=True),
)
"""Gate and up of each expert in one tensor; down of all experts in one [experts, in, out]."""


def rules(table: tuple[WeightRule, ...]) -> list[WeightRule]:
    """Return the rules of two layers."""
    return [table[0], *(rule.of_layer(i) for i in range(2) for rule in table[1:])]


def parameters() -> dict[str, Tensor]:
    shapes = {"embed.weight": (9, DIM)}
    for i in range(2):
        shapes |= {
            f"layers.{i}.mlp.router.weight": (EXPERTS, DIM),
            f"layers.{i}.mlp.experts.gate": (EXPERTS, FFN, DIM),
            f"layers.{i}.mlp.experts.up": (EXPERTS, FFN, DIM),
            f"layers.{i}.mlp.experts.down": (EXPERTS, DIM, FFN),
        }
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def exported() -> dict[str, Tensor]:
    """The tensors of the Qwen3-MoE layout."""
    return dict(HFTensors(parameters(), rules(QWEN3_MOE)))


@pytest.mark.parametrize("table", [QWEN3_MOE, FUSED], ids=["per expert", "fused"])
def test_export_then_import_changes_no_bit(table: tuple[WeightRule, ...]) -> None:
    state = parameters()
    tensors = HFTensors(state, rules(table))
    again = apply_rules(tensors, rules(table), state)
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())


def test_several_stacks_are_concatenated_along_the_outputs_of_each_expert() -> None:
    state = parameters()
    tensors = HFTensors(state, rules(FUSED))
    gate, up = (state[f"layers.0.mlp.experts.{name}"] for name in ("gate", "up"))
    fused = tensors["model.layers.0.mlp.experts.5.gate_up_proj.weight"]
    assert torch.equal(fused, torch.cat([gate[5], up[5]]))
    down = tensors["model.layers.0.mlp.experts.down_proj"]
    assert torch.equal(down, state["layers.0.mlp.experts.down"].mT)


def test_a_tensor_is_converted_when_it_is_read_and_not_kept() -> None:
    tensors = HFTensors(parameters(), rules(QWEN3_MOE))
    name = "model.layers.0.mlp.experts.5.up_proj.weight"
    first, second = tensors[name], tensors[name]
    assert first.data_ptr() != second.data_ptr()


def test_missing_experts_are_named(exported: dict[str, Tensor]) -> None:
    for e in (3, 11):
        del exported[f"model.layers.1.mlp.experts.{e}.up_proj.weight"]
    expected = "2 missing ['model.layers.1.mlp.experts.11.up_proj.weight'"
    with pytest.raises(DamagedError, match=re.escape(expected)):
        apply_rules(exported, rules(QWEN3_MOE), parameters())


def test_an_expert_too_many_is_named(exported: dict[str, Tensor]) -> None:
    exported["model.layers.0.mlp.experts.12.up_proj.weight"] = torch.zeros(FFN, DIM)
    with pytest.raises(DamagedError, match=r"0 missing \[\], 1 unknown .*experts\.12\.up_proj"):
        apply_rules(exported, rules(QWEN3_MOE), parameters())


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(DIM, FFN), r"experts\.7\.up_proj\.weight is \[4, 6\], not \[6, 4\]"),
        (torch.zeros(FFN, DIM, dtype=torch.int8), r"up_proj\.weight is torch\.int8"),
        (torch.zeros(FFN, DIM).bfloat16(), r"is torch\.bfloat16, expert 0 is torch\.float32"),
    ],
    ids=["shape", "integers", "dtype"],
)
def test_an_expert_that_differs_from_the_others_is_named(
    exported: dict[str, Tensor], tensor: Tensor, message: str
) -> None:
    exported["model.layers.0.mlp.experts.7.up_proj.weight"] = tensor
    with pytest.raises(DamagedError, match=message):
        apply_rules(exported, rules(QWEN3_MOE), parameters())
