"""Goodput: the share of a job's time, over all attempts, spent in steps that were not lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dtt.artifacts.jobdir import JobDir
from dtt.base.reading import Kind, fits, is_kind
from dtt.jobs.clock import in_words, records

USEFUL = ("forward_backward", "optimizer")
LEAST_SHOWN = 0.005
"""Minimum share of a loss that `describe` mentions."""
LOGGED: dict[str, Kind] = {"steps": int, "step": int, "first": int, "parts": dict}
"""Fields in the clock.json of an attempt that reached a log line, and their types."""


@dataclass(frozen=True)
class Goodput:
    """Useful and lost time of a job, in seconds, as measured by rank 0."""

    attempts: int
    seconds: float
    """Time of all attempts; the waiting time between them does not count."""
    useful: float
    """Forward and backward passes and optimizer, in steps that no later attempt repeated."""
    lost: Mapping[str, float]
    """The rest by cause: start, redone (steps that were repeated), data (waiting for it), save, …;
    unlogged is the time after the last log line of an attempt that still runs or was killed."""

    @property
    def share(self) -> float:
        """Useful time as a fraction of the total, 0 to 1."""
        return min(1.0, self.useful / self.seconds)

    def describe(self) -> str:
        """Return a one-line summary."""
        lost = sorted(self.lost.items(), key=lambda item: -item[1])
        shares = [(name, seconds / self.seconds) for name, seconds in lost]
        causes = ", ".join(f"{name} {share:.1%}" for name, share in shares if share > LEAST_SHOWN)
        plural = "s" if self.attempts > 1 else ""
        total = f"{in_words(self.seconds)} in {self.attempts} attempt{plural}"
        return f"{self.share:.1%} of {total}" + (f"; lost: {causes}" if causes else "")

    def record(self) -> dict[str, Any]:
        """Return the JSON object: `share`, `seconds` and `lost`."""
        lost = {name: round(seconds, 3) for name, seconds in self.lost.items()}
        return {"share": round(self.share, 4), "seconds": round(self.seconds, 3), "lost": lost}


def goodput(job: JobDir) -> Goodput | None:
    """Return the goodput of all attempts so far, from their clock.json; None if there is none."""
    attempts = list(records(job, job.attempts()))
    seconds = sum(attempt["seconds"] for attempt in attempts)
    if not seconds:
        return None
    useful, lost = 0.0, defaultdict[str, float](float)
    # The step from which a later attempt resumed: steps after it are lost.
    resumed_from = float("inf")
    # Backwards: the newest attempt lost nothing, and each earlier one loses what a later one
    # repeated.
    for attempt in reversed(attempts):
        steps = attempt.get("steps")
        if not steps or not fits(attempt, LOGGED):  # it ended before its first log line
            lost["start"] += attempt["seconds"]
            continue
        # Steps up to the resume, of all steps of the attempt. Times are per part, not per step, so
        # the share stands for both.
        kept_share = max(0.0, min(attempt["step"], resumed_from) - attempt["first"]) / steps
        resumed_from = min(resumed_from, attempt["first"])
        # Negative or wrong values come from a damaged file, and must not raise the share.
        spent = {part: max(0.0, s) for part, s in attempt["parts"].items() if is_kind(s, float)}
        working = sum(spent.pop(part, 0.0) for part in USEFUL)
        useful += kept_share * working
        lost["redone"] += (1 - kept_share) * working
        for part, part_seconds in spent.items():
            lost[part] += part_seconds
        lost["unlogged"] += max(0.0, attempt["seconds"] - working - sum(spent.values()))
    return Goodput(len(attempts), seconds, useful, lost)
