"""The components of a training run, grouped as the trainer holds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from torch.optim import Optimizer

from dtt.artifacts.manifests import Reference
from dtt.checkpoint.saver import Saver
from dtt.config.objective import Objective
from dtt.data.samples.loader import Batches
from dtt.mesh.sharding import FullTensor, LaidOut
from dtt.model.contract import Model
from dtt.optim.ema import Ema
from dtt.optim.rounding import StochasticRounding
from dtt.parallel.pipelining import Pipeline
from dtt.track.base import Record, Tracker
from dtt.train.anomaly_guard import Guard
from dtt.train.assemble import LaidOutModel
from dtt.train.expert_load import ExpertLoad
from dtt.train.inputs import StartedRun
from dtt.train.objectives import loss_function
from dtt.train.profiler import Profiler
from dtt.train.run_schedule import RunSchedule
from dtt.train.state import Position, load_optimizers, load_parameters, optimizer_tensors
from dtt.train.step import LossFunction, Passes
from dtt.train.supervise.time_breakdown import StopLead, TimeBreakdown
from dtt.train.throughput import ThroughputMeter


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
        state |= loss_function.state_of(self.objective)
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
        loss_function.restore(self.objective, state)
        self.guard.load(state)


@dataclass(frozen=True)
class Observers:
    """The objects that measure a run and report on it; they never change it."""

    trackers: Sequence[Tracker]
    """Trackers of rank 0; the other ranks have none."""
    meter: ThroughputMeter
    profiler: Profiler
    time_breakdown: TimeBreakdown

    def log(self, *records: Record) -> None:
        """Log records to every tracker."""
        for tracker, record in product(self.trackers, records):
            tracker.log(record)

    def flush(self) -> None:
        """Flush the trackers to disk."""
        for tracker in self.trackers:
            tracker.flush()


@dataclass(frozen=True, kw_only=True)
class Run(StartedRun):
    """The parts of a run; none of them is replaced while it trains. `Trainer` extends it.

    `cfg.objective` and `cfg.actions` are live objects: their classes may keep state in them, which
    checkpoints save.
    """

    run_id: str
    """Id of the run in trackers; kept in its checkpoints."""
    loss_function: LossFunction
    state: TrainState
    batches_from: Callable[[int], Batches]
    """Function that returns the batches from a step (counted from 0) on."""
    schedule: RunSchedule
    observers: Observers
    saver: Saver
    stop_lead: StopLead
    position: Position = field(default_factory=Position)
    """The progress so far, which changes in place."""
