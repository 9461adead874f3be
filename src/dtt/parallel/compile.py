"""Compilation of a model's blocks, which training can go on without."""

from __future__ import annotations

from torch import nn

from dtt.runtime.compilation import compiler


def compile_each_block(model: nn.Module) -> None:
    """Compile the blocks (`model.layers`) one by one when they are first called, in place.

    They share one compilation, which is much quicker than the whole model's and hardly slower to
    run. Shapes stay static: a last, smaller batch of an evaluation, or another size of
    `train.batch_schedule` and `train.context_schedule`, is compiled on its own, rather than making
    the training graph dynamic. Where compilation fails, for want of a compiler or by a fault of
    torch's, all blocks run as they are, and the log says why, once.
    """
    for block in model.get_submodule("layers").children():
        # Not `block.compile()`: hooks, as those of FSDP2, stay outside of what is compiled.
        block.forward = compiler.compiled(block.forward)
