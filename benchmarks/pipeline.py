"""Count the idle slots of pipeline schedules, and measure a pipeline of two processes on a CPU.

    python benchmarks/pipeline.py [--micro-batches 4 8 16] [--rounds 3]

The first table simulates the operations of torch's schedules in their order on each of p ranks, of
v stages each, with m micro-batches: a forward pass of a stage takes one slot, a backward pass two,
communication none. The formula is (p - 1) / (v m), idle time over busy time (Narayanan et al.,
2021, arXiv 2104.04473).

The second table has the tokens per second of `dtt train` in fp32 for a Llama of 27M parameters with
micro-batches of 128 tokens: one process with one thread and with two, two such processes of one
thread at once that have nothing to do with each other, and `parallel.pipeline=2` with one thread
each. All take turns, one step each; the first round is a warm-up, figures are medians. `overhead`
is the time of the pipeline over that of the two at once, which share the machine as it does.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measurement import Table, make_tokens, parser_of
from torch import nn
from torch.distributed import pipelining
from torch.testing._internal.distributed.fake_pg import FakeStore
from train_cpu import Worker, train_in_turns

FORWARD, BACKWARD = "F", "B"
SLOTS = {FORWARD: 1, BACKWARD: 2}
SEQ_LEN = 128
MODEL = [
    "model.family=llama", "model.dim=512", "model.n_layers=8", "model.n_heads=8",
    "model.ffn_dim=1408", "model.tie_embeddings=false",
    "model.vocab_size=1024",  # so that the head is small, and both halves of the layers equal
]  # fmt: skip
LAYOUTS = {"1 thread": (1, 1), "2 threads": (1, 2), "pipeline": (2, 1)}
"""Processes and threads of each."""

Operation = tuple[int, str, int]
"""Stage, kind and micro-batch."""


# ---- idle slots ----------------------------------------------------------------------------------


def operations(p: int, v: int, m: int) -> list[list[Operation]]:
    """Return the operations of each rank, in the order of torch's schedule."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=p)
    some = torch.empty(1, device="meta")
    device = torch.device("cpu")
    stages: list[Any] = [
        pipelining.PipelineStage(
            nn.Identity(), stage, p * v, device, input_args=(some,), output_args=(some,)
        )
        for stage in range(0, p * v, p)
    ]
    schedule: Any = (
        pipelining.Schedule1F1B(stages[0], m, loss_fn=sum)
        if v == 1
        else pipelining.ScheduleInterleaved1F1B(stages, m, loss_fn=sum)
    )
    dist.destroy_process_group()
    ranks: list[list[Operation]] = [[] for _ in range(p)]
    # The micro-batches are counted here: in torch 2.13 the table of 1F1B numbers the forward passes
    # of the last rank from 1. Empty slots are left out; torch ignores them, too.
    seen = Counter[tuple[int, str]]()
    for rank, own in enumerate(ranks):
        for action in schedule.pipeline_order[rank]:
            if action is not None and action.computation_type.value in SLOTS:
                key = action.stage_index, action.computation_type.value
                own.append((*key, seen[key]))
                seen[key] += 1
    return ranks


def idle_slots(ranks: list[list[Operation]], stages: int) -> int:
    """Return the slots in which a rank does nothing, from the start of a step to its end."""
    ended: dict[Operation, int] = {}
    free = [0] * len(ranks)
    left = [list(reversed(own)) for own in ranks]
    while any(left):
        before = len(ended)
        for rank, own in enumerate(left):
            while own and all(needed in ended for needed in needs(own[-1], stages)):
                operation = own.pop()
                start = max([free[rank], *(ended[needed] for needed in needs(operation, stages))])
                free[rank] = ended[operation] = start + SLOTS[operation[1]]
        if len(ended) == before:
            raise RuntimeError(f"each rank waits for another one, after {before} operations")
    return max(free) - sum(SLOTS[kind] for _, kind, _ in ranks[0])


def needs(operation: Operation, stages: int) -> list[Operation]:
    """Return the operations whose results an operation takes."""
    stage, kind, number = operation
    if kind == FORWARD:
        return [(stage - 1, FORWARD, number)] if stage else []
    later = [(stage + 1, BACKWARD, number)] if stage + 1 < stages else []
    return [(stage, FORWARD, number), *later]


def count() -> None:
    """Print the idle share of each schedule, counted and by the formula."""
    columns = {f"m = {factor} p": 24 for factor in (1, 2, 4, 8)}
    table = Table("idle / busy (formula)", 22, columns)
    for v in (1, 2, 5):
        for p in (2, 4, 8):
            cells = []
            for m in (p, 2 * p, 4 * p, 8 * p):
                idle, busy = idle_slots(operations(p, v, m), p * v), 3 * v * m
                cells.append(f"{idle}/{busy} = {idle / busy:.1%} ({(p - 1) / (v * m):.1%})")
            table.row(f"p = {p}, v = {v}", *cells)


# ---- tokens per second ---------------------------------------------------------------------------


def worker(tokens: Path, name: str, micro_batches: int, processes: int, threads: int) -> Worker:
    """Start a training run."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    keys = [
        f"name={name}", f"data.tokens={tokens}", "train.precision=fp32", "train.device=cpu",
        f"train.seq_len={SEQ_LEN}", "train.micro_batch=1", f"parallel.pipeline={processes}",
        f"train.global_batch_tokens={micro_batches * SEQ_LEN}", *MODEL,
    ]  # fmt: skip
    made = Worker([*launcher, __file__, "--worker", *keys], threads)
    if made.failed:
        raise RuntimeError(made.error())
    return made


def measure(tokens: Path, m: int, rounds: int) -> dict[str, float]:
    """Return the tokens per second of each layout with m micro-batches."""
    workers = {
        name: worker(tokens, f"{name.replace(' ', '-')}-{m}", m, *layout)
        for name, layout in LAYOUTS.items()
    }
    other = worker(tokens, f"other-{m}", m, 1, 1)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(1 + rounds):
            for one in workers.values():
                one.step()
            list(pool.map(Worker.step, (workers["1 thread"], other)))
            workers["1 thread"].seconds.pop()
    for one in (*workers.values(), other):
        one.end()
    found = workers | {"two at once": other}
    rates = {name: m * SEQ_LEN / statistics.median(w.seconds[1:]) for name, w in found.items()}
    return rates | {"two at once": 2 * rates["two at once"]}


def compare(tokens: Path, numbers: list[int], rounds: int) -> None:
    """Print the tokens per second, the overhead of a pipeline, and its bubble by the formula."""
    columns = dict.fromkeys((*LAYOUTS, "two at once", "overhead", "formula"), 12)
    table = Table("micro-batches", 15, columns)
    for m in numbers:
        rates = measure(tokens, m, rounds)
        overhead = rates["two at once"] / rates["pipeline"] - 1
        table.row(
            f"{m}", *(f"{rate:.0f}" for rate in rates.values()), f"{overhead:.1%}", f"{1 / m:.1%}"
        )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    count()
    print()
    with tempfile.TemporaryDirectory(prefix="dtt-pipeline-") as name:
        os.chdir(name)  # of the workers, too: their jobs are folders of it
        compare(make_tokens(Path(name)), options.micro_batches, options.rounds)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        train_in_turns(sys.argv[2:])
    else:
        main()
