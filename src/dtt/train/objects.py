"""The run, an object that grows: checked, then started on all ranks, then with model and trackers.

`PreparedRun`, `StartedRun` and `Run`, of which the only instance is a `Trainer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING

from dtt.artifacts.jobdir import JobDir
from dtt.config.merging import Resolved
from dtt.config.run import RunConfig
from dtt.jobs.attempt import Attempt
from dtt.jobs.branch import Branch
from dtt.jobs.stages import FinalCheckpoint, Stage
from dtt.train.supervise.watchdog import Watchdog

if TYPE_CHECKING:  # keeps torch out of checks that come before it is needed
    from dtt.artifacts.manifests import Reference
    from dtt.checkpoint.mirror import Mirror
    from dtt.checkpoint.saver import Saver
    from dtt.checkpoint.store import Checkpoint
    from dtt.data.samples.dataset import Dataset
    from dtt.data.samples.loader import Batches
    from dtt.mesh.dist import World
    from dtt.track.base import Record, Tracker
    from dtt.train.profiler import Profiler
    from dtt.train.run_plan import RunPlan
    from dtt.train.run_schedule import RunSchedule
    from dtt.train.state import Position
    from dtt.train.step import LossFunction
    from dtt.train.throughput import AttemptTimes, ThroughputMeter
    from dtt.train.trained_model import TrainState


def named_reference(cfg: RunConfig) -> str | None:
    """Return the source of the reference model; None: the initial weights, or the loss has none."""
    objective = cfg.objective
    return getattr(objective, "reference", None) if objective.needs_reference else None


@dataclass(frozen=True)
class PreparedRun:
    """A start of a job that passed all checks."""

    resolved: Resolved
    job: JobDir
    """The job directory, with all its paths."""
    dataset: Dataset
    plan: RunPlan
    from_step: int | None
    """The step to resume from in place of the newest checkpoint."""
    branch: Branch | None
    """The branch point, if the job is a branch."""
    stage: Stage | None
    """The stage of training, if the job is one."""
    predecessor: FinalCheckpoint | None
    """The checkpoint that the stage starts from, on rank 0; None on resume, and for the first."""

    @property
    def cfg(self) -> RunConfig:
        """The configuration."""
        return self.resolved.config

    @property
    def source_of_weights(self) -> str | None:
        """The value of `init.from`; for a stage with the step of the checkpoint."""
        if self.predecessor is not None:
            return self.predecessor.reference
        return self.cfg.init.source


@dataclass(frozen=True, kw_only=True)
class StartedRun(PreparedRun):
    """A start whose ranks have met, and know the checkpoint that they resume from."""

    attempt: Attempt
    world: World
    watchdog: Watchdog
    resume: Checkpoint | None
    models: dict[str, Reference] = field(default_factory=dict)
    """References to the frozen models of the objective, by their sources; filled as they load."""

    def open_mirror(self) -> Mirror | None:
        """Return the mirror of the checkpoints, on rank 0; None without `checkpoint.mirror`."""
        from dtt.checkpoint.mirror import Mirror, mirror_url

        cfg, job = self.cfg, self.job
        if cfg.checkpoint.mirror is None or not self.world.first:
            return None
        url = mirror_url(cfg.checkpoint.mirror, cfg.name)
        return Mirror(url, job, job.run_id(), cfg.checkpoint)


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
    saver: Saver
    trackers: Sequence[Tracker]
    """Trackers of rank 0; the other ranks have none."""
    meter: ThroughputMeter
    profiler: Profiler
    times: AttemptTimes
    position: Position
    """The progress so far, which changes in place."""

    def log(self, *records: Record) -> None:
        """Log records to every tracker."""
        for tracker, record in product(self.trackers, records):
            tracker.log(record)

    def flush(self) -> None:
        """Flush the trackers to disk."""
        for tracker in self.trackers:
            tracker.flush()
