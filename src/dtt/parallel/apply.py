"""Put a single-device model on this process's device and among its peers: compile, then DDP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dtt.runtime.dist import World

SHAPES = 128
"""That are compiled: more than schedules of batches and contexts come to."""


def apply(model: nn.Module, world: World, compile_blocks: bool) -> nn.Module:
    """Returns the module to call in training; `model` keeps the parameters and their names.

    Blocks (`model.layers`) are compiled one by one: they share one compilation, which is much
    quicker than the whole model's and hardly slower to run. Shapes stay static: a last, smaller
    batch of an evaluation, or another size of `train.batch_schedule` and `train.context_schedule`,
    is compiled on its own, rather than making the training graph dynamic.
    """
    if compile_blocks:
        # After so many shapes (by itself 8) torch runs the others uncompiled.
        torch._dynamo.config.recompile_limit = SHAPES  # noqa: SLF001  (it has no public name)
        for block in model.get_submodule("layers").children():
            block.compile(dynamic=False)
    if world.size == 1:
        return model
    ids = [world.device.index] if world.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)


@contextmanager
def gradient_sync(module: nn.Module, wanted: bool) -> Iterator[None]:
    """Average gradients over ranks in the backward pass inside, or (accumulating) not yet."""
    if wanted or not isinstance(module, DistributedDataParallel):
        yield
    else:
        with module.no_sync():
            yield


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Forward passes inside multiply in `precision` (`fp32` or `bf16`)."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
