"""Weights of a library's model are read from files part by part, with the values of the library."""

from __future__ import annotations

import json
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from dtt.base.errors import DttError
from dtt.checkpoint.tensors import Stored
from dtt.hf import library_folder
from dtt.hf.read import stored_tensors, weight_files
from dtt.mesh.sharding import FullTensor

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
TYPES: dict[str, dict[str, Any]] = {
    # A matrix for each expert in the folder, and stacks of all in the library's model.
    "mixtral": {"num_local_experts": 8},
    "qwen3_next": {
        "num_experts": 8, "moe_intermediate_size": 16, "head_dim": 8,
        "shared_expert_intermediate_size": 16,
    },
    "deepseek_v3": {
        "n_routed_experts": 8, "moe_intermediate_size": 16, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 12, "kv_lora_rank": 12, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
        "num_experts_per_tok": 2,
    },
    # Other rules: renamed, transposed, split, tied.
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8},
    "granitemoehybrid": {
        "num_local_experts": 4, "shared_intermediate_size": 16, "mamba_n_heads": 8,
        "layer_types": ["attention", "attention"],
    },
    "sarvam_moe": {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64},
}  # fmt: skip
WHOLE = ("sarvam_moe",)
"""Types with tensors that are split into several parameters: read as a whole for each of them."""


def written(kind: str, folder: Path) -> Any:
    """Write a model of a type in two files or more, as the library does; return what it reads."""
    sizes = TYPES[kind] if kind == "gpt2" else {**SIZES, **TYPES[kind]}
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.1 * torch.randn_like(tensor))
    model.save_pretrained(folder, max_shard_size="40KB")
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def read(folder: Path) -> dict[str, FullTensor]:
    config = json.loads((folder / "config.json").read_text())
    model = library_folder.architecture(config, folder).skeleton
    return library_folder.named_by_library(stored_tensors(weight_files(folder)), model, folder)


class Reads:
    """Counts bytes that are read from files: all, and the most that were in memory at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read, self.live, self.most, self.by_name = 0, 0, 0, Counter[str]()
        inner = Stored.__getitem__

        def counted(stored: Stored, index: tuple[slice, ...]) -> Tensor:
            tensor = inner(stored, index)
            self.read += tensor.nbytes
            self.by_name[stored.name] += tensor.nbytes
            self.live += tensor.nbytes
            self.most = max(self.most, self.live)
            weakref.finalize(tensor, self.freed, tensor.nbytes)
            return tensor

        monkeypatch.setattr(Stored, "__getitem__", counted)

    def freed(self, size: int) -> None:
        self.live -= size


@pytest.mark.parametrize("kind", TYPES)
def test_each_of_two_ranks_reads_its_half_with_the_values_of_the_library(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    expected, reads = written(kind, tmp_path).state_dict(), Reads(monkeypatch)
    state = read(tmp_path)
    assert reads.read == 0
    heads = {"lm_head.weight"} if "lm_head.weight" not in state else set()
    assert state.keys() == expected.keys() - heads
    for name, tensor in state.items():
        rows = tensor.shape[0] if tensor.shape else 1
        for part in (slice(0, (rows + 1) // 2), slice((rows + 1) // 2, rows)):
            index = (part,) if tensor.shape else ()
            assert torch.equal(tensor[index], expected[name][index]), name
    files = stored_tensors(weight_files(tmp_path)).values()
    sizes = [torch.empty(one.shape, dtype=one.dtype, device="meta").nbytes for one in files]
    # Each byte is read by one of the two ranks, and no more than a tensor of a file is in memory.
    if kind not in WHOLE:
        assert reads.read == sum(sizes)
    assert reads.most <= max(sizes)


def test_a_part_of_a_stack_of_experts_is_read_from_these_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, state = written("mixtral", tmp_path).state_dict(), read(tmp_path)
    name, reads = "model.layers.1.mlp.experts.gate_up_proj", Reads(monkeypatch)
    index = (slice(2, 4), slice(0, 10), slice(3, 5))
    assert torch.equal(state[name][index], expected[name][index])
    assert reads.by_name == {
        f"model.layers.1.block_sparse_moe.experts.{expert}.{part}.weight": 48 * 32 * 4
        for expert in (2, 3)
        for part in ("w1", "w3")
    }


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model.norm.weight": None}, "1 missing: model.norm.weight"),
        ({"model.layers.7.x": torch.zeros(2)}, "1 unknown: model.layers.7.x"),
        (
            {"model.norm.weight": torch.zeros(31)},
            r"1 of another shape: model.norm.weight is \[31]",
        ),
        ({"lm_head.weight": torch.zeros(128, 32)}, "the head is tied, but lm_head.weight"),
    ],
)
def test_weights_of_another_model_are_refused_by_name(
    tmp_path: Path, change: dict[str, Tensor | None], expected: str
) -> None:
    config = {**SIZES, "model_type": "granite", "tie_word_embeddings": True}
    library_folder.made(config).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_config(library_folder.made(config))
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path) | change
    save_file({name: t for name, t in tensors.items() if t is not None}, path)
    with pytest.raises(DttError, match=expected):
        read(tmp_path)


def test_a_table_of_integers_that_no_checkpoint_would_have_is_refused(tmp_path: Path) -> None:
    kind = "deepseek_v4"  # its first layers choose experts by token
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    config = transformers.AutoConfig.for_model(
        kind, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
        index_n_heads=2, head_dim=8, index_head_dim=16, qk_rope_head_dim=8, n_routed_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=16, q_lora_rank=12, o_lora_rank=12,
        vocab_size=128, sliding_window=16, index_topk=16,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    name = "model.layers.0.mlp.gate.tid2eid"
    assert name in model.state_dict()
    assert name not in read(tmp_path)  # zeros, as in a new model
    model.get_buffer(name).random_(0, 8, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(tmp_path)
    with pytest.raises(DttError, match=name):
        read(tmp_path)
