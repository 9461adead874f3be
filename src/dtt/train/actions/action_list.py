"""The actions of a run, in their order."""

from __future__ import annotations

from collections.abc import Callable

from dtt.data.samples.loader import BatchReader
from dtt.train.actions.action import StepAction
from dtt.train.actions.own import Own
from dtt.train.actions.sample import Sample, make_sampler
from dtt.train.actions.save import SaveCheckpoint
from dtt.train.actions.step_log import Log
from dtt.train.actions.tasks import Tasks, make_tasks
from dtt.train.actions.validate import Validate, make_answers, make_evaluator
from dtt.train.components import TrainState
from dtt.train.inputs import StartedRun
from dtt.train.objectives.loss_function import RunView


def make_actions(
    inputs: StartedRun, state: TrainState, reader: BatchReader, steps: Callable[[], int]
) -> list[StepAction]:
    """Return the actions of a run in their order; those without their part are left out.

    `save` comes before those that take long, or more memory than a step: a process that ends in
    one of them, killed or out of memory, would lose all steps since the last save, and lose them
    again in the next attempt. `recorded.position_of` says which of them a checkpoint was followed
    by.
    """
    cfg = inputs.cfg
    actions: list[StepAction] = [Log(cfg, steps), SaveCheckpoint(cfg, steps)]
    if (evaluator := make_evaluator(inputs, state, reader)) is not None:
        actions.append(Validate(cfg, steps, evaluator, make_answers(inputs)))
    if (tasks := make_tasks(inputs, state)) is not None:
        actions.append(Tasks(cfg, steps, tasks))
    if (sampler := make_sampler(cfg, inputs.dataset)) is not None:
        actions.append(Sample(cfg, steps, sampler))
    # Last: they see the validation of their step. A checkpoint of the step has been saved before,
    # so a run that resumes from it runs them again, from the state that they had.
    view = RunView.of(inputs, state.mesh)
    return [*actions, *(Own(cfg, steps, own, view) for own in cfg.actions)]
