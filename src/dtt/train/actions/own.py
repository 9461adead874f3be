"""Actions of a user's own: what runs them after a step, and what they may use of the run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtt.base.log import log
from dtt.config.action import Action
from dtt.config.own import own_code
from dtt.evaluate.validation import evaluating
from dtt.params.table import Params
from dtt.track.base import OWN, Record
from dtt.train.actions.action import StepAction, Stop
from dtt.train.components import Run
from dtt.train.objectives.loss_function import RunView
from dtt.train.state import Position

KEY = "actions"


@dataclass(frozen=True)
class StepView(RunView):
    """A run after one of its steps, as an action sees it. It must not change it."""

    step: int
    """Number of steps done."""
    eval_loss: float | None
    """Loss of the last validation, in nats; None before the first one."""
    model: nn.Module
    """If its parameters are sharded, all ranks must call it together."""
    params: Params
    """The parameters that this rank holds, by name; a sharded one is a DTensor."""
    _run: Run
    _stop: Callable[[], bool]
    _said: dict[str, str] = field(default_factory=dict)
    """What the action said of the run: that it ends, and that it was cut short itself."""

    def full(self, name: str) -> Tensor:
        """Return all of a parameter, gathered; the ranks that hold it call this together."""
        # The norm of a local shard is that of nothing: it differs from layout to layout.
        tensor = self.params[name].tensor.detach()
        whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return whole

    def mean(self, value: float | Tensor) -> float:
        """Return the mean of a number over all ranks, equal on them; all call this together."""
        values = self._run.world.gather(float(value))
        return math.fsum(values) / len(values)

    def gradient_norms(self) -> tuple[list[float], float, float]:
        """Return gradient norms of the last step's samples, at the weights after it, and targets.

        The norms are those of the mean loss of each micro-batch, of all ranks together, and of the
        whole batch, without dropout; the last number is that of targets in a micro-batch. It takes
        two steps' passes. All ranks call this together.
        """
        run, state = self._run, self._run.state
        batches = run.batches_from(self.step - 1)
        batch = next(batches)
        batches.close()  # ends the thread that reads ahead
        each = batch.terms / len(batch.micro_batches)
        norms = []
        with evaluating(state.module):
            for part in (*([one] for one in batch.micro_batches), batch.micro_batches):
                terms = round(each * len(part))
                state.passes.run(part, run.loss_function, terms)
                state.params.align()
                norms.append(float(state.params.norm()))
                for param in state.params.values():
                    param.tensor.grad = None
        return norms[:-1], norms[-1], each

    def end(self, why: str) -> None:
        """End the run with this step, as if it were the last one: it is evaluated and saved.

        What the first rank says counts.
        """
        self._said["end"] = why

    def stop_wanted(self) -> bool:
        """Return True if the job was asked to stop: then return soon. All ranks call it together.

        Call it often in what takes long; the action then runs again when the job resumes.
        """
        if self._stop():
            self._said["cut"] = "by a stop request"
        return "cut" in self._said


@dataclass(frozen=True)
class Own(StepAction):
    """An action of a user's own, with its keys, and what it may see of any run."""

    pause = "evaluate"

    action: Action
    seen: RunView
    """What it may see of the run, the same after each step."""

    @property
    def name(self) -> str:
        """Its name, which is also the kind of its records."""
        return name_of(self.action)

    kind = name

    def rule(self, position: Position) -> bool:
        """Return True for each position after which it runs."""
        with own_code(self.action, KEY):
            return self.action.due(position.step, self.steps())

    def work(self, run: Run, stop: Stop) -> list[Record] | None:
        """Run it and return its record; None if a stop request cut it short."""
        action, step = self.action, run.position.step
        view = StepView(
            **vars(self.seen), step=step, eval_loss=run.position.eval_loss, model=run.state.model,
            params=run.state.params, _run=run, _stop=stop,
        )  # fmt: skip
        with own_code(action, KEY):
            before = _as_json(action)
            found = action.run(view)
        if "cut" in view._said:  # noqa: SLF001  its own class
            # The step's checkpoint may follow. The action must then find the state that it began
            # with.
            with own_code(action, KEY):
                action.restore(before)
            return None
        with own_code(action, KEY):
            numbers = _checked(found)
        if why := run.world.from_first(view._said.get("end")):  # noqa: SLF001
            run.schedule.end_now(step, self.name)
            log.info("%s ends the run after step %d: %s", action.label, step, why)
        return [{"kind": self.name, "step": step, **numbers}] if numbers else []


def name_of(action: Action) -> str:
    """Return the kind of an action's records, by which the run also knows it."""
    return f"{OWN}{action.label}"


def _checked(found: Any) -> Record:
    """Return the numbers of a record; raise TypeError for anything else."""
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise TypeError(f"`run` returned {type(found).__name__}, not numbers by name")
    reserved = {"kind", "step", "time"} & found.keys()
    if reserved:
        raise TypeError(f"`run` returned a number with the name {min(reserved)!r}, of every record")
    # float() also takes a tensor, and says of which value it is that it is none.
    numbers = {str(name): float(value) for name, value in found.items()}
    # JSON has no NaN: as with a loss, null.
    return {name: n if math.isfinite(n) else None for name, n in numbers.items()}


def _as_json(action: Action) -> Any:
    """Return the state of an action, as a checkpoint would give it back."""
    return json.loads(json.dumps(action.state(), allow_nan=False))


def states_of(actions: Sequence[Action], position: Position) -> dict[str, Any]:
    """Return what a checkpoint keeps of the actions, by name: their state, and the last step."""
    found = {}
    for action in actions:
        with own_code(action, KEY):
            state = _as_json(action)
        found[action.label] = {"done": position.done.get(name_of(action)), "state": state}
    return found


def restore_actions(actions: Sequence[Action], saved: Mapping[str, Any]) -> None:
    """Give the actions their state in a checkpoint; one that is new has none."""
    for action in actions:
        if action.label in saved:
            with own_code(action, KEY):
                action.restore(saved[action.label]["state"])
