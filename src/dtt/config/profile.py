"""Keys of the profiler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from dtt.config.base import Section, resumable

Kind = Literal["torch", "memory", "nsys"]


class ProfileConfig(Section):
    """A profile of a few steps, in `jobs/<name>/profiles/`.

    To profile a running job, use `dtt job profile`.
    """

    steps: tuple[PositiveInt, PositiveInt] | None = resumable(None)
    """First and last step to profile, such as `[20, 24]`; null: none. The first steps of a run
    compile."""
    ranks: tuple[NonNegativeInt, ...] = resumable((0,))
    """Ranks to profile."""
    kind: Kind = resumable("torch")
    """`torch`: a trace for https://ui.perfetto.dev, and a table of the most expensive operations.
    `memory`, on a GPU: every allocation, for https://pytorch.org/memory_viz. `nsys`, on a GPU:
    marks the steps for `nsys profile --capture-range=cudaProfilerApi dtt train …`."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error if the first step is after the last."""
        if self.steps is not None and self.steps[0] > self.steps[1]:
            yield (
                "steps",
                f"{self.steps[0]} is after {self.steps[1]}: specify the first and the last step",
            )
