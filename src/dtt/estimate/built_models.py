"""Models that their family builds itself, as the formulas see them.

Weights, their roles, optimizers and FLOPs are those of the model. What its blocks keep for the
backward pass is counted on tensors without values. For the rest, such as the working memory of a
block, an `Architecture` of the same sizes stands for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dtt.base.log import log
from dtt.config.adapter import AdapterConfig, LoraConfig
from dtt.config.model import NoRopeScaling
from dtt.config.value_types import InitialStd
from dtt.model.architecture import Architecture, BuiltArchitecture
from dtt.model.contract import Model
from dtt.model.lora import attach
from dtt.model.token_context import Context

TRACED_TOKENS = 331
"""Length of the sequence whose pass is traced: a prime, that no width of a model has, so that
scores of attention [T, T] are known by their shape."""


def stand_in(arch: BuiltArchitecture) -> Architecture:
    """Return an architecture of the same sizes, for the formulas that need to know a block."""
    model = arch.skeleton
    config = model.config.get_text_config() if hasattr(model, "config") else None

    def value(name: str) -> Any:
        try:
            return getattr(config, name, None)
        except RuntimeError:  # a size that differs from layer to layer, such as Gemma 4's head_dim
            return vars(config).get(name)

    def size(*names: str, otherwise: int) -> int:
        found = map(value, names)
        return next((n for n in found if isinstance(n, int) and n > 0), otherwise)

    dim, layers = model.head_weight().shape[1], arch.n_layers
    heads = size("num_attention_heads", "n_heads", otherwise=max(1, dim // 64))
    kv_heads = size("num_key_value_heads", otherwise=heads)
    inside = sum(weight.numel() for _, weight in model.linear_weights()) // max(1, layers)
    width = size(
        "intermediate_size", "ffn_dim", otherwise=max(dim, (inside - 4 * dim**2) // (3 * dim))
    )
    if per_token := size("num_experts_per_tok", otherwise=0):
        width = per_token * size("moe_intermediate_size", otherwise=width)
    roles = {model.role(name, parameter) for name, parameter in model.named_parameters()}
    return Architecture(
        family=arch.family, vocab_size=arch.vocab_size, max_seq_len=arch.max_seq_len,
        dim=dim, n_layers=layers, n_heads=heads, n_kv_heads=kv_heads,
        head_dim=size("head_dim", otherwise=dim // heads), ffn_dim=width,
        norm="rmsnorm", norm_eps=1e-6, qk_norm="none", norm_placement="pre",
        position="rope", rope_theta=1e4, rope_scaling=NoRopeScaling(), partial_rotary_factor=1.0,
        rope_layers=(True,) * layers, rope_local_theta=None, windows=(None,) * layers,
        mlp="swiglu", bias="none", tie_embeddings="head" not in roles, embed_scale=1.0,
        attn_scale=1.0, residual_scale=1.0, logit_scale=1.0, logit_softcap=None,
        init_std=InitialStd(), dropout=0.0,
    )  # fmt: skip


def formula_names(model: Model) -> dict[str, str]:
    """Return the names of parameters as the formulas know them, such as `layers.0.…`."""
    blocks = {id(p): i for i, block in model.blocks().items() for p in block.parameters()}
    names = {}
    for name, parameter in model.named_parameters():
        role = model.role(name, parameter)
        if (block := blocks.get(id(parameter))) is not None:
            names[name] = f"layers.{block}.{name}"
        elif role in ("embed", "head") and parameter.shape == model.head_weight().shape:
            names[name] = f"{role}.weight"
        else:
            names[name] = f"other.{name}"
    return names


def kept_per_token(
    arch: BuiltArchitecture, adapter: AdapterConfig, dtype: torch.dtype, seq_len: int
) -> float | None:
    """Return the bytes that a block keeps for each token of a sequence, in the dtype of products.

    By a pass of tensors without values. None for a model of which a size depends on values, as the
    rows of experts do.
    """
    key = f"{arch.section.model_dump_json()} {arch.vocab_size} {adapter.model_dump_json()} {dtype}"
    if key not in _TRACED:
        _TRACED[key] = _traced(arch, adapter, dtype)
    traced = _TRACED[key]
    return None if traced is None else traced[0] + seq_len * traced[1]


_TRACED: dict[str, tuple[float, float] | None] = {}
"""What was traced in this process: the memory at each moment of a step asks for it."""


def _traced(
    arch: BuiltArchitecture, adapter: AdapterConfig, dtype: torch.dtype
) -> tuple[float, float] | None:
    """Return the bytes for each token, and in addition those for each token that it attends to."""
    model = arch.build().cast(dtype)
    if isinstance(adapter, LoraConfig):
        attach(model, adapter, dtype)
    model = model.to("meta").train()
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        # By storage, as views of one tensor are kept once. The tensors themselves are held, so that
        # no other one gets the same address meanwhile.
        kept[tensor.untyped_storage()._cdata] = tensor  # noqa: SLF001
        return tensor

    tokens_1T = torch.zeros(1, TRACED_TOKENS, dtype=torch.long, device="meta")
    try:
        with saved_tensors_hooks(keep, _itself):
            model.hidden(tokens_1T, Context(tokens_1T))
    except (NotImplementedError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
        log.info("activations are those of ordinary blocks of the same sizes: %s", why)
        return None
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage()._cdata, None)  # noqa: SLF001
    square = (TRACED_TOKENS, TRACED_TOKENS)
    scores = [tensor for tensor in kept.values() if tensor.shape[-2:] == square]
    of_scores = sum(tensor.untyped_storage().nbytes() for tensor in scores)
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    # Tensors without values have no kernel of attention, and are computed with all scores. Only
    # the library's own plain attention really keeps these.
    config = getattr(model, "config", None)
    plain = getattr(config, "_attn_implementation", None) == "eager"
    tokens = TRACED_TOKENS * max(1, arch.n_layers)
    return (total - of_scores) / tokens, plain * of_scores / tokens / TRACED_TOKENS


def _itself(tensor: Any) -> Any:
    return tensor
