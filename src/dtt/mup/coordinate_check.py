"""The coordinate check of muP: the size of activations at different widths.

Yang et al., arXiv 2203.03466, appendix D.1. The output of a layer should neither grow nor vanish
with the width, before the first update or after several.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import fmean, linear_regression

import torch
from torch import Tensor, nn

from dtt.config.run import RunConfig
from dtt.mesh.dist import World
from dtt.model.decoder import Decoder
from dtt.mup.short_training import ShortTraining, at_width

KINDS = ("embed", "attn", "mlp", "residual", "logits")
"""Kinds of activations: token embeddings; outputs of attention and of the MLP, averaged over the
layers; the residual stream after the last layer; logits."""
INPUTS = ("embed", "residual")
"""Kinds that are recorded as the input of a module, not as its output."""

Magnitudes = Mapping[str, float]
"""Mean absolute activation by kind."""


def measure(cfg: RunConfig, width: int, world: World) -> list[Magnitudes]:
    """Return the sizes before the first step and after each step, on the same micro-batch.

    Learning rates are at their peak from the start, because `cfg.train.steps` is small.
    """
    training = ShortTraining(at_width(cfg, width), world)
    tokens_BT = training.first_batch.micro_batches[0].tokens
    at_start = activations(training.model, tokens_BT)
    steps = training.losses(lambda _step: 1.0)
    return [at_start, *(activations(training.model, tokens_BT) for _ in steps)]


@torch.no_grad()
def activations(model: Decoder, tokens_BT: Tensor) -> Magnitudes:
    """Return the sizes in a forward pass in fp32."""
    watched = {"layers.0": "embed", "norm": "residual", "": "logits"}
    for i in range(model.arch.n_layers):
        watched |= {f"layers.{i}.attn_post_norm": "attn", f"layers.{i}.mlp_post_norm": "mlp"}
    seen: dict[str, list[float]] = {kind: [] for kind in KINDS}

    def record(kind: str, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        activation = inputs[0] if kind in INPUTS else output
        seen[kind].append(activation.abs().mean().item())

    with ExitStack() as stack:
        for name, kind in watched.items():
            hook = model.get_submodule(name).register_forward_hook(partial(record, kind))
            stack.callback(hook.remove)
        model.eval()
        model(tokens_BT)
        model.train()
    return {kind: fmean(values) for kind, values in seen.items()}


def slopes(measured: Mapping[int, Sequence[Magnitudes]]) -> list[Magnitudes]:
    """Return, for each step, the slope of log(size) over log(width) by kind.

    `measured` holds the output of `measure` by width.
    """
    widths = [math.log(width) for width in measured]
    return [
        {kind: _slope(widths, [sizes[kind] for sizes in at_step]) for kind in KINDS}
        for at_step in zip(*measured.values(), strict=True)
    ]


def _slope(widths: Sequence[float], sizes: Sequence[float]) -> float:
    """Return the slope of log(size) over `widths`; NaN unless all sizes are finite and positive."""
    if not all(0.0 < size < math.inf for size in sizes):
        return math.nan
    return linear_regression(widths, [math.log(size) for size in sizes]).slope


def faults(slopes: Sequence[Magnitudes], tolerance: float) -> list[str]:
    """Return a line per kind that grows with the width at any step, or vanishes after the last.

    Only the last step counts for vanishing: logits start as sums of random terms, which muP's
    multiplier makes as small as 1 / sqrt(width), until the head has learnt. `tolerance` is the
    largest slope that passes.
    """
    lines = []
    for kind in KINDS:
        most, step = max((_or_inf(sizes[kind]), step) for step, sizes in enumerate(slopes))
        last = slopes[-1][kind]
        if most > tolerance:
            lines.append(f"{kind} grows as width^{most:.2f} at step {step}")
        elif last < -tolerance:
            lines.append(f"{kind} vanishes as width^{last:.2f}")
    return lines


def _or_inf(slope: float) -> float:
    return math.inf if math.isnan(slope) else slope
