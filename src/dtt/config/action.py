"""The base class of what a run does after some of its steps, besides what dtt does itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import NonNegativeInt

from dtt.config.base import Section

NAME = re.compile(r"[A-Za-z0-9_.-]+")


class Action(Section):
    """Something that a run does after some of its steps. One of your own defines keys and `run`."""

    type: str = "FILE.py:CLASS"
    """Its class, as `FILE.py:CLASS` from the folder of the configuration, or `MODULE:CLASS`."""
    name: str | None = None
    """Name of its numbers, which are recorded as `own/NAME`; null: that of its class."""
    every: NonNegativeInt = 100
    """Steps from one time to the next; it also runs after the last step. 0: only then."""

    @property
    def label(self) -> str:
        """The name of its records."""
        return self.name or self.type.rpartition(":")[2]

    def due(self, step: int, steps: int) -> bool:
        """Return True if it runs after `step` (the first is 1), of a run of `steps` steps.

        It is asked after each step, on each rank, and must answer the same on all of them.
        """
        return step > 0 and (step == steps or (self.every > 0 and step % self.every == 0))

    def run(self, run: Any) -> Mapping[str, float] | None:
        """Do it, on all ranks together, and return numbers to record, if any, by name.

        `run` is a `dtt.StepView`. Those of the first rank are recorded.
        """
        raise NotImplementedError

    def state(self) -> Mapping[str, Any]:
        """Return what a resumed run needs, as JSON; it is equal on all ranks.

        Keep it in attributes whose names begin with `_`.
        """
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error for an entry without a class, or a name that no record can have."""
        if type(self) is Action:
            yield "type", "must name a class, as FILE.py:CLASS or MODULE:CLASS"
        if self.name is not None and not NAME.fullmatch(self.name):
            yield "name", "takes letters, digits, and the characters _ . -"
