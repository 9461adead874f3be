"""Benchmark tasks in the training loop.

Every `eval.every` steps and at the end, all ranks answer the questions of `eval.tasks` with the
current weights, and metrics.jsonl gets one `task` record per task. Scoring draws no random
numbers, so the weights and all other records are the same bits as without tasks. As a validation
that a stop request interrupts, an evaluation of tasks is repeated when the job resumes:
`position.json` has the step of the last one that finished. The loop writes no result files, since
these belong to a checkpoint, and most steps that are evaluated have none. It does not evaluate
averaged weights, for which training would wait twice as long. `dtt eval` does both. Rank 0 opens
the tasks before the job directory is touched, so an unknown task or a missing file is an error at
the start. For compute nodes without a network, `dtt download` fetches the questions beforehand. A
run with a time budget also evaluates the tasks before the first step, to measure how long that
takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dtt.base.errors import Diverged
from dtt.base.log import log
from dtt.evaluate.tasks.runner import TaskRunner, task_record
from dtt.evaluate.tasks.task_data import TaskData
from dtt.track.base import Record


@dataclass(frozen=True)
class TaskEvaluator:
    """The benchmark tasks of a run, answered with its current weights.

    It writes no result files: these belong to a checkpoint, and most steps that are evaluated have
    none. It does not evaluate averaged weights either, as that would double the time for which
    training waits. `dtt eval` does both, with checkpoints.
    """

    tasks: Sequence[TaskData]
    runner: TaskRunner

    def records(self, step: int, stop: Callable[[], bool]) -> list[Record] | None:
        """Return one `task` record per task, without scores if the model has diverged.

        All ranks call this together.

        Nothing draws random numbers or changes the model, so training is not affected. Return None
        as soon as `stop()`, which every rank calls between batches, is true.
        """
        records: list[Record] = []
        for data in self.tasks:
            try:
                result = self.runner.run(data, None, stop)
            except Diverged as error:  # the guard decides what to do about it, on all ranks
                log.warning("step %d: no scores of %s: %s", step, data.task.name, error)
                # Without scores, but recorded: a resume would evaluate it again.
                records.append({"kind": "task", "step": step, "task": data.task.name, "n": 0})
                continue
            if result is None:
                return None
            records.append(task_record(step, result))
        return records
