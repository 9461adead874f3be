"""Short runs, made as `dtt train` makes them, whose steps a test does one by one."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

from dtt.artifacts.jobdir import JobDir
from dtt.checkpoint import store
from dtt.config.load import resolve
from dtt.data.samples.dataset import open_dataset
from dtt.jobs.attempt import Attempt
from dtt.jobs.stop import Requests
from dtt.mesh.dist import World
from dtt.optim.groups import set_learning_rate
from dtt.train.build import build as wire
from dtt.train.objects import StartedRun
from dtt.train.run_plan import make_plan
from dtt.train.supervise.watchdog import Watchdog
from dtt.train.trainer import Trainer

STEPS = 12


def build(world: World, folder: Path, tokens: Path, *settings: str) -> Trainer:
    """A run in `folder`, made as `dtt train` makes it."""
    os.chdir(folder)
    resolved = resolve(None, [
        f"data.tokens={tokens}", "model.dim=16", "model.n_layers=1", "model.n_heads=2",
        "train.precision=fp32", f"train.steps={STEPS}", "train.seq_len=32", "train.micro_batch=4",
        "train.global_batch_tokens=256", "train.eval_every=0", "train.eval_tokens=64",
        "train.log_every=3", "train.ema_decay=0.9", "train.sample_tokens=0", "train.hang_seconds=0",
        "checkpoint.every=4", "checkpoint.keep_last=9", "schedule.type=constant",
        *settings,
    ])  # fmt: skip
    cfg = resolved.config
    job = JobDir(cfg.job_dir)
    number = world.from_first(job.begin_attempt() if world.first else 0)
    dataset = open_dataset(cfg)
    plan = make_plan(cfg, dataset, world)
    watchdog = Watchdog(job, world.ranks, plan.steps, attempt=number)
    attempt = Attempt(job, Requests(), number)
    resume = world.from_first(store.newest(job.checkpoints) if world.first else None)
    return wire(
        StartedRun(
            resolved=resolved, job=job, dataset=dataset, plan=plan, from_step=None, branch=None,
            stage=None, predecessor=None, attempt=attempt, world=world, watchdog=watchdog,
            resume=resume,
        )
    )  # fmt: skip


def one_step(trainer: Trainer) -> Callable[[], None]:
    """Two steps are made; the next is ready."""
    trainer.restore()
    batches = trainer.batches_from(0)
    set_learning_rate(trainer.state.optimizers, 1.0)
    ready = list(itertools.islice(batches, 3))
    for batch in ready[:2]:
        trainer.step(batch, 1.0)
    return lambda: trainer.step(ready[2], 1.0)
