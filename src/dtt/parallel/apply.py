"""Put a single-device model on the devices of a mesh, from outside: tensor parallelism, then
rematerialisation, then compilation, then FSDP2 or DDP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dtt.parallel.compile import compile_each_block
from dtt.parallel.mesh import Layout
from dtt.parallel.remat import rematerialize
from dtt.parallel.tensor import apply_tensor, overlap
from dtt.runtime.dist import World
from dtt.runtime.log import log
from dtt.runtime.sharding import held


def apply(
    model: nn.Module,
    world: World,
    layout: Layout,
    *,
    compile_blocks: bool,
    remat: Literal["none", "full", "selective"] = "none",
    remat_every: int = 1,
    precision: str = "fp32",
    reshard: bool = True,
) -> nn.Module:
    """Returns the module to call in training; `model` keeps the parameters and their names.

    Where the layout is sharded, parameters become DTensors in place; a model on the meta device
    can then be given memory for this process's part alone. Unless `precision` is fp32, the weights
    that are gathered for a product are bf16, and gradients are summed in fp32. With `reshard` they
    are let go between forward and backward pass.
    """
    blocks = list(model.get_submodule("layers").children())
    if layout.sizes.tensor > 1:
        apply_tensor(model, layout.part("tensor"))
    if remat != "none":
        rematerialize(model, remat, remat_every)
    if compile_blocks and remat == "full" and layout.sizes.tensor > 1:  # torch 2.13 fails on these
        log.info("not compiled: that goes with tensor parallelism and remat selective, not full")
        compile_blocks = False
    if compile_blocks and layout.sizes.tensor > 1 and world.device.type == "cuda":
        log.info("%s", overlap(layout.part("tensor"), world))
    if compile_blocks:
        compile_each_block(model)
        # Eager on a CPU, where blocks of logits stay in its cache. No Decoder is known here.
        model.fused_loss = world.device.type == "cuda"  # type: ignore[assignment]
    if layout.sharded:
        _shard(model, blocks, layout, precision, reshard)
        return model
    if world.size == 1:
        return model
    if compile_blocks:
        # Else Dynamo splits a block's graph wherever 25 MB of gradients are ready, to overlap their
        # all-reduce; between blocks, each a graph of its own, DDP's hooks do that anyway.
        torch._dynamo.config.optimize_ddp = False  # noqa: SLF001  (it has no public name)
    ids = [world.device.index] if world.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)


def _shard(
    model: nn.Module, blocks: Sequence[nn.Module], layout: Layout, precision: str, reshard: bool
) -> None:
    """FSDP2 (arXiv 2304.11277, 2411.00284): each block's weights are gathered when it needs them.

    What is outside of the blocks is gathered together, as embedding and head may be one.
    """
    dims = ("replicate", "shard") if layout.sizes.replicate > 1 else ("shard",)
    mesh = layout.part(*dims)
    policy = MixedPrecisionPolicy()
    if precision != "fp32":
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,  # angles of rotations must stay fp32
        )
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)


@contextmanager
def gradient_sync(module: nn.Module, last: bool, each: bool = False) -> Iterator[None]:
    """Average gradients over ranks in the backward pass inside if it is the last of a step.

    With `each` sharded ones are always summed over shards, if not over copies.
    """
    if isinstance(module, DistributedDataParallel) and not last:
        with module.no_sync():
            yield
        return
    for part in module.modules():
        if isinstance(part, FSDPModule):  # the first, outermost one sets it for all
            part.set_requires_gradient_sync(last or each)
            part.set_requires_all_reduce(last)
            break
    yield


def release(module: nn.Module) -> None:
    """Let go of the weights that a forward pass without a backward one has left gathered: the next
    one is to see what the parameters hold by then."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


@torch.no_grad()
def clip_gradients(parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
    """Scale gradients to a norm of at most `limit` over all of them; returns the norm before, [].

    As `nn.utils.clip_grad_norm_`, which this is for gradients that are fp32 and not cut. Of others
    each process squares its parts, in fp32, divided by how many hold the same: one exchange.
    """
    if not isinstance(parameters[0], DTensor) and parameters[0].dtype is torch.float32:
        return nn.utils.clip_grad_norm_(parameters, limit, foreach=True)
    parts = [held(p.grad) for p in parameters if p.grad is not None]
    gradients = [part.local for part in parts]
    norms = torch._foreach_norm(gradients, dtype=torch.float32)  # noqa: SLF001  (as torch's own clipping)
    torch._foreach_mul_(norms, [part.copies**-0.5 for part in parts])
    square = torch.stack(norms).square().sum()
    if dist.is_initialized():
        dist.all_reduce(square)
    norm = square.sqrt()
    torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))
    return norm


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Forward passes inside multiply fp32 weights in bf16, if `precision` is that, or fp8."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision in ("bf16", "fp8"))
