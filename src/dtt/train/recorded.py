"""The actions of a step that its checkpoint does not know, since it is saved before them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from dtt.artifacts.jobdir import JobDir
from dtt.checkpoint.store import Checkpoint
from dtt.config.run import RunConfig
from dtt.evaluate.tasks.definition import load_tasks
from dtt.track import jsonl
from dtt.train.actions.sample import Sample
from dtt.train.actions.tasks import Tasks
from dtt.train.actions.validate import Validate
from dtt.train.state import Position

KINDS = {action.name: action.kind for action in (Validate, Tasks, Sample)}
"""The kind of the records of each action that may follow a save."""


def position_of(checkpoint: Checkpoint, job: JobDir, cfg: RunConfig) -> Position:
    """Return the position in a checkpoint, with the actions of its step that are recorded since.

    Their records are in metrics.jsonl. An action without all of them is due again.
    """
    position = Position.from_json(checkpoint.position())
    found: dict[str, list[Any]] = defaultdict(list)
    for action, kind in KINDS.items():
        of_step = [r for r in jsonl.read(job.metrics, kind) if r["step"] == position.step]
        found[action] = [record.get("task") for record in of_step]
        if kind == "eval" and of_step:
            position.eval_loss = of_step[-1]["loss"]
    if found["tasks"] and {task.name for task in load_tasks(cfg.eval.tasks)} > {*found["tasks"]}:
        found["tasks"] = []  # it was killed between two of them
    position.done |= {action: position.step for action, records in found.items() if records}
    return position
