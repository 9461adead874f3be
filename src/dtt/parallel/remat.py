"""Rematerialisation (activation checkpointing): activations that the backward pass computes again
rather than keeps (Chen et al., 2016, arXiv 1604.06174)."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

PRODUCTS = {"aten::mm", "aten::addmm", "aten::_scaled_mm"}
"""What linear layers come to. Batched ones are left out: they are [T, T] scores of attention."""
COSTLY = (
    "aten::_scaled_dot_product",  # every kernel of SDPA
    "dtt::",  # attention in tiles
    "flex_attention",
    "inductor_compiled_code",  # the same, compiled
    "_c10d_functional::",  # what ranks exchange
)
"""How the names begin of what is dearer to do again than its result is to keep."""


def rematerialize(model: nn.Module, kind: Literal["full", "selective"], every: int) -> None:
    """Let the first of every `every` blocks (`model.layers`) compute activations again, in place.

    `full` keeps the input of a block alone, and runs all of it twice. `selective` also keeps what
    attention, exchanges between ranks and every second matrix product give (torchtitan's choice,
    arXiv 2410.06511), and computes again what is cheap, or large for what it costs. Random numbers
    are drawn alike both times. Names of modules and parameters stay; comes before compilation.
    """
    forward = {"full": _full, "selective": _selective}[kind]
    for block in list(model.get_submodule("layers").children())[::every]:
        # A method of a function that all of them share: so do they one compilation.
        block.forward = forward.__get__(block)


def _full(block: nn.Module, *inputs: Any) -> Tensor:
    out: Tensor = checkpoint(type(block).forward, block, *inputs, use_reentrant=False)
    return out


def _selective(block: nn.Module, *inputs: Any) -> Tensor:
    out: Tensor = checkpoint(
        type(block).forward, block, *inputs, use_reentrant=False, context_fn=_contexts
    )
    return out


def _contexts() -> Any:
    """Of one forward pass of one block, and of its repetition."""
    products: Counter[bool] = Counter()

    def policy(
        context: SelectiveCheckpointContext, operator: Any, *_: Any, **__: Any
    ) -> CheckpointPolicy:
        name = operator.name()
        kept = name.startswith(COSTLY)
        if name in PRODUCTS:
            products[context.is_recompute] += 1  # before torch 2.13 both passes ask
            kept = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
