"""Compilation of a model's blocks, which training can go on without."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dtt.runtime.log import log

SHAPES = 128
"""That are compiled: more than schedules of batches and contexts come to."""

Forward = Callable[..., Tensor]


def compile_each_block(model: nn.Module) -> None:
    """Compile the blocks (`model.layers`) one by one when they are first called, in place.

    They share one compilation, which is much quicker than the whole model's and hardly slower to
    run. Shapes stay static: a last, smaller batch of an evaluation, or another size of
    `train.batch_schedule` and `train.context_schedule`, is compiled on its own, rather than making
    the training graph dynamic. Where compilation fails, for want of a compiler or by a fault of
    torch's, all blocks run as they are, and the log says why, once.
    """
    # After so many shapes (by itself 8) torch runs the others uncompiled.
    torch._dynamo.config.recompile_limit = SHAPES  # noqa: SLF001  (it has no public name)
    compiler = Compiler()
    for block in model.get_submodule("layers").children():
        # Not `block.compile()`: hooks, as those of FSDP2, stay outside of what is compiled.
        block.forward = compiler.compiled(block.forward)


class Compiler:
    """Compiles until it fails once."""

    def __init__(self) -> None:
        self.works = True

    def compiled(self, plain: Forward) -> Forward:
        """`plain`, faster if this works."""
        fast = torch.compile(plain, dynamic=False)

        def forward(*inputs: object) -> Tensor:
            if self.works:
                try:
                    return fast(*inputs)
                except torch._dynamo.exc.TorchDynamoException as error:  # noqa: SLF001
                    self.works = False
                    log.warning("training goes on uncompiled: %s", _reason(error))
            return plain(*inputs)

        return forward


def _reason(error: Exception) -> str:
    """Its first line that says something; torch tells how to debug itself in dozens more."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith("backend=")]
    return (told or lines or [type(error).__name__])[0]
