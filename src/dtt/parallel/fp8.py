"""Choice of the linear layers in fp8: the shapes on which a benchmark finds a speedup.

Only large matrix multiplications gain more than scaling costs. `parallel/fp8_linear.py` has the
product.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from dtt.base.errors import EnvironmentUnfit
from dtt.base.log import log
from dtt.mesh.compilation import Compiler
from dtt.mesh.dist import World
from dtt.mesh.peak_flops import finish
from dtt.model.linear import Linear
from dtt.parallel import fp8_linear
from dtt.parallel.tensor import InputsDivided, OutputsDivided, plan

LEAST_GAIN = 1.05
"""Minimum speedup at which a layer is converted; a smaller one is measurement noise."""
WARM_UP, TRIALS = 3, 7
"""Warm-up runs, which are not counted, and timed runs, of which the median counts, for each
shape."""

Shape = tuple[int, int]
"""Number of inputs and outputs of a layer that a rank computes."""
Timer = Callable[[Linear], float]


def convert(
    model: nn.Module,
    world: World,
    tokens: int,
    compiled: bool,
    divided: int = 1,
    known: Mapping[Shape, float] | None = None,
) -> dict[Shape, float]:
    """Compute linear layers of the blocks in fp8 where this is faster; return the speedups.

    All ranks call this together, before any other parallelism; rank 0's benchmark decides. It times
    the forward and backward pass of a layer on `tokens` tokens, as in training, with the part that
    each of `divided` tensor-parallel ranks has. A run that resumes passes the speedups that are
    `known`: measured again, one near LEAST_GAIN could fall on the other side, and the run would go
    on with other bits. Parameters stay as they are. Raises EnvironmentUnfit on a GPU without fp8.
    """
    if world.device.type == "cuda" and torch.cuda.get_device_capability(world.device) < (8, 9):
        raise EnvironmentUnfit(
            f"{torch.cuda.get_device_name(world.device)} does not support train.precision=fp8",
            next="train.precision=bf16; fp8 requires an L4, H100 or newer",
        )
    layers = {layer: shape(name, layer, divided) for name, layer in linear_layers(model).items()}
    gains = dict(known or {})
    if world.first:
        new = {layer: its_shape for layer, its_shape in layers.items() if its_shape not in gains}
        # Creates the layers to time on this device.
        with world.device:
            gains |= find_gains(new, lambda one: _seconds(one, tokens, world.device, compiled))
    # From rank 0: timings vary, and ranks with different precisions would compute different models.
    gains = world.from_first(gains)
    for layer, its_shape in layers.items():
        if gains[its_shape] >= LEAST_GAIN:
            layer.product = fp8_linear.linear
    log.info("%s", describe(layers.values(), gains))
    return gains


def find_gains(layers: Mapping[Linear, Shape], seconds: Timer) -> dict[Shape, float]:
    """Return the fp8 speedup of each layer shape; 0 if the shape does not support fp8."""
    gains: dict[Shape, float] = {}
    for layer, (inputs, outputs) in layers.items():
        if (inputs, outputs) in gains:
            continue
        if inputs % fp8_linear.MULTIPLE or outputs % fp8_linear.MULTIPLE:
            gains[inputs, outputs] = 0.0
            continue
        # A layer without bias stands for all of its shape: a bias is added outside the fp8 product.
        # So does the base of an adapter, whose products stay in bf16.
        sample = Linear(inputs, outputs, bias=False)
        # A frozen weight has no gradient, so one product less.
        sample.requires_grad_(layer.weight.requires_grad)
        plain = seconds(sample)
        sample.product = fp8_linear.linear
        gains[inputs, outputs] = plain / seconds(sample)
    return gains


def describe(shapes: Iterable[Shape], gains: Mapping[Shape, float]) -> str:
    """Return one line that lists the fp8 layers and their speedups, or that there are none."""
    counts = Counter(shapes)
    taken = [
        f"{counts[shape]} of {shape[0]} x {shape[1]} ({gain:.2f}x as fast)"
        for shape, gain in gains.items()
        if gain >= LEAST_GAIN and counts[shape]  # others are of a run with another division
    ]
    if taken:
        return f"fp8: {', '.join(taken)}; the other linear layers are in bf16"
    best = max(gains.values(), default=0.0)
    return (
        "fp8 gains nothing here: training is in bf16 "
        f"(at best it is {best:.2f}x as fast, over {len(gains)} shapes)"
    )


def linear_layers(model: nn.Module) -> dict[str, Linear]:
    """Return the linear layers of the blocks by name."""
    modules = model.named_modules()
    return {n: m for n, m in modules if n.startswith("layers.") and isinstance(m, Linear)}


def shape(name: str, layer: Linear, divided: int) -> Shape:
    """Return the shape of the product of a layer on each of `divided` tensor-parallel ranks."""
    style = plan(norm_all_heads=False)[re.sub(r"\.\d+\.", ".*.", name)]
    inputs, outputs = layer.in_features, layer.out_features
    if isinstance(style, InputsDivided):
        return inputs // divided, outputs
    assert isinstance(style, OutputsDivided), name
    return inputs, outputs // divided


def _seconds(layer: Linear, tokens: int, device: torch.device, compiled: bool) -> float:
    """Return the median time of the layer's forward and backward pass under bf16 autocast."""
    # Its own compiler: a failure here must not switch off compilation of the model.
    run = Compiler().compiled(layer.forward) if compiled else layer
    x_TD = torch.randn(tokens, layer.in_features, device=device, dtype=torch.bfloat16)
    grad_TF = torch.randn(tokens, layer.out_features, device=device, dtype=torch.bfloat16)
    x_TD.requires_grad_()
    times = []
    for _ in range(WARM_UP + TRIALS):
        # Before and after: on a GPU, launching a kernel takes no time, and its work may still run.
        finish(device)
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            run(x_TD).backward(grad_TF)
        finish(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM_UP:])
