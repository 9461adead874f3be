"""Checkpoints, which are written in the background."""

from __future__ import annotations

from dtt.checkpoint import replicas
from dtt.mesh.sharding import on_this_rank
from dtt.track.base import Record
from dtt.train.actions.action import StepAction, Stop, every
from dtt.train.actions.own import states_of
from dtt.train.components import Run
from dtt.train.data_hash import check_ranks
from dtt.train.state import Position, rng_tensors


class SaveCheckpoint(StepAction):
    """A checkpoint every `checkpoint.every` steps, at the end, and when one is requested."""

    name = pause = "save"

    def rule(self, position: Position) -> bool:
        """Return True for each position after which it runs."""
        period = every(self.cfg.checkpoint.every, position)
        return position.step > 0 and (period or position.step == self.steps())

    def work(self, run: Run, stop: Stop) -> list[Record]:
        """Start a checkpoint."""
        position, dataset, world = run.position, run.dataset, run.world
        if position.step == run.schedule.steps:
            run.state.guard.check_trained(position)
        # Before anything is written: a checkpoint of ranks that read different files, or hold
        # different weights, must not exist.
        check_ranks(position, world)
        params, state = run.state.params.trainable(), run.state.tensors()
        replicas.check({**params, **state}, position.step, world)
        # One step earlier, so that a resume can read the last step's samples again and check their
        # hash.
        sources = dataset.state(dataset.first_sample(max(0, position.step - 1)))
        run.saver.begin(
            position.step,
            params,
            state | on_this_rank(rng_tensors(world.rank, world.device)),
            position.to_json()
            | {"run_id": run.run_id, "sources": sources}
            | {"own_actions": states_of(run.cfg.actions, position)}
            | {"fp8_gains": [[*shape, gain] for shape, gain in run.state.fp8_gains.items()]}
            | run.schedule.state(),
            # Trackers are flushed before a checkpoint is complete: a run that resumes from it finds
            # all records up to it.
            run.observers.flush,
            run.state.base,
        )
        if position.step == run.schedule.steps:
            # Nothing is left to be trained meanwhile, and what follows may end the process.
            run.saver.wait()
        return []
