"""Activation checkpointing: recomputation of activations in the backward pass.

See Chen et al., 2016, arXiv 1604.06174.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from dtt.model.contract import Model
from dtt.model.experts import routers

MATRIX_PRODUCTS = {"aten::mm", "aten::addmm", "aten::_scaled_mm"}
"""Operators that linear layers call. Batched ones are not included: they compute the [T, T] scores
of attention."""
COSTLY = (
    "aten::_scaled_dot_product",  # every kernel of SDPA
    "dtt::",  # attention in tiles
    "flex_attention",
    "inductor_compiled_code",  # compiled FlexAttention
    "_c10d_functional::",  # collectives
)
"""Name prefixes of operators whose outputs are saved, as recomputing them costs more than the
memory."""


def rematerialize(model: Model, kind: Literal["full", "selective"], *, apart: bool = False) -> None:
    """Checkpoint all blocks (`model.layers`), in place.

    `full` saves only the input of a block and runs all of it twice. `selective` also saves the
    outputs of attention, collectives and every second matrix multiplication (torchtitan's choice,
    arXiv 2410.06511); it recomputes cheap operators, and those whose output is large for their
    cost. The RNG state is restored for the recomputation. Names of modules and parameters do not
    change. Call this before compilation.

    Blocks whose experts are sharded `apart` are always recomputed in full: inside a block, the
    hooks of FSDP2 call other operators when it is recomputed, which torch 2.13 refuses where some
    are saved.
    """
    forward = {"full": _full, "selective": _selective}[kind]
    in_full = routers(model) if apart else {}
    for i, block in model.blocks().items():
        # All blocks share one function, and so one compilation.
        block.forward = (_full if i in in_full else forward).__get__(block)


def _full(block: nn.Module, *inputs: Any, **options: Any) -> Any:
    # The non-reentrant version works with DDP, FSDP2 and compilation, and saves the RNG state.
    # Compiled, attention counts as random even without dropout, and `preserve_rng_state=False`
    # would not change that (torch 2.13). It costs two calls on the host a block, and no wait.
    return checkpoint(type(block).forward, block, *inputs, use_reentrant=False, **options)


def _selective(block: nn.Module, *inputs: Any, **options: Any) -> Any:
    return _full(block, *inputs, context_fn=_contexts, **options)


def _contexts() -> Any:
    """Return the selective-checkpoint contexts of a block's forward pass and its recomputation."""
    products: Counter[bool] = Counter()

    def policy(
        context: SelectiveCheckpointContext, operator: Any, *_: Any, **__: Any
    ) -> CheckpointPolicy:
        name = operator.name()
        kept = name.startswith(COSTLY)
        if name in MATRIX_PRODUCTS:
            # Every second product is recomputed: half of the memory of all products for half of
            # their time.
            products[context.is_recompute] += 1  # before torch 2.13, called in both passes
            kept = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
