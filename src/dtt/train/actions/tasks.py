"""Benchmark tasks of a run, answered with its current weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dtt.data.text.tokenizer import add_in_front, open_tokenizer
from dtt.evaluate.evaluation import open_evaluation
from dtt.evaluate.tasks.encoding import QuestionEncoder
from dtt.evaluate.tasks.runner import TaskEvaluator, TaskRunner
from dtt.evaluate.tasks.scorer import Generator, Scorer
from dtt.track.base import Record
from dtt.train.actions.action import StepAction, Stop, every
from dtt.train.components import Run, TrainState
from dtt.train.inputs import StartedRun
from dtt.train.state import Position


@dataclass(frozen=True)
class Tasks(StepAction):
    """Scores of `eval.tasks`, every `eval.every` steps and at the end."""

    name = pause = "tasks"
    kind = "task"

    evaluator: TaskEvaluator

    def rule(self, position: Position) -> bool:
        """Return True for each position after which it runs."""
        # A run with a time limit also does it once at its start, to measure how long it takes.
        first = self.cfg.train.timed and self.name not in position.done
        return every(self.cfg.eval.every, position) or position.step == self.steps() or first

    def work(self, run: Run, stop: Stop) -> list[Record] | None:
        """Return a record for each task, once a save of this step is on the disk."""
        # Their texts may need more memory than a step, and a kill would end the save as well.
        with run.watchdog.phase("save"):
            run.saver.wait()
        return self.evaluator.records(run.position.step, stop)


def make_tasks(inputs: StartedRun, state: TrainState) -> TaskEvaluator | None:
    """Return the evaluator of benchmark tasks; None if the configuration names none."""
    cfg, plan, world, dataset = inputs.cfg.eval, inputs.plan, inputs.world, inputs.dataset
    if not cfg.tasks:
        return None
    how: dict[str, Any] = {
        "batch_tokens": cfg.batch_tokens,
        "multiple": plan.sizes.tensor,
        "collective": state.mesh.sharded,
    }
    end = dataset.manifest.end_of_document
    model, stages = state.without_context(), plan.sizes.pipeline
    runner = TaskRunner(
        Scorer(model, world, precision=plan.precision, pipeline=stages, **how),
        Generator(model, world, **how),
        QuestionEncoder(
            add_in_front(open_tokenizer(dataset.tokenizer), dataset.manifest.begin_of_document),
            end,
            plan.arch.max_seq_len,
            cfg.bos,
            None,
        ),
        world,
        until_ids=dataset.manifest.until_ids,
    )
    tasks = open_evaluation(cfg, world).tasks
    runner.check(tasks)
    return TaskEvaluator(tasks, runner)
