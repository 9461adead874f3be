"""Inputs of the formulas: a configuration resolved for a number of devices of one kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch

from dtt.config.adapter import LoraConfig
from dtt.config.optim import GroupedOptimizer
from dtt.config.parallel import Sizes, mesh_sizes
from dtt.config.run import RunConfig
from dtt.config.schedule import RunFacts
from dtt.data.samples import compatibility
from dtt.data.samples.step_sizes import StepSizes, step_sizes_of
from dtt.estimate.built_models import formula_names, stand_in
from dtt.estimate.gpus import Gpu
from dtt.hf.model_source import frozen_architectures
from dtt.model import count
from dtt.model.adapted_layers import adapter_weights
from dtt.model.architecture import AnyArchitecture, Architecture, BuiltArchitecture
from dtt.model.contract import Model
from dtt.model.decoder import make_model, params_of
from dtt.model.lora import LORA_A, LORA_B, attach
from dtt.model.mesh_divisibility import check_layout
from dtt.model.nf4 import BLOCK, CODES_OF, SCALES_OF
from dtt.model.scaling import scaled
from dtt.optim import built, groups
from dtt.optim.adamw import AdamWConfig
from dtt.optim.built import OWN
from dtt.optim.muon import redistribution
from dtt.optim.muon.redistribution import Matrix
from dtt.optim.muon.variant import MuonConfig
from dtt.train.precision import Precision, choose
from dtt.train.process_memory import reduces_each

FP32 = 4
"""Bytes of an element in fp32."""


@dataclass(frozen=True)
class Weight:
    """A parameter of the model."""

    name: str
    shape: tuple[int, ...]
    optimizer: str
    """`muon` or `adamw`; empty if it is frozen."""
    split: tuple[int, ...] | None
    """Rows of each matrix in the parameter, if Muon treats it as several."""
    part: tuple[int, ...]
    """Shape of the shard under tensor parallelism."""
    cautious: bool = False
    """True if its weight decay is cautious."""
    trained: bool = True
    """False for the frozen weights below an adapter."""
    itemsize: float = 4
    """Bytes of an element; in 4 bits, with those of the scales."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def quantized(self) -> bool:
        """True if it is stored in 4 bits."""
        return self.itemsize < 1

    @property
    def in_block(self) -> bool:
        """True if FSDP2 gathers it with a block, False if with the parameters outside of blocks."""
        return self.name.startswith("layers.")


@dataclass(frozen=True)
class Case:
    """A run on a mesh of devices of one kind."""

    cfg: RunConfig
    gpu: Gpu
    nodes: int
    gpus_per_node: int
    sizes: Sizes
    arch: Architecture
    """The architecture, or one of the same sizes that stands for a `built` model."""
    precision: Precision
    step_sizes: StepSizes
    steps: int
    """Steps of the run."""
    rank: int = 0
    """The place in the pipeline of the devices that are estimated."""
    stage: int = 0
    """The stage of this rank whose passes are estimated."""
    models: tuple[Model, ...] = ()
    """The frozen models of the objective, without memory."""
    built: BuiltArchitecture | None = None
    """The model, if its family builds it itself."""

    @property
    def model(self) -> AnyArchitecture:
        """The model that is trained."""
        return self.built or self.arch

    def of_rank(self, rank: int) -> Case:
        """Return the case of another rank of the pipeline, at its last stage."""
        return self._at(rank, rank + (self.cfg.parallel.stages_per_rank - 1) * self.sizes.pipeline)

    def of_stage(self, stage: int) -> Case:
        """Return the case of another stage of the pipeline, and its rank."""
        return self._at(stage % self.sizes.pipeline, stage)

    def _at(self, rank: int, stage: int) -> Case:
        case = replace(self, rank=rank, stage=stage)
        case.__dict__["all_weights"] = self.all_weights  # making them takes a tenth of a second
        return case

    @property
    def stages(self) -> list[range]:
        """The layers of each stage of the pipeline."""
        return self.cfg.parallel.stage_layers(self.arch.n_layers)

    @property
    def own_stages(self) -> list[range]:
        """The layers of each stage of this rank."""
        return self.stages[self.rank :: self.sizes.pipeline]

    @property
    def blocks(self) -> int:
        """Number of layers of the stage."""
        return len(self.stages[self.stage])

    @property
    def own_blocks(self) -> int:
        """Number of layers of this rank."""
        return sum(map(len, self.own_stages))

    @property
    def first(self) -> bool:
        """True if the stage has the embedding."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """True if the stage has the head and computes the loss."""
        return self.stage == len(self.stages) - 1

    @property
    def stage_devices(self) -> int:
        """Number of devices that hold the same layers."""
        return self.devices // self.sizes.pipeline

    @property
    def devices(self) -> int:
        """Number of devices on all nodes."""
        return self.nodes * self.gpus_per_node

    @property
    def compiled(self) -> bool:
        """True if blocks are compiled."""
        wanted = self.cfg.train.compile
        if self.sizes.tensor > 1 and self.cfg.train.remat == "full":
            return False  # as `dtt.parallel.apply` decides
        return self.gpu.kind == "cuda" if wanted is None else wanted

    @property
    def weight_bytes(self) -> int:
        """Bytes of one element of a weight, of its gradient and of its optimizer state."""
        return self.precision.weights.itemsize

    @property
    def product_bytes(self) -> int:
        """Bytes of one element in the compute dtype."""
        return self.precision.compute_dtype.itemsize

    @property
    def autocast(self) -> bool:
        """True if weights are cast to another compute dtype."""
        return self.weight_bytes != self.product_bytes

    @property
    def spread(self) -> int:
        """Number of devices over which FSDP2 shards each weight."""
        return self.sizes.shard * self.sizes.context

    @property
    def sequences(self) -> int:
        """Sequences of a global batch per data-parallel group, at the end of the run.

        The devices of a tensor and context group read them together.
        """
        return self.step_sizes.at(self.steps - 1).sequences // self.sizes.data

    @property
    def micro_batch(self) -> int:
        """Sequences in a forward pass."""
        return min(self.cfg.train.micro_batch, self.sequences)

    @property
    def accumulation(self) -> int:
        """Forward passes of a layer in a step: gradient accumulation, or a pipeline's schedule."""
        count, ranks = -(-self.sequences // self.micro_batch), self.sizes.pipeline
        if self.cfg.parallel.stages_per_rank > 1:  # rounds of one micro-batch for each rank
            return -(-count // ranks) * ranks
        return max(count, ranks)

    @property
    def keeps_whole_gradients(self) -> bool:
        """True if each device accumulates unsharded gradients, although it holds a shard."""
        return self.sizes.sharded and self.accumulation > 1 and not self.reduces_each

    @property
    def reduces_each(self) -> bool:
        """True if sharded gradients are reduced after each micro-batch, as training decides."""
        return reduces_each(self.cfg, self.model, self.sizes, self.gpu.memory)

    @property
    def tokens(self) -> int:
        """Tokens of a forward pass on one device; the devices of a tensor group share them."""
        return self.micro_batch * self.cfg.train.seq_len // self.sizes.context

    def _model(self) -> Model:
        """Return the model without memory."""
        model = make_model(self.model, dtype=self.precision.weights)
        if isinstance(self.cfg.adapter, LoraConfig):
            attach(model, self.cfg.adapter, self.precision.compute_dtype)
        return model

    @cached_property
    def own_state(self) -> float | None:
        """Bytes of state for each element that another optimizer than these updates; or None."""
        if isinstance(self.cfg.optim, AdamWConfig | MuonConfig):
            return None
        return built.state_per_element(self.cfg.optim, groups.trained(params_of(self._model())))

    @cached_property
    def all_weights(self) -> tuple[Weight, ...]:
        """All parameters of the model."""
        model = self._model()
        params = params_of(model)
        names = dict(zip(params, params, strict=True))
        if self.built is not None:
            names = formula_names(model)
        optim, trained, treated = self.cfg.optim, groups.trained(params), {}
        if isinstance(optim, GroupedOptimizer):
            treated = groups.settings(optim, trained, RunFacts(self.steps))
        found = []
        for name, param in params.items():
            if name.endswith(SCALES_OF):
                continue
            shape, itemsize = param.layout.shape, float(param.tensor.element_size())
            if name.endswith(CODES_OF):
                shape, itemsize = (shape[0], 2 * shape[1]), 1 / 2 + 1 / BLOCK
            of_weight = treated.get(name)
            found.append(
                Weight(
                    names[name].replace(CODES_OF, ".weight"),
                    shape,
                    of_weight.optimizer if of_weight else OWN if name in trained else "",
                    None if of_weight is None else of_weight.split,
                    _part(name, shape, self.sizes.tensor, self.arch, self.cfg.parallel.expert),
                    of_weight is not None and bool(of_weight.cautious),
                    param.trainable,
                    itemsize,
                )
            )
        return tuple(found)

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """The parameters of this rank of the pipeline."""
        own = {i for layers in self.own_stages for i in layers}
        first, last = 0 in own, self.arch.n_layers - 1 in own

        def held(weight: Weight) -> bool:
            if weight.in_block:
                return int(weight.name.split(".")[1]) in own
            return first if weight.name.startswith(EMBEDDINGS) else last

        return tuple(filter(held, self.all_weights))

    @property
    def flops_per_token(self) -> int:
        """FLOPs of the forward and backward pass per token."""
        return count.flops_per_token(self.model, self.cfg.train.seq_len, adapter=self.adapter)

    @property
    def adapter(self) -> int:
        """Number of weights of the adapter; 0 without one."""
        return adapter_weights(self.cfg.adapter, self.model)

    @property
    def trained(self) -> list[Weight]:
        """The parameters that are not frozen."""
        return [weight for weight in self.weights if weight.trained]

    def held(self, weights: Iterable[Weight]) -> int:
        """Return the number of elements of `weights` that the first device keeps.

        FSDP2 cuts the first dimension into chunks of one size; the last devices may have less.
        """
        return sum(
            prod(w.part[1:]) * w.part[0] // self.spread_of(w)
            if self._divides_matrices(w)
            else -(-w.part[0] // self.spread_of(w)) * prod(w.part[1:])
            for w in weights
        )

    def spread_of(self, weight: Weight) -> int:
        """Return the number of devices over which FSDP2 shards a weight: `spread`, but of experts.

        Those have the devices of a tensor-parallel group too, without those that share experts.
        """
        if EXPERTS in weight.name:
            return self.spread * self.sizes.tensor // self.cfg.parallel.expert
        return self.spread

    def _divides_matrices(self, weight: Weight) -> bool:
        """Return True if there are too few experts for each device, as `shard_experts` decides."""
        own_mesh = self.sizes.tensor > 1 or self.cfg.parallel.expert > 1
        spread = self.spread_of(weight)
        few = EXPERTS in weight.name and weight.part[0] < spread
        return own_mesh and few and weight.part[1] % spread == 0

    @property
    def block(self) -> list[Weight]:
        """The weights of one block, the last. Others have the same shapes, or an ordinary MLP."""
        last = f"layers.{self.arch.n_layers - 1}."
        return [weight for weight in self.all_weights if weight.name.startswith(last)]

    @property
    def outside(self) -> list[Weight]:
        """The weights outside of blocks."""
        return [weight for weight in self.weights if not weight.in_block]

    @property
    def in_root(self) -> list[Weight]:
        """The weights in FSDP2's root group: those outside of blocks without an untied head."""
        return [weight for weight in self.outside if weight.name != "head.weight"]

    @property
    def head(self) -> Weight:
        """The head, or the embedding if it is tied to it."""
        name = "embed.weight" if self.arch.tie_embeddings else "head.weight"
        return next(weight for weight in self.all_weights if weight.name == name)

    @property
    def muons(self) -> list[Weight]:
        """The weights that Muon updates."""
        return [weight for weight in self.weights if weight.optimizer == "muon"]

    @cached_property
    def matrices(self) -> list[Matrix]:
        """The matrices that Muon updates, with the ranks that the optimizer assigns."""
        matrices: list[Matrix] = []
        for weight in self.muons:
            fraction = self.held([weight]) / weight.numel
            parameter = torch.empty(weight.shape, device="meta")
            holders = self._holders(weight)
            matrices += redistribution.matrices(parameter, 0, weight.split, fraction, holders)
        return redistribution.assign(matrices, range(self.stage_devices))

    def _holders(self, weight: Weight) -> list[tuple[int, ...]]:
        """Return the devices of the stage that hold each expert of a stack; empty if none does."""
        shards, expert = self.spread_of(weight), self.cfg.parallel.expert
        whole = EXPERTS in weight.name and not self._divides_matrices(weight)
        if not whole or shards * expert == 1:
            return []
        each = -(-weight.part[0] // shards)
        found = []
        for e in range(weight.shape[0]):
            of_group, within = divmod(e, weight.part[0])
            place = within // each * expert + of_group
            replicas = range(self.sizes.replicate)
            found.append(tuple(replica * shards * expert + place for replica in replicas))
        return found

    @property
    def muon(self) -> MuonConfig | None:
        """The settings of Muon; None without it."""
        return self.cfg.optim if isinstance(self.cfg.optim, MuonConfig) else None


def numbers(weights: Iterable[Weight]) -> int:
    """Return the number of elements of one tensor-parallel shard of `weights`, before FSDP2."""
    return sum(prod(weight.part) for weight in weights)


EMBEDDINGS = ("embed.", "pos_embed.")
EXPERTS = ".mlp.experts."
"""What names of stacks of experts contain."""
QK_NORMS = (".attn.q_norm.weight", ".attn.k_norm.weight")
ROWS_WHOLE = (".attn.o.weight", ".mlp.down.weight")
"""Matrices that tensor parallelism shards by columns; it shards the ones before them by rows."""


def _part(
    name: str, shape: Sequence[int], tensor: int, arch: Architecture, expert: int
) -> tuple[int, ...]:
    """Return the shape of a tensor- or expert-parallel shard.

    `dtt.parallel.tensor.plan` makes it. Norms over complete heads or `dim`, the biases of outputs
    that are summed over the group, routers and shared experts are replicated.
    """
    first, *rest = shape
    if EXPERTS in name:
        return first // expert, *rest
    if ".mlp.router." in name or ".mlp.shared." in name:
        return tuple(shape)
    layer, _, kind = name.rpartition(".")
    if kind in (LORA_A, LORA_B):
        by_columns = f"{layer}.weight".endswith(ROWS_WHOLE)
        if by_columns and kind == LORA_A:
            return first, rest[0] // tensor
        # Of each layer, all ranks have one of its two factors.
        return tuple(shape) if by_columns or kind == LORA_A else (first // tensor, *rest)
    if name.endswith(ROWS_WHOLE):
        return first, rest[0] // tensor
    if name.endswith(QK_NORMS) and arch.qk_norm == "all_heads":
        return (first // tensor,)
    if "norm" in name or name.endswith((".attn.o.bias", ".mlp.down.bias")):
        return tuple(shape)
    return first // tensor, *rest


def make_case(
    cfg: RunConfig, gpu: Gpu, nodes: int, gpus_per_node: int, vocab_size: int, steps: int
) -> Case:
    """Create the case of a run of `steps` steps; raise ConfigError if sizes are incompatible."""
    sizes = mesh_sizes(cfg.parallel, nodes * gpus_per_node)
    model = scaled(cfg, vocab_size).arch
    built = model if isinstance(model, BuiltArchitecture) else None
    arch = stand_in(model) if isinstance(model, BuiltArchitecture) else model
    compatibility.check_batches(cfg.train, sizes)
    check_layout(cfg, sizes, arch)
    step_sizes, precision = step_sizes_of(cfg.train), Precision.BF16
    if cfg.train.precision != "auto" or gpu.kind == "cpu":  # bf16 is native on all of GPUS
        precision = choose(cfg.train.precision, torch.device("cpu"))
    held = frozen_architectures(cfg.objective)
    models = tuple(make_model(one, dtype=precision.compute_dtype) for one in held)
    case = Case(cfg, gpu, nodes, gpus_per_node, sizes, arch, precision, step_sizes, steps)
    return replace(case, models=models, built=built)
