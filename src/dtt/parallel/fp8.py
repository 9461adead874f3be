"""Linear layers in fp8: on the shapes on which a benchmark finds a speedup.

Only large matrix multiplications gain more than scaling costs. Each row of both operands of the
product has a scale.

All three products of a layer, that of the forward pass and both gradients, are Y = A Bᵀ. Each row
of A and of B is divided by a scale that brings its largest value below the largest one of e4m3
(Micikevicius et al., arXiv 2209.05433), and the result is multiplied by both. So the gradients need
operands with other scales: the weight by input, and the gradient of the output and the input by
feature.

- Scales are powers of two. Dividing by one is exact, so the value of an element does not depend on
  its scale unless it is 2^14 times smaller than the largest one of its row. A weight has the same
  values in both passes, and on each rank of any layout, but for those small ones.
- With tensor parallelism, each rank scales what it has. Where the sum is over its own part (o, down
  and the gradients of the inputs of q, k, v, gate, up), its rows are parts of rows. The ranks' sums
  are added in bf16, as without fp8.
- A row with a number that is not finite becomes NaN, so that the anomaly guard sees it.
- FSDP2 gathers a weight in fp8 with the scales of its rows, half of the bytes of bf16, and unpacks
  it to bf16 (`gather_in_fp8`). Scaled by row again, it has the same numbers: the forward pass is
  equal to the last bit. In the backward pass, scaled by column, only numbers 2^14 times smaller
  than the largest one of their row can differ.
- Weights are scaled at each use, also frozen ones. Kept in fp8, a frozen weight would need both
  forms, which take as much memory as bf16. To scale one moves 3 bytes per weight: for 8,192 tokens
  6 % of the time of its product on an H100.

Shapes: M and N rows of the operands, K what the sum is over.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from dtt.base.errors import EnvironmentUnfit
from dtt.base.log import log
from dtt.mesh.compilation import Compiler
from dtt.mesh.dist import World
from dtt.mesh.mesh import Mesh
from dtt.mesh.peak_flops import finish
from dtt.model.linear import Linear
from dtt.parallel.tensor import InputsDivided, OutputsDivided, plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

FP8 = torch.float8_e4m3fn
MULTIPLE = 16
"""K must be a multiple of this, and so must the rows of B."""
EXPONENT = 0x7F80_0000
"""Bits of the exponent of a fp32 number, which begins at bit 23."""
ABOVE_LARGEST = 0x1F_FFFF
"""Added to the bits of a number, this carries into the exponent if its mantissa is above 1.75. The
largest number of e4m3 is 448 = 1.75 · 2^8."""
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
            layer.product = linear
    log.info("%s", describe(layers.values(), gains))
    return gains


def find_gains(layers: Mapping[Linear, Shape], seconds: Timer) -> dict[Shape, float]:
    """Return the fp8 speedup of each layer shape; 0 if the shape does not support fp8."""
    gains: dict[Shape, float] = {}
    for layer, (inputs, outputs) in layers.items():
        if (inputs, outputs) in gains:
            continue
        if inputs % MULTIPLE or outputs % MULTIPLE:
            gains[inputs, outputs] = 0.0
            continue
        # A layer without bias stands for all of its shape: a bias is added outside the fp8 product.
        # So does the base of an adapter, whose products stay in bf16.
        sample = Linear(inputs, outputs, bias=False)
        # A frozen weight has no gradient, so one product less.
        sample.requires_grad_(layer.weight.requires_grad)
        plain = seconds(sample)
        sample.product = linear
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


def quantize(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix in fp8 and the scales of its rows, [M, 1] in fp32: powers of two."""
    largest = x_MK.abs().amax(1, keepdim=True).float()
    # In integers: rounding of a logarithm could give a scale that is too small.
    exponent = ((largest.view(torch.int32) + ABOVE_LARGEST) & EXPONENT) - (8 << 23)
    scale = exponent.clamp(min=1 << 23).view(torch.float32)  # also of a row of zeros
    # Conversion to fp8 would make an infinite number 448, and the guard would not see it.
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    return (x_MK.float() / scale).to(FP8).contiguous(), scale


def product(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """Return A Bᵀ in bf16, [M, N]."""
    (a, scales_a), (b, scales_b) = quantize(a_MK), quantize(b_NK)
    if not a.is_cuda:
        # A CPU has no scales by row in torch 2.11. Powers of two can be applied afterwards.
        one = torch.ones((), device=a.device)
        y = torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.float32)  # noqa: SLF001
        return (y * scales_a * scales_b.t()).bfloat16()
    # Fast accumulation: without it, the kernels for scales by row are hardly faster than bf16.
    return torch._scaled_mm(  # noqa: SLF001
        a, b.t(), scales_a, scales_b.t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )


class _Fp8Product(torch.autograd.Function):
    """X Wᵀ and its gradients; what is kept for the backward pass is in bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = product(grad, weight.t())
        if ctx.needs_input_grad[1]:
            # The sum is over tokens. Rows of zeros make their number a multiple of 16.
            missing = -len(x) % MULTIPLE
            x, grad = (F.pad(matrix, (0, 0, 0, missing)) for matrix in (x, grad))
            of_weight = product(grad.t(), x.t())
        return of_x, of_weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x Wᵀ + b like `F.linear`: under autocast in fp8, else in the dtype of x.

    With tensor parallelism, `weight` is a DTensor that is divided by outputs or by inputs.
    """
    if not torch.is_autocast_enabled(x.device.type):
        return F.linear(x, weight, bias)  # generation: one row for each text gains nothing
    dtype = torch.get_autocast_dtype(x.device.type)
    x, weight = x.to(dtype), weight.to(dtype)
    if isinstance(weight, DTensor):
        assert isinstance(x, DTensor)
        y: Tensor = _divided(x, weight)
    else:
        y = _rows(x, weight)
    if bias is None:
        return y
    bias = bias.to(dtype)
    if isinstance(y, DTensor) and not y.placements[0].is_shard():
        assert isinstance(bias, DTensor)
        # Without communication: each rank adds its share to its summand, and has a summand of the
        # gradient.
        share = bias.to_local(grad_placements=[Partial()]) / y.device_mesh.size()
        bias = DTensor.from_local(share, y.device_mesh, [Partial()], run_check=False)
    return y + bias


def _rows(x: Tensor, weight: Tensor) -> Tensor:
    y: Tensor = _Fp8Product.apply(x.reshape(-1, x.shape[-1]), weight)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], weight.shape[0])


def _divided(x: DTensor, weight: DTensor) -> DTensor:
    """Multiply this rank's part, as DTensor would, which has no rule for products in fp8."""
    by_outputs = weight.placements[0].is_shard(0)
    # All inputs times some outputs: this rank's gradient of the inputs is a summand.
    own = x.to_local(grad_placements=[Partial()]) if by_outputs else x.to_local()
    y = _rows(own, weight.to_local())
    placement: Placement = Shard(y.dim() - 1) if by_outputs else Partial()
    return DTensor.from_local(y, x.device_mesh, [placement], run_check=False)


# ---- gathered by FSDP2 ---------------------------------------------------------------------------


def gather_in_fp8(model: nn.Module, mesh: Mesh) -> None:
    """Let FSDP2 all-gather the weights of layers in fp8 as fp8 and scales, in place.

    Call this when the shards have memory and before the first pass, in which FSDP2 looks for these
    hooks on them (torch 2.11 to 2.14). Layers whose rows the ranks do not share evenly stay in
    bf16: FSDP2 pads their shards, and hooks do not see the padding. Without autocast (samples
    during training), the weights of these layers have their numbers in fp8 as well, as in training.
    """
    if mesh.part("shard").size() == 1:
        return
    for layer in linear_layers(model).values():
        weight = layer.weight
        if layer.product is not linear or not isinstance(weight, DTensor):
            continue
        dims = enumerate(weight.placements)
        parts = prod(weight.device_mesh.size(i) for i, place in dims if place.is_shard())
        shard = _local(weight)
        if shard.numel() * parts == weight.numel():
            # FSDP2 finds them as attributes of the local tensor. (A subclass of Tensor, as in
            # torchao, would have to know each operator of optimizers, checkpoints and DTensor.)
            shard.fsdp_pre_all_gather = _pack  # type: ignore[attr-defined]
            shard.fsdp_post_all_gather = _unpack  # type: ignore[attr-defined]


def _local(weight: Tensor) -> Tensor:
    """Return the local tensor of a parameter itself; `to_local` returns a view in torch 2.13."""
    return weight._local_tensor if isinstance(weight, DTensor) else weight  # noqa: SLF001


def _pack(
    mesh: DeviceMesh,
    outer_size: torch.Size,
    outer_stride: tuple[int, ...],
    module: nn.Linear,
    mp_policy: MixedPrecisionPolicy,
) -> tuple[tuple[Tensor, Tensor], None]:
    """Return what a rank sends of a weight: its rows in fp8, as bytes, and their scales."""
    # Rounded to bf16 first, as without this: rounded once, some numbers would differ.
    values, scales = quantize(_local(module.weight).to(mp_policy.param_dtype))
    return (values.view(torch.uint8), scales), None


@torch.no_grad()
def _unpack(
    gathered: Sequence[Tensor], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor]] | None:
    """Write the weight that was gathered into `out`, or return it and what FSDP2 is to free."""
    del metadata
    values, scales = gathered
    if out is None:
        weight = torch.empty(values.shape, dtype=dtype, device=values.device)
    else:
        # The backward pass refuses saved tensors whose version has changed; `data` has its own.
        weight = _local(out).data
    weight.copy_(values.view(FP8)).mul_(scales.to(dtype))  # exact: scales are powers of two
    # FSDP2 would keep them until it frees the weight, half as much memory again.
    for tensor in gathered:
        tensor.untyped_storage().resize_(0)
    return (weight, (weight,)) if out is None else None
