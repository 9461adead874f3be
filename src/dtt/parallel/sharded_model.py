"""Generation with a model whose weights are divided over several ranks, divided or whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dtt.base import host_memory
from dtt.base.log import log
from dtt.config.parallel import Sizes
from dtt.mesh.dist import World
from dtt.mesh.mesh import make_mesh
from dtt.mesh.sharding import fill
from dtt.model.architecture import AnyArchitecture, BuiltArchitecture
from dtt.model.contract import Model
from dtt.model.decoder import Decoder, make_model
from dtt.model.decoding import ReaderDecoding, whole_passes
from dtt.model.mesh_divisibility import misfits
from dtt.parallel.apply import allocate_shards, apply, release

if TYPE_CHECKING:
    from dtt.hf.read import LoadedModel


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


@torch.no_grad()
def whole_copy(model: nn.Module, world: World) -> Decoder | None:
    """Return a copy of a sharded `Decoder` in evaluation mode, or None if a rank lacks memory.

    All ranks call this together. The copy gathers all weights once; a token of the sharded model
    would gather them again, and compute all tokens before it. The copy may take half of the free
    memory, as keys and values need some. None also for a pipeline, whose ranks lack layers, and for
    a model with adapters.
    """
    if not isinstance(model, Decoder):
        return None
    release(model)  # what is gathered may be older than the shards
    params = dict(model.named_parameters())
    if any(model.role(name, param) == "adapter" for name, param in params.items()):
        return None
    size = sum(param.numel() * param.element_size() for param in params.values())
    if any(world.gather(2 * size > _free(world))):
        return None
    dtype = next(iter(params.values())).dtype
    whole = make_model(model.arch, dtype=dtype)
    assert isinstance(whole, Decoder)
    full = {
        name: param.full_tensor() if isinstance(param, DTensor) else param.detach()
        for name, param in params.items()
    }
    whole.load_state_dict(full, assign=True)
    return whole.eval()


def _free(world: World) -> int:
    """Return the bytes that this rank may still allocate on its device."""
    if world.device.type == "cuda":
        # Blocks that torch keeps for later tensors are free, too.
        kept = torch.cuda.memory_reserved(world.device) - torch.cuda.memory_allocated(world.device)
        return torch.cuda.mem_get_info(world.device)[0] + kept
    return host_memory.free() // world.ranks.local_size
