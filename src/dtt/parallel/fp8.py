"""fp8 linear layers through torchao, for the shapes on which a benchmark finds a speedup.

torchao scales inputs, weights and gradients so that their largest value is representable
(Micikevicius et al., arXiv 2209.05433). Only large matrix multiplications gain more than this
scaling costs.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from dtt.base.errors import EnvironmentUnfit
from dtt.mesh.compilation import Compiler
from dtt.mesh.dist import World
from dtt.mesh.environment import install

LEAST_GAIN = 1.05
"""Minimum speedup at which a layer is converted; a smaller one is measurement noise."""
MULTIPLE = 16
"""Both sizes of a layer must be multiples of this for fp8."""
WARM_UP, TRIALS = 3, 7
"""Warm-up runs, which are not counted, and timed runs, of which the median counts, for each
shape."""

Shape = tuple[int, int]
"""in_features and out_features of a layer."""
Timer = Callable[[nn.Linear], float]
Converter = Callable[..., nn.Module]


def convert(model: nn.Module, world: World, tokens: int, compiled: bool) -> str:
    """Convert linear layers of the blocks to fp8, in place, where this is faster; return a summary.

    All ranks call this together, before any other parallelism; rank 0's benchmark decides. It times
    the forward and backward pass of a layer on `tokens` tokens, as in training. Parameters keep
    their names and values. Raises EnvironmentUnfit without torchao, or on a GPU without fp8.
    """
    if world.device.type == "cuda" and torch.cuda.get_device_capability(world.device) < (8, 9):
        raise EnvironmentUnfit(
            f"{torch.cuda.get_device_name(world.device)} does not support train.precision=fp8",
            next="train.precision=bf16; fp8 requires an L4, H100 or newer",
        )
    to_fp8 = _torchao()

    def in_fp8(layer: nn.Linear) -> nn.Linear:
        (swapped,) = to_fp8(nn.Sequential(layer)).children()
        assert isinstance(swapped, nn.Linear)
        return swapped

    layers = list(_linear_layers(model))
    gains: Mapping[Shape, float] = {}
    if world.first:
        # Creates the layers to time on this device.
        with world.device:
            gains = find_gains(
                layers, in_fp8, lambda layer: _seconds(layer, tokens, world.device, compiled)
            )
    # From rank 0: timings vary, and ranks with different precisions would compute different models.
    gains = world.from_first(gains)
    fast = {shape for shape, gain in gains.items() if gain >= LEAST_GAIN}
    to_fp8(
        model.get_submodule("layers"),
        module_filter_fn=lambda layer, _: isinstance(layer, nn.Linear) and _shape(layer) in fast,
    )
    return describe(layers, gains)


def find_gains(
    layers: list[nn.Linear], in_fp8: Callable[[nn.Linear], nn.Linear], seconds: Timer
) -> dict[Shape, float]:
    """Return the fp8 speedup of each layer shape; 0 if the shape does not support fp8."""
    gains = {}
    for shape in dict.fromkeys(map(_shape, layers)):
        if any(size % MULTIPLE for size in shape):
            gains[shape] = 0.0
            continue
        # A layer without bias stands for all of its shape: a bias is added outside the fp8 product.
        layer = nn.Linear(*shape, bias=False)
        plain = seconds(layer)
        gains[shape] = plain / seconds(in_fp8(layer))
    return gains


def describe(layers: list[nn.Linear], gains: Mapping[Shape, float]) -> str:
    """Return one line that lists the fp8 layers and their speedups, or that there are none."""
    counts = Counter(map(_shape, layers))
    taken = [
        f"{counts[shape]} of {shape[0]} x {shape[1]} ({gain:.2f}x as fast)"
        for shape, gain in gains.items()
        if gain >= LEAST_GAIN
    ]
    if taken:
        return f"fp8: {', '.join(taken)}; the other linear layers are in bf16"
    best = max(gains.values(), default=0.0)
    return (
        "fp8 gains nothing here: training is in bf16 "
        f"(at best it is {best:.2f}x as fast, over {len(gains)} shapes)"
    )


def _linear_layers(model: nn.Module) -> Iterator[nn.Linear]:
    return (m for m in model.get_submodule("layers").modules() if isinstance(m, nn.Linear))


def _shape(layer: nn.Linear) -> Shape:
    return layer.in_features, layer.out_features


def _torchao() -> Converter:
    try:
        from torchao.float8 import convert_to_float8_training
    except ImportError as error:
        raise EnvironmentUnfit(
            "train.precision is fp8, which needs torchao",
            why=str(error),
            next=f"{install('fp8')}, or train.precision=bf16",
        ) from None
    convert: Converter = convert_to_float8_training
    return convert


def _seconds(layer: nn.Linear, tokens: int, device: torch.device, compiled: bool) -> float:
    """Return the median time of the layer's forward and backward pass under bf16 autocast."""
    # Its own compiler: a failure here must not switch off compilation of the model.
    run = Compiler().compiled(layer.forward) if compiled else layer
    x_TD = torch.randn(tokens, layer.in_features, device=device, dtype=torch.bfloat16)
    grad_TF = torch.randn(tokens, layer.out_features, device=device, dtype=torch.bfloat16)
    x_TD.requires_grad_()
    times = []
    for _ in range(WARM_UP + TRIALS):
        # Before and after: on a GPU, launching a kernel takes no time, and its work may still run.
        _finish(device)
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            run(x_TD).backward(grad_TF)
        _finish(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM_UP:])


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
