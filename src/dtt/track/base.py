"""The tracker interface: an object that receives every metric record and is closed once.

A record is a dict with `kind` and `step`:
    train   loss (nats per target token), lr, grad_norm, tokens, ledger (the sample hash chain);
            skipped (true) if the step left the weights unchanged; loss and grad_norm are null if
            they are not finite; with DPO reward_margin, reward_accuracy, logp_chosen,
            logp_rejected (means over the pairs of the step; logp in nats per answer); own/NAME:
            the terms of an objective of the user's own, as means over the targets, or pairs
    guard   why a step was skipped: why (non_finite | spike), bad_step (this one), action (stop |
            skip), ledger
    eval    loss, bits_per_byte (null if the number of bytes is unknown), losses by source if there
            are several; ema_loss if an average of the weights is kept; with DPO the metrics of
            `train` for the held-out pairs; own/NAME as in `train`
    task    task (its name) and its scores, such as acc, acc_stderr, bits_per_byte; one record per
            benchmark task
    data    epochs by source
    sample  text, which starts with prompt
    start   seconds from the command to the end of the first step, by phase; matmul_flops
    perf    steps (expected total of the run), tokens_per_second, seconds_per_step, mfu and other
            utilisation figures, memory, seconds by part, the slowest rank
            (`dtt.train.throughput`)
    save    blocked_seconds (training was blocked), write_seconds, verify_seconds, bytes;
            next_step_slowdown, slowdown (relative to the median step: of the next step, and the
            mean of all steps during the save)
    own/NAME  the numbers of an action of the user's own (`dtt.config.action`)
Only `start`, `perf` and `save` records differ between two runs of the same config. metrics.jsonl
adds `time` to each record, the time of writing in seconds since 1970.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

Record = dict[str, Any]
OWN = "own/"
"""Start of the kind of a record of an action of the user's own, and of the name of a term of an
objective of theirs; its name follows."""


def scalars(record: Record) -> Iterator[tuple[str, int | float]]:
    """Yield the numbers of a record as (`kind/name`, value); nested ones as `kind/name/inner`.

    Those of a benchmark task are `task/NAME/score`.
    """
    kind = f"task/{record.get('task')}" if record["kind"] == "task" else record["kind"]
    for name, value in record.items():
        if isinstance(value, dict):
            for inner, number in value.items():
                if isinstance(number, int | float):
                    yield f"{kind}/{name}/{inner}", number
        elif name != "step" and isinstance(value, int | float):
            yield f"{kind}/{name}", value


class Tracker(Protocol):
    """A destination for metrics."""

    def log(self, record: Record) -> None:
        """Log one record."""

    def flush(self) -> None:
        """Make all records logged so far as durable as this destination permits."""

    def close(self) -> None:
        """Flush, and release all resources."""
