"""The objects from which a training run is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtt.config.run import RunConfig
from dtt.jobs.attempt import Attempt
from dtt.train.supervise.watchdog import Watchdog

if TYPE_CHECKING:  # keeps torch out of checks that come before it is needed
    from dtt.checkpoint.store import Checkpoint
    from dtt.data.samples.dataset import Dataset
    from dtt.mesh.dist import World
    from dtt.train.run_plan import RunPlan


@dataclass(frozen=True)
class Inputs:
    """The objects from which the components of a trainer are built."""

    cfg: RunConfig
    plan: RunPlan
    attempt: Attempt
    world: World
    dataset: Dataset
    watchdog: Watchdog
    resume: Checkpoint | None
    source: str | None
    """The source of the initial weights, as in `init.from`; None for random ones."""
