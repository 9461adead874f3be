"""Tiny models of transformers, by type, with a layer of each kind that the type has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dtt.model.architecture import BuiltArchitecture
from dtt.model.decoder import make_model
from dtt.model.init import initialize
from dtt.model.library.family import TransformersFamily

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
HEADS = {**SIZES, "head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_routed_experts": 8}
LATENT = {
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": 24,
    "kv_lora_rank": 24, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}  # fmt: skip
TYPES: dict[str, dict[str, Any]] = {
    "lfm2": SIZES,
    "granite": SIZES,
    "cohere2": HEADS,
    "ministral3": HEADS,
    "seed_oss": {**HEADS, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "gemma2": HEADS,
    "nanochat": SIZES,
    "glm4_moe": {**HEADS, **EXPERTS},
    "deepseek_v3": {**SIZES, **EXPERTS, **LATENT},
    "gpt_oss": {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_5_text": HEADS,
    "mamba2": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "state_size": 16,
        "n_groups": 1, "chunk_size": 16,
    },
}  # fmt: skip
JOINED = ("qwen3_5_text", "mamba2")
"""Types whose state runs through all tokens of a row: no mask separates documents."""
IN_FP32 = ("mamba2", "qwen3_5_text")
"""Types of which the library computes a part in fp32, whatever dtype the weights have."""
ROUNDED = ("cohere2", "gemma2", "glm4_moe", "deepseek_v3", "gpt_oss")
"""Types of which that shows only in the shapes of other rows: norms, routers, angles."""


def built(kind: str, **more: Any) -> BuiltArchitecture:
    """Return the architecture of a type, with the sizes of `TYPES` and the keys `more`."""
    section = TransformersFamily(config={"model_type": kind, **TYPES.get(kind, HEADS), **more})
    return BuiltArchitecture(section=section, vocab_size=256, max_seq_len=64)


def initialized(arch: BuiltArchitecture, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model with initial values, which evaluates."""
    model = make_model(arch)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device="cpu")
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    initialize(model, seed=0)
    if model.tied:
        model.library.tie_weights()  # its own head is none of ours
    return model.to(dtype).eval()


def ids(*shape: int) -> Tensor:
    """Return ids of the same text in every call."""
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(0))


def exact(kind: str, *, separate: bool) -> float:
    """Return the difference in fp64 that the parts in fp32 of a type explain."""
    in_fp32 = (*IN_FP32, *(ROUNDED if separate else ()))
    return 1e-6 if kind in in_fp32 else 1e-10
