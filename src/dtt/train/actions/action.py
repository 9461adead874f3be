"""The base class of the actions of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from dtt.config.run import RunConfig
from dtt.track.base import Record
from dtt.train.state import Position
from dtt.train.supervise.watchdog import Phase

if TYPE_CHECKING:
    from dtt.train.components import Run

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
                stack.enter_context(run.observers.meter.paused(self.pause))
            records = self.work(run, stop)
        if records is not None:
            run.position.done[self.name] = run.position.step
        return records


def every(interval: int, position: Position) -> bool:
    """Return True if an event with a period of `interval` steps (0: never) is due."""
    return interval > 0 and position.step % interval == 0
