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
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dtt.checkpoint import store
from dtt.checkpoint.saver import Saver
from dtt.config.load import resolve
from dtt.config.train import CheckpointConfig
from dtt.model import families
from dtt.model.architecture import fit_context, fit_vocabulary
from dtt.model.decoder import Decoder, roles
from dtt.model.init import initialize
from dtt.optim import groups
from dtt.runtime import dist as dtt_dist
from dtt.runtime.jobdir import JobDir
from dtt.runtime.ranks import Ranks
from dtt.train.state import optimizer_tensors, rng_tensors

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
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.model(ids[:, :-1], ids[:, 1:])
        (loss / ids.numel()).backward()
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        return time.perf_counter() - start

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return all tensors of a checkpoint, by kind and name."""
        weights = dict(self.model.state_dict())
        return {store.MODEL: weights, store.STATE: optimizer_tensors(self.optimizers)}


def ways(run: Run, folder: Path) -> dict[str, Callable[[int], Wait]]:
    """Return the save methods by name.

    Each starts a save of step n and returns a function that waits for its end.
    """
    world = dtt_dist.start(Ranks(), "cpu")

    def ours(asynchronous: bool) -> Callable[[int], Wait]:
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
        "dtt": ours(True),
        "dtt, checkpoint.asynchronous=false": ours(False),
        "torch.save": torch_save,
        "torch DCP save": dcp_save,
        "torch DCP async_save": dcp_async,
    }


def round_(run: Run, begin: Callable[[int], Wait], n: int) -> tuple[float, float, float]:
    """Return the seconds blocked, of the next step, and of the whole round."""
    run.step()
    start = time.perf_counter()
    wait = begin(n)
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
        begins = ways(run, folder)
        results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in begins}
        for n in range(rounds + 1):
            for name, begin in begins.items():
                result = round_(run, begin, n + 1)
                if n > 0:  # the first round allocates buffers
                    results[name].append(result)
        median = {
            name: [statistics.median(column) for column in zip(*rows, strict=True)]
            for name, rows in results.items()
        }
        size = sum(t.nbytes for part in run.state().values() for t in part.values())
        _, step, whole = median["no save"]
        print(f"{size / 1e9:.2f} GB, step {step:.2f} s, {rounds} rounds, medians")
        print(f"{'':<38}{'blocked s':>10}{'next step':>11}{'cost s':>9}")
        for name, (blocked, following, total) in median.items():
            slower = following / step - 1
            print(f"{name:<38}{blocked:>10.3f}{slower:>+11.0%}{total - whole:>9.2f}")
    finally:
        shutil.rmtree(folder)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
