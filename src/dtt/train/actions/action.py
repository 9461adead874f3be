"""The base class of the actions of a run, and what classes of a user's own may use of it."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtt.base.log import log
from dtt.config.action import Action
from dtt.config.own import own_code
from dtt.config.run import RunConfig
from dtt.evaluate.validation import evaluating
from dtt.mesh.mesh import Mesh
from dtt.params.table import Params
from dtt.track.base import OWN, Record
from dtt.train.objects import Run, StartedRun
from dtt.train.state import Position
from dtt.train.supervise.watchdog import Phase

KEY = "actions"
Stop = Callable[[], bool]
"""Function that returns True if a stop was requested. All ranks call it together, often."""


@dataclass(frozen=True)
class StepAction(ABC):
    """Something that a run does after some of its steps, on all ranks together."""

    pause: ClassVar[Literal["evaluate", "tasks", "sample", "save"] | None] = None
    """The part of the wall time that it counts as; None for one that takes no time."""

    cfg: RunConfig
    steps: Callable[[], int]
    """Function that returns the number of steps of the run, which a time limit changes."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Its name, by which `position.json` has the last step after which it was done."""

    @property
    def kind(self) -> str | None:
        """The kind of its records, if they belong to this step alone.

        A run that resumes while the action is due writes them again.
        """
        return None

    @abstractmethod
    def rule(self, position: Position) -> bool:
        """Return True for each position after which it runs."""

    @abstractmethod
    def work(self, run: Run, stop: Stop) -> list[Record] | None:
        """Do it, and return records to log; None if a stop request cut it short."""

    def due(self, position: Position) -> bool:
        """Return True if it should run at this position and has not run there yet."""
        return self.rule(position) and position.done.get(self.name) != position.step

    def ends(self, position: Position) -> bool:
        """Return True at the start and at the end of the run."""
        return position.step in (0, self.steps())

    def run(self, run: Run, stop: Stop) -> list[Record] | None:
        """Run it and return records to log; None if it was cut short, so that it is due again."""
        with ExitStack() as stack:
            if self.pause is not None:
                phase: Phase = "evaluate" if self.pause == "tasks" else self.pause
                stack.enter_context(run.watchdog.phase(phase))
                stack.enter_context(run.meter.paused(self.pause))
            records = self.work(run, stop)
        if records is not None:
            run.position.done[self.name] = run.position.step
        return records


def every(interval: int, position: Position) -> bool:
    """Return True if an event with a period of `interval` steps (0: never) is due."""
    return interval > 0 and position.step % interval == 0


@dataclass(frozen=True)
class RunView:
    """A run, as an objective sees it before the first step."""

    device: torch.device
    dtype: torch.dtype
    """That of the products of the forward pass."""
    rank: int
    world_size: int
    steps: int
    path: Path
    """The folder of the job."""
    _inputs: StartedRun
    _mesh: Mesh

    @classmethod
    def of(cls, inputs: StartedRun, mesh: Mesh) -> RunView:
        """Return what a class may see of the run that is built from `inputs`."""
        plan, world = inputs.plan, inputs.world
        dtype, path = plan.precision.compute_dtype, inputs.job.root
        return cls(world.device, dtype, world.rank, world.size, plan.steps, path, inputs, mesh)

    def load_model(self, source: str) -> nn.Module:
        """Return a frozen model on the device, called with token ids [B, T] for logits [B, T, V].

        `source` is a job, JOB@STEP, a Hugging Face folder, or hf:ORG/NAME. If the model of the run
        is sharded, this one is, too: then all ranks load it and call it together. A resume takes
        the same weights.
        """
        from dtt.train.frozen import load_frozen  # what reads Hugging Face folders: half a second

        if source not in self._inputs.cfg.objective.models():
            log.warning("dtt plan does not count %s: `models` of the objective lacks it", source)
        return load_frozen(source, self._inputs, self._mesh)


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
