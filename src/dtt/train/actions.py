"""The actions after a step besides training: log, save, validate, tasks, sample.

The loop holds a list of actions and runs those that are due, in the order of the list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Literal

from dtt.checkpoint import replicas
from dtt.config.action import Action
from dtt.config.own import own_code
from dtt.config.run import RunConfig
from dtt.evaluate.answers import AnswerEvaluator
from dtt.evaluate.tasks.task_evaluator import TaskEvaluator
from dtt.evaluate.validation import Evaluator, Sampler, Together
from dtt.mesh.sharding import on_this_rank
from dtt.track.base import Record
from dtt.train.components import Run
from dtt.train.data_hash import check_ranks
from dtt.train.objectives.loss_function import RunView
from dtt.train.own_action import KEY, name_of, run_action, states_of
from dtt.train.state import Position, rng_tensors
from dtt.train.supervise.watchdog import Phase

Stop = Callable[[], bool]
"""Function that returns True if a stop was requested. All ranks call it together, often."""
Rule = Callable[[Position], bool]
"""Function that returns True for each position after which an action runs."""


@dataclass(frozen=True)
class StepAction:
    """Something that a run does after some of its steps, on all ranks together."""

    name: str
    rule: Rule
    work: Callable[[Run, Stop], list[Record] | None]
    """Function that does it and returns records to log; None if a stop request cut it short."""
    pause: Literal["evaluate", "tasks", "sample", "save"] | None = None
    """The part of the wall time that it counts as; None for one that takes no time."""
    kind: str | None = None
    """The kind of its records, if they belong to this step alone. A run that resumes while the
    action is due writes them again."""

    def due(self, position: Position) -> bool:
        """Return True if it should run at this position and has not run there yet."""
        return self.rule(position) and position.done.get(self.name) != position.step

    def run(self, run: Run, stop: Stop) -> list[Record] | None:
        """Run it and return records to log; None if it was cut short, so that it is due again."""
        with ExitStack() as stack:
            if self.pause is not None:
                phase: Phase = "evaluate" if self.pause == "tasks" else self.pause
                stack.enter_context(run.watchdog.phase(phase))
                stack.enter_context(run.observers.meter.paused(self.pause))
            records = self.work(run, stop)
        if records is not None:
            run.position.done[self.name] = run.position.step
        return records


def rules(cfg: RunConfig, steps: Callable[[], int]) -> Mapping[str, Rule]:
    """Return the rule of each action by name; `steps` is a function, as a time limit changes it."""
    train = cfg.train

    def ends(position: Position) -> bool:
        return position.step in (0, steps())

    return {
        "log": lambda p: p.step > 0 and (every(train.log_every, p.step) or p.step == steps()),
        "validate": lambda p: every(train.eval_every, p.step) or ends(p),
        # A run with a time limit also evaluates the tasks once at its start, to measure how long
        # that takes.
        "tasks": lambda p: (
            every(cfg.eval.every, p.step)
            or p.step == steps()
            or (train.timed and "tasks" not in p.done)
        ),
        "sample": lambda p: every(train.sample_every, p.step) or ends(p),
        "save": lambda p: p.step > 0 and (every(cfg.checkpoint.every, p.step) or p.step == steps()),
    }


def every(interval: int, step: int) -> bool:
    """Return True if an event with a period of `interval` steps (0: never) is due after `step`."""
    return interval > 0 and step % interval == 0


def make_actions(
    cfg: RunConfig,
    steps: Callable[[], int],
    evaluator: Evaluator | None,
    answers: AnswerEvaluator | None,
    tasks: TaskEvaluator | None,
    sampler: Sampler | None,
    facts: RunView,
) -> list[StepAction]:
    """Return the actions of a run in their order; those without their part are left out.

    `save` comes before those that take long, or more memory than a step: a process that ends in
    one of them, killed or out of memory, would lose all steps since the last save, and lose them
    again in the next attempt. `recorded.position_of` says which of them a checkpoint was followed
    by.
    """
    rule = rules(cfg, steps)
    actions = [StepAction("log", rule["log"], log), StepAction("save", rule["save"], save, "save")]
    if evaluator is not None:
        validation = partial(validate, evaluator, answers)
        actions.append(StepAction("validate", rule["validate"], validation, "evaluate", "eval"))
    if tasks is not None:
        scores = partial(evaluate_tasks, tasks)
        actions.append(StepAction("tasks", rule["tasks"], scores, "tasks", "task"))
    if sampler is not None:
        text = partial(sample, sampler)
        actions.append(StepAction("sample", rule["sample"], text, "sample", "sample"))
    for own in cfg.actions:
        # Last: they see the validation of their step. A checkpoint of the step has been saved
        # before, so a run that resumes from it runs them again, from the state that they had.
        name = name_of(own)
        work = partial(run_action, own, facts)
        actions.append(StepAction(name, _own_rule(own, steps), work, "evaluate", name))
    return actions


def _own_rule(own: Action, steps: Callable[[], int]) -> Rule:
    def due(position: Position) -> bool:
        with own_code(own, KEY):
            return own.due(position.step, steps())

    return due


def log(run: Run, _stop: Stop) -> list[Record]:
    """Return the metrics since the last call: speed, epochs and finished saves."""
    step, meter = run.position.step, run.observers.meter
    startup = run.observers.time_breakdown.startup_record(meter)
    reading = meter.read()
    run.observers.time_breakdown.write(step, meter)
    run.stop_lead.add_step(reading["seconds_per_step"] or 0.0)
    steps = run.schedule.expected_steps(step)
    run.watchdog.expect(steps)
    epochs = run.dataset.epochs(run.position.samples)
    return [
        *([] if startup is None else [startup]),
        {"kind": "perf", "step": step, "steps": steps, **reading},
        {"kind": "data", "step": step, "epochs": epochs},
        *finished_saves(run),
    ]


def finished_saves(run: Run) -> list[Record]:
    """Return the `save` records of the saves that have finished since the last call."""
    saves, stop_lead = run.saver.finished(), run.stop_lead
    records = []
    for saved in saves:
        following, during = run.observers.meter.slowdown(saved.began, saved.ended)
        slowdown = {"next_step_slowdown": following, "slowdown": during}
        records.append({"kind": "save", **saved.record(), **slowdown})
        stop_lead.add_save(saved.blocked_seconds + saved.write_seconds + saved.verify_seconds)
    if saves and run.world.first:
        run.schedule.record_save(stop_lead.slowest_save)
        stop_lead.write()
    return records


def validate(
    evaluator: Evaluator, answers: AnswerEvaluator | None, run: Run, stop: Stop
) -> list[Record] | None:
    """Return the record of the validation loss, and of the share of answers that stop."""
    record = evaluator.record(run.position.step, stop, run.state.ema)
    if record is None:
        return None
    if answers is not None:
        layout = run.state.layout
        rate = answers.stop_rate(
            run.state.without_context(),
            stop,
            multiple=layout.sizes.tensor,
            collective=layout.sharded,
        )
        if rate is None:
            return None
        record["answer_stop_rate"] = rate
    if run.state.experts is not None:
        record |= run.state.experts.record()
    run.position.eval_loss = run.saver.losses[run.position.step] = record["loss"]
    return [record]


def evaluate_tasks(tasks: TaskEvaluator, run: Run, stop: Stop) -> list[Record] | None:
    """Return a record for each benchmark task, once a save of this step is on the disk."""
    # Their texts may need more memory than a step, and a kill would end the save as well.
    with run.watchdog.phase("save"):
        run.saver.wait()
    return tasks.records(run.position.step, stop)


def sample(sampler: Sampler, run: Run, _stop: Stop) -> list[Record]:
    """Generate a sample on rank 0; if the model is sharded, on all ranks together."""
    if not (run.world.first or run.state.layout.sharded):
        return []
    return [sampler.record(run.state.model, run.position.step, _together(run))]


def _together(run: Run) -> Together | None:
    """Return the arguments of collective generation; None if the model is not sharded."""
    layout = run.state.layout
    if not layout.sharded:
        return None
    return run.state.module, layout.granularity, run.world.from_first


def save(run: Run, _stop: Stop) -> list[Record]:
    """Start a checkpoint, which is written in the background."""
    position, dataset, world = run.position, run.dataset, run.world
    if position.step == run.schedule.steps:
        run.state.guard.check_trained(position)
    # Before anything is written: a checkpoint of ranks that read different files, or hold different
    # weights, must not exist.
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
        | run.schedule.state(),
        # Trackers are flushed before a checkpoint is complete: a run that resumes from it finds all
        # records up to it.
        run.observers.flush,
        run.state.base,
    )
    if position.step == run.schedule.steps:
        # Nothing is left to be trained meanwhile, and what follows may end the process.
        run.saver.wait()
    return []
