"""What the formulas go by: a configuration, resolved for so many devices of a kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from dtt.config.optim import MuonConfig
from dtt.config.parallel import Sizes, resolve
from dtt.config.run import RunConfig
from dtt.data import fit
from dtt.data.stages import Stages
from dtt.data.stages import resolve as resolve_stages
from dtt.model.architecture import Architecture
from dtt.model.decoder import Decoder, roles
from dtt.model.fit_mesh import check_mesh
from dtt.model.scaling import scaled
from dtt.optim import groups, owners
from dtt.optim.owners import Matrix, Spread
from dtt.train.estimate.gpus import Gpu
from dtt.train.precision import Precision, choose


@dataclass(frozen=True)
class Weight:
    """A parameter."""

    name: str
    shape: tuple[int, ...]
    optimizer: str
    """`muon` or `adamw`."""
    split: tuple[int, ...] | None
    """Rows of each matrix in it, if Muon takes it as several."""
    part: tuple[int, ...]
    """What tensor parallelism leaves of the shape."""

    @property
    def numel(self) -> int:
        """Its numbers."""
        return prod(self.shape)

    @property
    def in_block(self) -> bool:
        """Whether it is gathered with a block, not with what is outside of them."""
        return self.name.startswith("layers.")


@dataclass(frozen=True)
class Case:
    """A run on a mesh."""

    cfg: RunConfig
    gpu: Gpu
    nodes: int
    gpus_per_node: int
    sizes: Sizes
    arch: Architecture
    precision: Precision
    stages: Stages
    steps: int
    """Of the run, as far as is known."""

    @property
    def devices(self) -> int:
        """Of all nodes."""
        return self.nodes * self.gpus_per_node

    @property
    def compiled(self) -> bool:
        """Whether blocks are."""
        wanted = self.cfg.train.compile
        return self.gpu.kind == "cuda" if wanted is None else wanted

    @property
    def weight_bytes(self) -> int:
        """Of a weight, of its gradient, and of a number that an optimizer keeps for it."""
        return self.precision.weights.itemsize

    @property
    def product_bytes(self) -> int:
        """Of a number in a matrix product."""
        return self.precision.products.itemsize

    @property
    def autocast(self) -> bool:
        """Whether what is multiplied is cast first."""
        return self.weight_bytes != self.product_bytes

    @property
    def stream_bytes(self) -> int:
        """Of a number in the residual stream, which has the dtype of the products."""
        return self.product_bytes

    @property
    def spread(self) -> int:
        """Devices over which FSDP2 spreads each weight."""
        return self.sizes.shard * self.sizes.context

    @property
    def sequences(self) -> int:
        """Of a global batch that a device reads with others of its tensor and context group, at
        the end of the run."""
        return self.stages.at(self.steps - 1).sequences // self.sizes.data

    @property
    def micro_batch(self) -> int:
        """Sequences in a forward pass."""
        return min(self.cfg.train.micro_batch, self.sequences)

    @property
    def accumulation(self) -> int:
        """Forward passes in a step."""
        return -(-self.sequences // self.micro_batch)

    @property
    def keeps_whole_gradients(self) -> bool:
        """Whether each device adds up the gradients of all weights, though it holds a part."""
        late = self.cfg.parallel.reduce == "last"
        return self.sizes.sharded and self.accumulation > 1 and late

    @property
    def tokens(self) -> int:
        """Of a forward pass on one device; those of a tensor group share them."""
        return self.micro_batch * self.cfg.train.seq_len // self.sizes.context

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """All parameters."""
        with torch.device("meta"):
            model = Decoder(self.arch)
        parameters = dict(model.named_parameters())
        treated = groups.settings(self.cfg.optim, parameters, roles(model))
        return tuple(
            Weight(
                name,
                tuple(p.shape),
                treated[name].optimizer,
                treated[name].split,
                _part(name, p.shape, self.sizes.tensor),
            )
            for name, p in parameters.items()
        )

    def held(self, weights: Iterable[Weight]) -> int:
        """Numbers of these that a device keeps. FSDP2 cuts the first dimension into parts of one
        size, of which the last ones may hold less: the first device's."""
        return sum(-(-w.part[0] // self.spread) * prod(w.part[1:]) for w in weights)

    @property
    def block(self) -> list[Weight]:
        """The weights of one block; those of all are alike."""
        return [weight for weight in self.weights if weight.name.startswith("layers.0.")]

    @property
    def outside(self) -> list[Weight]:
        """The weights outside of blocks."""
        return [weight for weight in self.weights if not weight.in_block]

    @property
    def muons(self) -> list[Weight]:
        """Those that Muon takes."""
        return [weight for weight in self.weights if weight.optimizer == "muon"]

    @cached_property
    def matrices(self) -> list[Matrix]:
        """Those that Muon updates, with their owners, as the optimizer shares them out."""
        found: list[Matrix] = []
        for weight in self.muons:
            spread = Spread({}, {}, self.held([weight]) / weight.numel)
            parameter = torch.empty(weight.shape, device="meta")
            found += owners.matrices(parameter, 0, weight.split, spread)
        return owners.share_out(found, self.devices)

    @property
    def muon(self) -> MuonConfig | None:
        """Its settings."""
        return self.cfg.optim if isinstance(self.cfg.optim, MuonConfig) else None


def numbers(weights: Iterable[Weight]) -> int:
    """In these, of one device of each tensor group together with those that it shards with."""
    return sum(prod(weight.part) for weight in weights)


ROWS_WHOLE = (".attn.o.weight", ".mlp.down.weight")
"""Matrices whose columns tensor parallelism divides, as those before them have its rows."""


def _part(name: str, shape: Sequence[int], tensor: int) -> tuple[int, ...]:
    """As `dtt.parallel.tensor.plan` has it: norms, and biases of what is summed, are whole."""
    first, *rest = shape
    if name.endswith(ROWS_WHOLE):
        return first, rest[0] // tensor
    if "norm" in name or name.endswith((".attn.o.bias", ".mlp.down.bias")):
        return tuple(shape)
    return first // tensor, *rest


def make_case(
    cfg: RunConfig, gpu: Gpu, nodes: int, gpus_per_node: int, vocab_size: int, steps: int
) -> Case:
    """Of a run of `steps` steps; ConfigError where the sizes do not fit each other."""
    sizes = resolve(cfg.parallel, nodes * gpus_per_node)
    arch = scaled(cfg, vocab_size).arch
    fit.check_batches(cfg.train, sizes.data)
    check_mesh(sizes, arch, cfg.train)
    stages = resolve_stages(cfg.train)
    return Case(cfg, gpu, nodes, gpus_per_node, sizes, arch, _precision(cfg, gpu), stages, steps)


def _precision(cfg: RunConfig, gpu: Gpu) -> Precision:
    if cfg.train.precision == "auto" and gpu.kind == "cuda":
        return Precision.BF16  # which all of GPUS multiply natively
    return choose(cfg.train.precision, torch.device("cpu"))
