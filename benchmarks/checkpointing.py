"""Measure the cost of a checkpoint to training: dtt, torch.save and DCP, in interleaved rounds.

    python benchmarks/checkpointing.py [ROUNDS] [FOLDER]

A GPT-2 124M with AdamW (fp32 weights and optimizer state, as dtt trains them) takes small steps on
the CPU; each method saves once per round. `blocked`: time for which the call blocked training.
`next step`: relative slowdown of the following step against the median step without a save. `cost`:
extra time of the round, including the wait for the end of the save, against a round of the same
number of steps without a save. torch.save and DCP neither hash nor verify the checkpoint, nor keep
the previous one; dtt does.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from measurement import Table, column_medians, in_turns

from dtt.artifacts.jobdir import JobDir
from dtt.base.ranks import Ranks
from dtt.checkpoint import store
from dtt.checkpoint.saver import Saver
from dtt.config.load import resolve
from dtt.config.train import CheckpointConfig
from dtt.data.samples.loader import MicroBatch
from dtt.mesh import dist as dtt_dist
from dtt.model import families
from dtt.model.architecture import fit_context, fit_vocabulary
from dtt.model.decoder import Decoder, roles
from dtt.model.init import initialize
from dtt.optim import groups
from dtt.train.state import optimizer_tensors, rng_tensors
from dtt.train.step import forward_backward, next_token, update

CPU = torch.device("cpu")
STEPS = 2
TOKENS = (1, 128)
FACTS = {"config_sha256": "", "data_key": "", "versions": {}}
Wait = Callable[[], Any]


class Run:
    """A model in training; `state` returns the tensors of its checkpoint."""

    def __init__(self) -> None:
        cfg = resolve(None, ["optim.type=adamw"]).config
        sizes = resolve("models/gpt2-124m").config.model
        arch = families.get(sizes.family).architecture(
            sizes, fit_vocabulary(sizes, 50257), fit_context(sizes, TOKENS[1])
        )
        self.model = Decoder(arch)
        initialize(self.model, 0)
        self.optimizers = groups.build(
            cfg.optim, dict(self.model.named_parameters()), roles(self.model), torch.bfloat16
        )

    def step(self) -> float:
        """Take one optimizer step and return its seconds."""
        start = time.perf_counter()
        ids = torch.randint(50257, (TOKENS[0], TOKENS[1] + 1))
        micro_batch = MicroBatch(ids[:, :-1], ids[:, 1:], None)
        targets = micro_batch.targets.numel()
        forward_backward(self.model, [micro_batch], next_token(), terms=targets, precision="bf16")
        update(self.optimizers, torch.zeros(()), step=0)
        return time.perf_counter() - start

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return all tensors of a checkpoint, by kind and name."""
        weights = dict(self.model.state_dict())
        return {store.MODEL: weights, store.STATE: optimizer_tensors(self.optimizers)}


def save_methods(run: Run, folder: Path) -> dict[str, Callable[[int], Wait]]:
    """Return the save methods by name.

    Each starts a save of step n and returns a function that waits for its end.
    """
    world = dtt_dist.start(Ranks(), "cpu")

    def dtt_save(asynchronous: bool) -> Callable[[int], Wait]:
        job = JobDir(folder / f"dtt-{asynchronous}")
        job.checkpoints.mkdir(parents=True)
        config = CheckpointConfig(asynchronous=asynchronous, keep_last=1)
        saver = Saver(job, 1, world, config, FACTS)

        def begin(n: int) -> Wait:
            saver.begin(n, run.state(), rng_tensors(0, CPU), {"step": n})
            return saver.wait

        return begin

    def torch_save(n: int) -> Wait:
        torch.save(run.state(), folder / "torch.pt")
        return lambda: None

    def dcp_save(n: int) -> Wait:
        dcp.save(  # type: ignore[attr-defined]
            run.state(), checkpoint_id=folder / "dcp"
        )
        return lambda: None

    def dcp_async(n: int) -> Wait:
        future: Any = dcp.async_save(  # type: ignore[attr-defined]
            run.state(), checkpoint_id=folder / "dcp-async"
        )
        return future.result  # type: ignore[no-any-return]

    return {
        "no save": lambda n: lambda: None,
        "dtt": dtt_save(True),
        "dtt, checkpoint.asynchronous=false": dtt_save(False),
        "torch.save": torch_save,
        "torch DCP save": dcp_save,
        "torch DCP async_save": dcp_async,
    }


def save_and_train(
    run: Run, begin: Callable[[int], Wait], numbers: Iterator[int]
) -> tuple[float, float, float]:
    """Return the seconds blocked, of the next step, and of the complete round."""
    run.step()
    start = time.perf_counter()
    wait = begin(next(numbers))
    blocked = time.perf_counter() - start
    following = run.step()
    for _ in range(STEPS - 1):
        run.step()
    wait()
    return blocked, following, time.perf_counter() - start


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    folder = Path(tempfile.mkdtemp(dir=sys.argv[2] if len(sys.argv) > 2 else None))
    alone = torch.distributed.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=alone, rank=0, world_size=1)
    run = Run()
    try:
        methods = {
            name: partial(save_and_train, run, begin, count(1))
            for name, begin in save_methods(run, folder).items()
        }
        results = in_turns(methods, rounds)
        medians = {name: column_medians(rows) for name, rows in results.items()}
        size = sum(t.nbytes for part in run.state().values() for t in part.values())
        _, step, round_without_save = medians["no save"]
        print(f"{size / 1e9:.2f} GB, step {step:.2f} s, {rounds} rounds, medians")
        table = Table("", 38, {"blocked s": 10, "next step": 11, "cost s": 9})
        for name, (blocked, following, total) in medians.items():
            cost = total - round_without_save
            table.row(name, f"{blocked:.3f}", f"{following / step - 1:+.0%}", f"{cost:.2f}")
    finally:
        shutil.rmtree(folder)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
