"""Numbers that must be finite."""

from __future__ import annotations

import math

from dtt.errors import Diverged
from dtt.track.base import Record


def require_finite(record: Record) -> Record:
    """A `train` record, unchanged; Diverged if its loss or gradient norm is not a finite number."""
    for name in ("loss", "grad_norm"):
        if not math.isfinite(record[name]):
            raise Diverged(
                f"training diverged: {name} is {record[name]} at step {record['step']}",
                why="nothing was saved since; the last checkpoint is from before",
                next="start under a new name with a lower optim.lr, a longer "
                "schedule.warmup_steps or train.clip_norm=1",
            )
    return record
