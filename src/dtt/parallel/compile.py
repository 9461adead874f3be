"""Compilation of a model's blocks, with a fallback to uncompiled training.

dtt compiles the `forward` of each block, so that the hooks of FSDP2 stay outside. All blocks
share one compilation per shape, which compiles forward and backward together. FlexAttention and
the loss on a GPU are compiled the same way (`mesh/compilation.py`). If compilation fails on any
rank, all ranks continue uncompiled from the next step on (they agree in the all-reduce of
`requests.agreed`), and the log states the reason once. Either all ranks overlap collectives with
matrix products, or none does. Under DDP, Dynamo's own splitting of graphs by buckets is off,
because blocks are separate graphs already and DDP's hooks run between them.
"""

from __future__ import annotations

from dtt.mesh.compilation import compiler
from dtt.model.contract import Model
from dtt.model.experts import routers


def compile_each_block(model: Model, *, apart: bool = False) -> None:
    """Compile each block (`model.layers`) when it is first called, in place.

    Those with a mixture are left out if their experts are sharded `apart`: a graph would break at
    the exchange of rows, and in the hooks of FSDP2 around it.

    All blocks share one compilation, which is much faster than compiling the whole model; the
    compiled code is hardly slower. Shapes stay static: a smaller last batch of an evaluation, or a
    different size of `train.batch_schedule` and `train.context_schedule`, is compiled separately
    and does not make the training graph dynamic. If compilation fails, because there is no compiler
    or by a bug in torch, all blocks run uncompiled, and the log reports the reason once.
    """
    # Each block has the same code and shapes, so Dynamo compiles the first and reuses its graph.
    left_out = routers(model) if apart else {}
    for i, block in model.blocks().items():
        if i in left_out:
            continue
        # `block.compile()` would also compile the hooks, as those of FSDP2.
        block.forward = compiler.compiled(block.forward)
