"""What a tracker is: something that is told every record and closed once.

A record is a dict with `kind` and `step`:
    train   loss (nats per target token), lr, grad_norm, tokens, ledger; skipped (true) if the step
            changed nothing, its loss and grad_norm then null where they are no finite numbers
    guard   why a step was skipped: why (non_finite | spike), bad_step (itself, or the one it is
            near), action (stop | skip | rewind), ledger
    eval    loss, bits_per_byte (null where the bytes are not known), losses of each source if
            there are several, by name; ema_loss if weights are averaged
    data    epochs of each source, by name
    sample  text
    start   seconds from the command to the end of the first step, by phase; matmul_flops
    perf    steps (of the run, as far as is known), tokens_per_second, seconds_per_step, mfu and
            other shares, memory, seconds of each part, the slowest rank: `dtt.train.meter`
    save    blocked_seconds (training stood still), write_seconds, verify_seconds, bytes,
            next_step_slowdown, slowdown (of the next step and of all meanwhile, as a share)
Only `start`, `perf` and `save` records differ between two runs of one config. metrics.jsonl adds to
each `time`, in seconds since 1970, at which it was written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

Record = dict[str, Any]


def scalars(record: Record) -> Iterator[tuple[str, int | float]]:
    """The numbers of a record as `kind/name`, those of sources as `kind/name/source`."""
    for name, value in record.items():
        if isinstance(value, dict):
            for inner, number in value.items():
                yield f"{record['kind']}/{name}/{inner}", number
        elif name != "step" and isinstance(value, int | float):
            yield f"{record['kind']}/{name}", value


class Tracker(Protocol):
    """A place metrics go."""

    def log(self, record: Record) -> None:
        """Take one record."""

    def flush(self) -> None:
        """Make what was logged so far as durable as this place can."""

    def rewind(self, step: int) -> None:
        """Forget what came after `step`: training went back there, and it will come again."""

    def close(self) -> None:
        """Flush and let go."""
