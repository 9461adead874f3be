"""The tracker interface: an object that receives every metric record and is closed once.

A record is a dict with `kind` and `step`. metrics.jsonl has one JSON object per line, in the order
of events, and adds `time`, the time of writing in seconds since 1970. Unknown values and numbers
that are not finite are null. When a job resumes from a step, the records after it are dropped,
because these steps run again. Only `start`, `perf`, `save` and `time` differ between two runs.
    train   every step: loss (nats per target token, mean over the global batch), lr (of hidden
            matrices), grad_norm (before clipping), tokens (targets so far), ledger (the sample
            hash chain after the step); batch_tokens, seq_len with a schedule of them; skipped
            (true) if the step left the weights unchanged; with DPO loss is nats per pair, and
            reward_margin (chosen minus rejected), reward_accuracy (share of pairs with a positive
            one), logp_chosen, logp_rejected (nats per answer) are means over the pairs; own/NAME:
            terms of an objective of the user's own, means over the targets, or pairs
    guard   every step that changed no weights: why (non_finite | spike), bad_step (this one),
            action (stop | skip), ledger
    eval    loss on held-out text; bits_per_byte of the text of the evaluated tokens, whose bytes
            the tokenizer tells (else the bytes per token of all held-out text; null if unknown);
            losses by source if there are several; ema_loss if an average of the weights is kept;
            with DPO the metrics of `train` for held-out pairs; own/NAME as in `train`
    task    one per benchmark task and evaluation of eval.tasks: task (its name), n (questions),
            its metrics, such as acc and bits_per_byte, and acc_stderr, … (standard errors)
    data    every log line: epochs by source
    sample  prompt, text (which starts with it), temperature
    start   once per attempt, whose first step follows `step`: seconds from the command to the end
            of the first step, by phase; matmul_flops (measured FLOP/s of a device, mean)
    perf    every log line, for the time since the one before: steps (expected total of the run),
            tokens_per_second (all devices), seconds_per_step, and
      mfu, mfu_causal         model FLOPs relative to the dense bf16 peak of the data sheet: 6 per
                              matrix parameter and token, plus 12 n_layers n_heads head_dim seq_len
                              for attention, of which mfu_causal counts half; null in fp32 and for
                              devices without a data sheet
      matmul_share            the same FLOPs relative to the measured speed of matrix products
      memory_gb               peak of the attempt, allocated (on a CPU resident);
                              memory_steady_gb since the last record, memory_reserved_gb by torch
      seconds                 of rank 0 by part, which add up to all time: data (waiting for a
                              batch; on a GPU the time it was idle), forward_backward, optimizer
                              (with clipping and the guard), evaluate, tasks, sample, profile, save
                              (training blocked), other (agreement, logging, stalls)
      communication_seconds   the exposed part of these: gradients (after the last gradient, DDP;
                              absent for sharded weights), optimizer (Muon waited)
      slowest_rank            rank with the longest time without waits, slowest_node its node,
                              slowest_behind its fraction behind the median rank; null where
                              weights are sharded, because ranks wait within layers there
      stage_seconds, bubble   of a pipeline: seconds of a step that each rank computes, mean over
                              replicas; share of the passes for which a rank does not, in the mean
    save    when the checkpoint of `step` is verified: blocked_seconds (training was blocked),
            write_seconds, verify_seconds, bytes
    own/NAME  the numbers of an action of the user's own (`dtt.config.action`)
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
