"""The model of a run: sharded over the ranks, with initial weights, and what trains it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.optim import Optimizer

from dtt.artifacts.manifests import Reference
from dtt.config.adapter import LoraConfig
from dtt.config.objective import Objective
from dtt.config.run import RunConfig
from dtt.mesh.dist import World
from dtt.mesh.mesh import Mesh, make_mesh
from dtt.mesh.sharding import FullTensor, LaidOut
from dtt.model.contract import Model
from dtt.model.decoder import Decoder, make_model, params_of
from dtt.model.experts import RouterLosses, routers
from dtt.model.init import initialize
from dtt.model.lora import attach
from dtt.optim.ema import Ema
from dtt.optim.rounding import StochasticRounding
from dtt.parallel import fp8
from dtt.parallel.apply import allocate, allocate_shards, apply
from dtt.parallel.context import ContextParallel
from dtt.parallel.pipelining import Pipeline
from dtt.params.table import Params
from dtt.train.anomaly_guard import Guard
from dtt.train.expert_load import ExpertLoad
from dtt.train.precision import Precision
from dtt.train.run_plan import RunPlan
from dtt.train.state import (
    load_optimizers,
    load_parameters,
    objective_tensors,
    optimizer_tensors,
    restore_objective,
)
from dtt.train.step import Passes


@dataclass(frozen=True, kw_only=True)
class LaidOutModel:
    """A model on its devices."""

    mesh: Mesh
    model: Model
    module: nn.Module
    """The module called in training: `model`, or `model` wrapped (DDP, context, pipeline)."""
    params: Params
    """Parameters by their unwrapped names."""
    fp8_gains: Mapping[fp8.Shape, float] = field(default_factory=dict)
    """Speedups of shapes of linear layers in fp8, by which layers were chosen."""


@dataclass(frozen=True, kw_only=True)
class TrainState(LaidOutModel):
    """The model, and everything else whose tensors a step changes."""

    passes: Passes
    """The passes of the module."""
    optimizers: Mapping[str, Optimizer]
    guard: Guard
    objective: Objective
    rounding: StochasticRounding | None
    """Stochastic rounding of bf16 weights and averages; None with other weights."""
    ema: Ema | None
    experts: ExpertLoad | None = None
    """The load of experts, of a model that has some."""
    base: Reference | None = None
    """The frozen weights, which checkpoints lack; None: all weights are trained."""

    def without_context(self) -> Model | Pipeline:
        """Return the model that computes whole sequences on each rank, or on those of a pipeline.

        Context parallelism divides the sequences of training only.
        """
        module = self.module
        return module.without_context() if isinstance(module, Pipeline) else self.model

    def tensors(self) -> dict[str, LaidOut]:
        """Return all tensors for a checkpoint but the parameters, by path."""
        state = optimizer_tensors(self.optimizers) | self.guard.tensors()
        for part in (self.ema, self.experts):
            state |= {} if part is None else part.tensors()
        state |= objective_tensors(self.objective)
        return self.params.laid_out(state)

    def restore(self, weights: Mapping[str, FullTensor], state: Mapping[str, FullTensor]) -> None:
        """Load the tensors of a checkpoint; raise ConfigError or DamagedError if they differ."""
        # A checkpoint has what is trained. The frozen weights below an adapter are there already.
        load_parameters(self.params.trainable(), weights)
        load_optimizers(self.optimizers, state, self.mesh.gather)
        if self.ema is not None:
            self.ema.restore(state)
        if self.experts is not None:
            self.experts.load(state)
        restore_objective(self.objective, state)
        self.guard.load(state)


def assemble(
    cfg: RunConfig, plan: RunPlan, world: World, fp8_gains: Mapping[fp8.Shape, float] | None = None
) -> LaidOutModel:
    """Create the model, wrap it for the run's parallelism, and give it fresh weights; collective.

    A sharded model has no memory before it is sharded, so that no rank ever holds all of it.
    `fp8_gains` are those by which an earlier attempt chose its layers.
    """
    experts = None if plan.arch.mixture is None else cfg.parallel.expert
    mesh = make_mesh(plan.sizes, world, experts)
    stages = cfg.parallel.stage_layers(plan.arch.n_layers)
    held = stages[mesh.index("pipeline") :: mesh.size("pipeline")]
    # Pure bf16 has bf16 weights, mixed precision fp32 ones.
    model = make_model(plan.arch, held, plan.precision.weights)
    if isinstance(cfg.adapter, LoraConfig):
        # Frozen weights need no fp32 copy: bf16 is what autocast would make of it in every step.
        attach(model, cfg.adapter, plan.precision.compute_dtype)
    if not mesh.sharded:
        # Now, because DDP looks at the values when it wraps the model.
        allocate(model, world.device)
    model.attention = cfg.train.attention
    for router in routers(model).values():
        balance = cfg.train.balance_loss
        if balance is None:
            # A router whose choice is corrected needs less of it.
            usual = 1e-4 if router.mixture.corrected else 1e-3
            balance = 0.0 if cfg.objective.per_pair else usual
        router.coefficients = RouterLosses(balance, cfg.train.router_z_loss)
    gains: Mapping[fp8.Shape, float] = {}
    # Before the parallelism below: it divides the layers whose sizes this reads.
    if plan.precision is Precision.FP8:
        # A rank's share of a sequence, as in training: fp8 pays off only for large products.
        sizes, tokens = plan.sizes, cfg.train.micro_batch * cfg.train.seq_len // plan.sizes.context
        gains = fp8.convert(model, world, tokens, plan.compile, sizes.tensor, known=fp8_gains)
    module = apply(
        model,
        world,
        mesh,
        compile_blocks=plan.compile,
        remat=cfg.train.remat,
        precision=plan.precision,
        reshard=cfg.parallel.reshard,
    )
    if mesh.sizes.context > 1:
        assert isinstance(model, Decoder), "the configuration was checked"
        # The outermost wrapper: it divides sequences before anything else sees them.
        module = ContextParallel(model, mesh)
    if mesh.size("pipeline") > 1:
        dtype = plan.precision.compute_dtype
        module = Pipeline(module, stages, mesh, dtype, reduce_each=plan.reduce_each)
    if mesh.sharded:
        # Values follow from the seed and the name.
        allocate_shards(model, world.device)
        if plan.precision is Precision.FP8:
            fp8.gather_in_fp8(model, mesh)
    # On every rank by itself: the values do not depend on the layout, so none are sent.
    initialize(model, cfg.seed, plan.scaling.base)
    params = params_of(model, mesh)
    return LaidOutModel(mesh=mesh, model=model, module=module, params=params, fp8_gains=gains)
