"""Low-rank adaptation of linear layers (LoRA, Hu et al. 2021, arXiv 2106.09685).

A layer computes W x + s B (A dropout(x)). W is frozen; A [rank, in] and B [out, rank] are trained.

Shapes: D features of the input, R rank, F features of the output.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtt.base.errors import ConfigError
from dtt.config.adapter import ALL_LINEAR, LoraConfig
from dtt.mesh.sharding import FullTensor
from dtt.model import count
from dtt.model.architecture import Architecture
from dtt.model.decoder import Decoder
from dtt.model.linear import Linear

LORA_A, LORA_B = "lora_a", "lora_b"
"""Names of the parameters in an adapted layer; they are part of the checkpoint format."""


@dataclass(frozen=True)
class Adapted:
    """The adapter of one layer."""

    rank: int
    alpha: float
    rslora: bool

    @property
    def scale(self) -> float:
        """Factor of B A."""
        # PEFT computes in this order, and the result is rounded once.
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)


class LoraLinear(Linear):
    """A linear layer with an adapter: [..., D] → [..., F]."""

    def __init__(self, base: nn.Linear, adapted: Adapted, dropout: float) -> None:
        """Take over the weight and the bias of `base`, and add A and B, in fp32."""
        with torch.device("meta"):
            super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        device = base.weight.device
        # fp32 whatever the dtype of W: with a learning rate of 1e-4, most updates of a bf16 weight
        # would be rounded away.
        self.lora_a = nn.Parameter(torch.empty(adapted.rank, base.in_features, device=device))
        self.lora_b = nn.Parameter(torch.empty(base.out_features, adapted.rank, device=device))
        self.scale, self.dropout = adapted.scale, dropout

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + s B (A dropout(x)), summed in the compute dtype."""
        # Dropout on the input of A only: on the output of B, or on x itself, it would be another
        # method. One pass for scale and sum.
        update = self.update(F.dropout(x, self.dropout, self.training))
        return torch.add(super().forward(x), update, alpha=self.scale)

    def update(self, x: Tensor) -> Tensor:
        """Return B A x."""
        return F.linear(F.linear(x, self.lora_a), self.lora_b)


def adapted_layers(cfg: LoraConfig, arch: Architecture) -> dict[str, Adapted]:
    """Return the adapter of each adapted layer, by the name of the layer.

    Raises ConfigError for a target or a pattern that matches no layer.
    """
    of_layer = [
        n.removesuffix(".weight") for n, s in count.layer_shapes(arch).items() if len(s) > 1
    ]
    names = [f"layers.{i}.{name}" for i in range(arch.n_layers) for name in of_layer]
    targets = _targets(cfg.targets, names)
    ranks, alphas = (
        _by_pattern(key, patterns, targets)
        for key, patterns in (
            ("rank_pattern", cfg.rank_pattern),
            ("alpha_pattern", cfg.alpha_pattern),
        )
    )
    return {
        name: Adapted(int(ranks.get(name, cfg.rank)), alphas.get(name, cfg.alpha), cfg.rslora)
        for name in targets
    }


def _targets(targets: str | tuple[str, ...], names: list[str]) -> list[str]:
    if targets == ALL_LINEAR:
        return names
    if isinstance(targets, str):
        found = [name for name in names if re.fullmatch(targets, name)]
        if not found:
            raise _no_match("targets", targets, names)
        return found
    for target in targets:
        # Each by itself: a list of which one entry is misspelt would train less than was asked for.
        if not any(_ends_with(name, target) for name in names):
            raise _no_match("targets", target, names)
    return [name for name in names if any(_ends_with(name, target) for target in targets)]


def _ends_with(name: str, end: str) -> bool:
    return f".{name}".endswith(f".{end}")


def _by_pattern(key: str, patterns: Mapping[str, float], names: Iterable[str]) -> dict[str, float]:
    """Return the value of the first pattern that matches each name; the others are left out."""
    names = list(names)
    # The rule of PEFT: a pattern matches the end of a name from a dot on, or all of it.
    compiled = {pattern: re.compile(rf"(.*\.)?({pattern})$") for pattern in patterns}
    found: dict[str, float] = {}
    for pattern, matcher in compiled.items():
        matching = [name for name in names if matcher.match(name)]
        if not matching:
            raise _no_match(key, pattern, names)
        for name in matching:
            found.setdefault(name, patterns[pattern])
    return found


def _no_match(key: str, pattern: str, names: list[str]) -> ConfigError:
    ends = dict.fromkeys(re.sub(r"^layers\.\d+\.", "", name) for name in names)
    return ConfigError(
        f"no adapted layer has a name that {pattern!r} matches",
        where=f"adapter.{key}",
        why=f"the layers are layers.N.{{{','.join(ends)}}}; the head and the embedding cannot be "
        "adapted",
    )


def attach(model: Decoder, cfg: LoraConfig, dtype: torch.dtype) -> None:
    """Freeze the weights of `model` and add adapters to its layers, in place.

    Matrices are stored in `dtype` from now on. Norms and biases, which are small, keep theirs: they
    are applied in fp32.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.ndim > 1:
            parameter.data = parameter.data.to(dtype)
    for name, adapted in adapted_layers(cfg, model.arch).items():
        parent, _, child = name.rpartition(".")
        base = model.get_submodule(name)
        assert isinstance(base, nn.Linear)
        layer = LoraLinear(base, adapted, cfg.dropout)
        setattr(model.get_submodule(parent), child, layer)


@dataclass(frozen=True)
class MergedTensor:
    """The weight W + s B A of an adapted layer, computed in fp32 for each part that is read."""

    weight: FullTensor
    a: FullTensor
    b: FullTensor
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return tuple(self.weight.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the elements."""
        return torch.float32

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        """Return a part of the weight; with (), all of it."""
        rows, columns = (*index, slice(None), slice(None))[:2]
        # Only the parts of A and B that this part of the product needs. Whoever stores the result
        # rounds it: once, as W is not rounded before.
        product = self.b[rows, :].float() @ self.a[:, columns].float()
        return self.weight[index].float().add_(product, alpha=self.scale)


def merged(
    base: Mapping[str, FullTensor],
    adapter: Mapping[str, FullTensor],
    layers: Mapping[str, Adapted],
) -> dict[str, FullTensor]:
    """Return the weights of `base` with the adapters of its `layers` merged into them."""
    whole = dict(base)
    for name, adapted in layers.items():
        weight = f"{name}.weight"
        a, b = (adapter[f"{name}.{part}"] for part in (LORA_A, LORA_B))
        whole[weight] = MergedTensor(base[weight], a, b, adapted.scale)
    return whole
