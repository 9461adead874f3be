"""Low-rank adaptation of linear layers (LoRA, Hu et al. 2021, arXiv 2106.09685).

A layer computes W x + s B (A dropout(x)). W is frozen; A [rank, in] and B [out, rank] are trained.

Shapes: D features of the input, R rank, F features of the output.

- The frozen matrices are stored in the compute dtype. Autocast would otherwise cast all of them
  in every pass, and keep both copies: 6 bytes per weight instead of 2. A and B are fp32 like all
  trained weights, because most updates of a bf16 weight would be rounded away.
- With `adapter.base: nf4`, they have 4 bits and the values of bitsandbytes (`model/nf4.py`). A
  matrix is quantised when it is read, whole on each rank, which keeps its rows: bytes that FSDP2
  shards and gathers as other parameters. Each product decodes the weights that it needs, forward
  and backward.
- With tensor parallelism, a layer that is divided by outputs (q, k, v, gate, up) has all of A and
  its rows of B on each rank; one that is divided by inputs (o, down) its columns of A and all of
  B. B A x is then a summand like W x, and both pass the one reduction of the layer.
- A checkpoint holds A, B and their state, and `base` in its manifest: the folder and the hash of
  the frozen weights, which are a Hugging Face folder or another checkpoint, even one with a base
  of its own. A reader checks the hash.
- Whoever reads the weights of a checkpoint gets W + s·B A, computed in fp32 for the part that it
  asks for (`MergedTensor`), so no process needs a whole model more. Export, `dtt chat`, `dtt
  eval` and `init.from` share this.
- `hf/peft.py` reads and writes adapters of PEFT, and `hf/verify.py` compares the logits with
  PEFT's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtt.base.errors import ConfigError
from dtt.config.adapter import LoraConfig
from dtt.mesh.dtypes import wide_dtype
from dtt.mesh.sharding import FullTensor
from dtt.model.adapted_layers import Adapted, adaptable, adapted_layers
from dtt.model.contract import Model
from dtt.model.nf4 import BLOCK, FrozenLinear, Nf4Linear

LORA_A, LORA_B = "lora_a", "lora_b"
"""Names of the parameters in an adapted layer; they are part of the checkpoint format."""


class LoraLinear(FrozenLinear):
    """A linear layer with an adapter: [..., D] → [..., F]."""

    def __init__(self, base: nn.Linear, adapted: Adapted, dropout: float) -> None:
        """Take over the weight and the bias of `base`, and add A and B, in fp32."""
        super().__init__(base)
        device = base.weight.device
        # fp32 even if W is bf16: with a learning rate of 1e-4, most updates of a bf16 weight would
        # be rounded away.
        empty = partial(torch.empty, device=device, dtype=wide_dtype(base.weight))
        self.lora_a = nn.Parameter(empty(adapted.rank, base.in_features))
        self.lora_b = nn.Parameter(empty(base.out_features, adapted.rank))
        self.scale, self.dropout = adapted.scale, dropout

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + s B (A dropout(x)), summed in the compute dtype."""
        # Dropout on the input of A only: on the output of B, or on x itself, it would be another
        # method. One pass for scale and sum.
        update = self.update(F.dropout(x, self.dropout, self.training))
        return torch.add(super().forward(x), update, alpha=self.scale)

    def update(self, x: Tensor) -> Tensor:
        """Return B A x."""
        # Generation has no autocast: there x and W are bf16, and A and B fp32.
        low = F.linear(x, self.lora_a.to(x.dtype))
        return F.linear(low, self.lora_b.to(low.dtype))


class Nf4LoraLinear(LoraLinear, Nf4Linear):
    """An adapter on a weight in 4 bits (QLoRA, arXiv 2305.14314)."""


def attach(model: Model, cfg: LoraConfig, dtype: torch.dtype) -> None:
    """Freeze the weights of `model` and add adapters to its layers, in place.

    Matrices are stored in `dtype` from now on. Norms and biases, which are small, keep theirs: they
    are applied in fp32. With `base: nf4`, all matrices that can have adapters are quantised,
    adapted or not.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.ndim > 1:
            parameter.data = parameter.data.to(dtype)
    quantized = cfg.base == "nf4"
    adapters = adapted_layers(cfg, model.arch)
    for weight in adaptable(model.arch):
        name = weight.removesuffix(".weight")
        if not model.holds(name):
            continue
        parent, _, child = name.rpartition(".")
        base = model.get_submodule(name)
        assert isinstance(base, nn.Linear)
        if quantized and base.in_features % BLOCK:
            raise ConfigError(
                f"the rows of {weight} have {base.in_features} weights",
                where="adapter.base",
                why=f"nf4 needs a multiple of {BLOCK}, the weights that have one scale",
                next="adapter.base=unquantized",
            )
        layer: nn.Module = Nf4Linear(base) if quantized else base
        if name in adapters:
            kind = Nf4LoraLinear if quantized else LoraLinear
            layer = kind(base, adapters[name], cfg.dropout)
        setattr(model.get_submodule(parent), child, layer)


@dataclass(frozen=True)
class MergedTensor:
    """The weight W + s B A of an adapted layer in fp32, computed for each part that is read."""

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
        # Only the parts of A and B that this part of the product needs. In fp64: the order of a
        # fp32 sum depends on the shape and the CPU, and a rank that reads its shard would then
        # get other bits than one that reads the whole weight (seen on one of two machines).
        product = self.b[rows, :].double() @ self.a[:, columns].double()
        # Not in place: `weight` may be in memory, and would be merged again by the next reader.
        return torch.add(self.weight[index].double(), product, alpha=self.scale).float()


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
