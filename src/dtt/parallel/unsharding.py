"""A copy of a sharded model with all weights on each rank, to generate texts with a KV cache."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dtt.base import host_memory
from dtt.mesh.dist import World
from dtt.model.decoder import Decoder, make_model
from dtt.parallel.apply import release


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
