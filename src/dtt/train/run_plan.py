"""The resolved plan of a run: all that follows from config, data and ranks, before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dtt.base.errors import ConfigError
from dtt.config.parallel import Sizes, mesh_sizes
from dtt.config.run import RunConfig
from dtt.config.schedule import Decay, RunFacts
from dtt.data.samples import compatibility
from dtt.data.samples.dataset import Dataset
from dtt.mesh.dist import World
from dtt.model import attention_backend, count
from dtt.model.architecture import AnyArchitecture
from dtt.model.mesh_divisibility import check_layout
from dtt.model.scaling import Scaling, scaled
from dtt.optim.resolved_schedule import ResolvedSchedule, resolve_schedule
from dtt.optim.rounding import StochasticRounding
from dtt.train.precision import Precision, choose
from dtt.train.process_memory import check_memory, device_memory, reduces_each


@dataclass(frozen=True)
class RunPlan:
    """The resolved numbers that every part of training needs."""

    sizes: Sizes
    """Sizes of the device mesh."""
    scaling: Scaling
    """The architecture, and its factors of learning rates and of initial weights."""
    parameters: int
    """Number of parameters."""
    precision: Precision
    compile: bool
    reduce_each: bool
    """If True, sharded gradients are reduced after each micro-batch. Each rank plans by the memory
    of its own device; they agree before the model is built."""
    attention: str
    """The attention backend, in words."""
    tokens: int
    """Token positions of the run; a few hold padding where documents are packed."""
    step_size: str
    """Batch size of the first step, and of the last one if it differs, in words."""
    steps: int
    """Number of steps to the end of the run, or until the data is exhausted, as planned: the loop
    follows `RunSchedule.steps`, which a time limit or an action may change."""
    schedule: ResolvedSchedule
    """Learning rate of each step."""
    data: str
    """A line for each source."""

    @property
    def arch(self) -> AnyArchitecture:
        """The architecture of the model."""
        return self.scaling.arch

    def with_decay(self, decay: Mapping[str, Any] | None) -> RunPlan:
        """Return the plan with the decay that an earlier attempt started.

        `decay` is in the form that a checkpoint keeps; None leaves the plan as it is.
        """
        if decay is None:
            return self
        started = Decay.from_json(decay)
        return replace(self, steps=started.end, schedule=self.schedule.with_decay(started))

    def facts(self, rounding: StochasticRounding | None) -> RunFacts:
        """Return what an optimizer is built for; `rounding` is for bf16 weights and their state."""
        return replace(
            self.schedule.facts,
            lr_factor=self.scaling.lr_factor,
            dtype=self.precision.compute_dtype,
            rounding=rounding,
        )

    def describe(self, world: World) -> str:
        """Return a summary of a few lines for the start of the log."""
        mesh = self.sizes.describe()
        how = ", compiled" if self.compile else ""
        if self.reduce_each and self.sizes.sharded:
            how += ", gradients reduced after each micro-batch"
        return (
            f"{self.arch.family}, {self.parameters / 1e6:.2f}M parameters, {self.precision} on "
            f"{world.size} x {world.device.type}{f' ({mesh})' if mesh else ''}{how}\n"
            f"  {'at most ' if self.schedule.waits else ''}{self.steps} steps of {self.step_size}: "
            f"{self.tokens / 1e6:.1f}M tokens, {self.tokens / self.parameters:.1f} per parameter\n"
            f"  learning rate: {self.schedule.describe()}\n  {self.attention}\n{self.data}"
        )


def make_plan(cfg: RunConfig, dataset: Dataset, world: World, done: int = 0) -> RunPlan:
    """Resolve a run for its data and devices; raise DttError if they do not fit the config.

    The first `done` steps of the run are trained.
    """
    train, step_sizes = cfg.train, dataset.step_sizes
    sizes = mesh_sizes(cfg.parallel, world.size)
    compatibility.check_batches(train, sizes, done)
    if dataset.steps == 0:
        raise ConfigError(
            "the data is exhausted before the end of the first step",
            why=f"{dataset.mixture.end} sequences, the first step takes {dataset.first_sample(1)}",
            next="data.on_exhausted=repeat, a smaller train.global_batch_tokens, or more text",
        )
    scaling = scaled(cfg, dataset.manifest.vocab_size)
    arch = scaling.arch
    check_layout(cfg, sizes, arch)
    precision = choose(train.precision, world.device)
    check_memory(cfg, arch, sizes, precision, world)
    # If a time limit ends the run, it has no decay yet: `TimeBudget` starts it.
    schedule = resolve_schedule(cfg.schedule, dataset.steps, step_sizes.tokens_before)
    return RunPlan(
        sizes=sizes,
        scaling=scaling,
        parameters=count.parameters(arch),
        precision=precision,
        compile=world.device.type == "cuda" if train.compile is None else train.compile,
        reduce_each=reduces_each(cfg, arch, sizes, device_memory(world)),
        attention=attention_backend.describe(
            arch,
            world.device,
            train.seq_len,
            cfg.separates_documents,
            context=sizes.context,
            requested=train.attention,
            dtype=precision.compute_dtype,
        ),
        tokens=step_sizes.tokens_before(dataset.steps),
        step_size=step_sizes.describe(dataset.steps),
        steps=dataset.steps,
        schedule=schedule.with_decay(None) if train.timed else schedule,
        data=dataset.describe(),
    )
