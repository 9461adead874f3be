"""A model that is divided over several ranks, to generate with what one GPU cannot hold."""

from __future__ import annotations

import torch

from dtt.base.log import log
from dtt.config.parallel import Sizes
from dtt.hf.read import LoadedModel
from dtt.mesh.dist import World
from dtt.mesh.mesh import make_mesh
from dtt.mesh.sharding import fill
from dtt.model.architecture import AnyArchitecture, BuiltArchitecture
from dtt.model.contract import Model
from dtt.model.decoder import make_model
from dtt.model.decoding import ReaderDecoding, whole_passes
from dtt.model.mesh_divisibility import misfits
from dtt.parallel.apply import allocate_shards, apply


def load_sharded(trained: LoadedModel, world: World) -> tuple[Model, ReaderDecoding]:
    """Return a model with its weights divided over all ranks, and how it decodes; collective.

    The weights keep their dtypes. Each token is a forward pass over the complete text.
    """
    sizes = layout_of_weights(trained.arch, world.size)
    model = make_model(trained.arch)
    empty = {
        name: torch.empty(tuple(one.shape), dtype=one.dtype, device="meta")
        for name, one in trained.state.items()
    }
    # A table that a model of a user's own keeps in a buffer is in no checkpoint.
    kept = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}
    model.load_state_dict(kept | empty, assign=True)
    model.requires_grad_(requires_grad=False)
    layout = make_mesh(sizes, world, None if trained.arch.mixture is None else 1)
    apply(model, world, layout, compile_blocks=False)
    allocate_shards(model, world.device)
    for name, weight in model.named_parameters():
        fill(weight, trained.state[name])
    how = f"tensor {sizes.tensor}, shard {sizes.shard}"
    log.info("the weights are divided over %d ranks: %s", world.size, how)
    return model.eval(), whole_passes(model, sizes.tensor, world.from_first)


def layout_of_weights(arch: AnyArchitecture, ranks: int) -> Sizes:
    """Return a mesh of `ranks` with as much tensor parallelism as the sizes of a model permit.

    Its ranks compute with the weights that they hold. What is sharded otherwise, each pass, and so
    each token of each text, gathers first.
    """
    if isinstance(arch, BuiltArchitecture):
        return Sizes(shard=ranks)
    divisors = (n for n in range(ranks, 0, -1) if ranks % n == 0)
    tensor = next(n for n in divisors if not any(misfits(Sizes(tensor=n), arch, set())))
    return Sizes(shard=ranks // tensor, tensor=tensor)
