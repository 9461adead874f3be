"""The training loop, read top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dtt import __version__
from dtt.artifacts import fingerprint
from dtt.checkpoint import retain, store
from dtt.checkpoint.store import Checkpoint
from dtt.config.run import RunConfig
from dtt.data.loader import Batch
from dtt.data.order import Order, extend_ledger
from dtt.errors import DamagedError
from dtt.model.decoder import Decoder
from dtt.optim import schedule
from dtt.optim.groups import set_learning_rate
from dtt.parallel.apply import autocast, gradient_sync
from dtt.runtime.dist import World
from dtt.runtime.files import check_space
from dtt.runtime.jobdir import JobDir
from dtt.runtime.log import log
from dtt.track.base import Record, Tracker
from dtt.train.evaluate import Evaluator, Sampler
from dtt.train.guard import require_finite
from dtt.train.meter import Meter
from dtt.train.plan import Plan
from dtt.train.state import (
    Position,
    load_optimizers,
    optimizer_tensors,
    restore_rng,
    rng_tensors,
    seed_rank,
)
from dtt.train.stop import Request, Requests


@dataclass
class Trainer:
    """Everything the loop touches, made by `commands/train.py`."""

    cfg: RunConfig
    plan: Plan
    world: World
    job: JobDir
    model: Decoder
    """Holds the parameters, under their plain names."""
    module: nn.Module
    """What is called in training: `model`, or `model` wrapped."""
    optimizers: Mapping[str, Optimizer]
    order: Order
    batches_from: Callable[[int], Iterator[Batch]]
    evaluator: Evaluator | None
    sampler: Sampler | None
    trackers: Sequence[Tracker]
    """On the first rank; the others have none."""
    requests: Requests
    meter: Meter
    data_key: str
    """Of the token files, for the checkpoint's manifest."""
    position: Position = field(default_factory=Position)
    saved_step: int | None = None
    _unread: list[tuple[Record, Tensor, Tensor]] = field(default_factory=list)
    """Steps whose loss and gradient norm are still on the device."""

    def run(self, resume: Checkpoint | None) -> bool:
        """Train to the end (True) or until asked to stop (False); either way all is saved."""
        cfg, steps = self.cfg, self.plan.steps
        self.restore(resume)
        if resume is None:
            self.evaluate()
            self.sample()
        batches = self.batches_from(self.position.step)
        self.meter.restart()
        while self.position.step < steps:
            request = self.requests.agreed(self.world)
            if request is Request.STOP:
                break
            multiplier = schedule.multiplier(cfg.schedule, self.position.step, steps)
            set_learning_rate(self.optimizers, multiplier)
            self.step(next(batches), multiplier)
            step, last = self.position.step, self.position.step == steps
            if every(cfg.train.log_every, step) or last:
                self.log_progress()
            if every(cfg.train.eval_every, step) or last:
                self.evaluate()
            if every(cfg.train.sample_every, step) or last:
                self.sample()
            if every(cfg.checkpoint.every, step) or request is Request.SAVE:
                self.save()
        if self.saved_step != self.position.step:
            self.save()
        self.requests.forget(self.world)
        return self.position.step == steps

    def restore(self, resume: Checkpoint | None) -> None:
        """Take up the state of a checkpoint, or the seeds of a fresh start."""
        if resume is None:
            seed_rank(self.cfg.seed, self.world.rank)
            return
        self.model.load_state_dict(resume.model_tensors())
        load_optimizers(self.optimizers, resume.tensors(store.OPTIMIZER))
        restore_rng(resume, self.world.rank, self.cfg.seed, self.world.device)
        self.position = Position.from_json(resume.state())
        self.saved_step = resume.step
        self.check_order()
        log.info("resumed from %s", resume.path)

    def check_order(self) -> None:
        """DamagedError unless the order of the data still gives what the last step trained on."""
        position = self.position
        if position.step == 0:
            return
        count = self.plan.sequences
        windows = self.order.windows_at((position.step - 1) * count, count)
        if extend_ledger(position.previous_ledger, windows) != position.ledger:
            raise DamagedError(
                "the data is not in the order that this job was trained in",
                why=f"step {position.step} would now see other samples",
                next="use the token files, seed and batch size the job was started with",
            )

    def step(self, batch: Batch, multiplier: float) -> None:
        """One optimizer step. Nothing here waits for the device."""
        # DDP averages gradients over ranks; the loss is a mean over the whole global batch.
        scale = self.world.size / self.plan.tokens_per_step
        loss = torch.zeros((), device=self.world.device)
        for i, (tokens, targets) in enumerate(batch.micro_batches):
            with gradient_sync(self.module, wanted=i == len(batch.micro_batches) - 1):
                with autocast(self.world.device, self.plan.precision):
                    part = self.module(tokens, targets) * scale
                part.backward()
            loss += part.detach()
        limit = self.cfg.train.clip_norm or float("inf")
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit, foreach=True)
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        self.advance(batch)
        self.meter.add(self.plan.tokens_per_step)
        record = {
            "kind": "train",
            "step": self.position.step,
            "lr": multiplier * self.cfg.optim.lr,
            "tokens": self.position.tokens,
            "ledger": self.position.ledger.hex(),
        }
        self._unread.append((record, loss, norm))

    def advance(self, batch: Batch) -> None:
        """Move the position past `batch`."""
        position = self.position
        position.step += 1
        position.tokens += self.plan.tokens_per_step
        position.previous_ledger = position.ledger
        position.ledger = extend_ledger(position.ledger, batch.windows)

    def read_losses(self) -> None:
        """Fetch the losses since the last call (the one wait for the device) and hand them on."""
        if not self._unread:
            return
        losses = self.world.sum_(torch.stack([loss for _, loss, _ in self._unread]))
        norms = torch.stack([norm for _, _, norm in self._unread])
        values = torch.stack([losses / self.world.size, norms], dim=1).tolist()
        for (record, _, _), (loss, norm) in zip(self._unread, values, strict=True):
            self.emit(require_finite(record | {"loss": loss, "grad_norm": norm}))
        self._unread.clear()

    def log_progress(self) -> None:
        """The console line, with the speed since the last one."""
        self.read_losses()
        self.emit({"kind": "perf", "step": self.position.step, **self.meter.read()})

    def evaluate(self) -> None:
        """Validation loss, on all ranks together."""
        if self.evaluator is not None:
            self.read_losses()
            with self.meter.paused():
                self.emit(self.evaluator.record(self.model, self.position.step))

    def sample(self) -> None:
        """A sample, on the first rank."""
        if self.sampler is not None:
            self.read_losses()
            if self.world.first:
                with self.meter.paused():
                    self.emit(self.sampler.record(self.model, self.position.step))

    def emit(self, record: Record) -> None:
        """Give a record to every tracker."""
        for tracker in self.trackers:
            tracker.log(record)

    def save(self) -> None:
        """Write a checkpoint, all ranks together; on return it is verified and on the disk."""
        self.read_losses()
        with self.meter.paused():
            self.write_checkpoint()
        self.saved_step = self.position.step

    def write_checkpoint(self) -> None:
        """The commit protocol: every rank its file, the first one the rest and the manifest."""
        folder, step = self.job.checkpoints, self.position.step
        staging = folder / store.staging_name(step, self.job.attempt())
        if self.world.first:
            for tracker in self.trackers:
                tracker.flush()
            needed = 12 * self.plan.parameters + 2**20  # weights and two moments in fp32
            check_space(folder, needed, f"the checkpoint of step {step}")
            staging.mkdir(parents=True)
        self.world.barrier()
        store.write_tensors(
            staging / store.rank_file(self.world.rank), rng_tensors(self.world.device)
        )
        if self.world.first:
            store.write_tensors(staging / store.MODEL, self.model.state_dict())
            store.write_tensors(staging / store.OPTIMIZER, optimizer_tensors(self.optimizers))
            store.write_state(staging / store.STATE, self.position.to_json())
        self.world.barrier()
        if self.world.first:
            written = store.commit(
                staging,
                step=step,
                attempt=self.job.attempt(),
                world_size=self.world.size,
                config_sha256=fingerprint(self.cfg.model_dump(mode="json")),
                data_key=self.data_key,
                versions={"dtt": __version__, "torch": torch.__version__},
            )
            store.verify(written.path)
            retain.prune(folder, self.cfg.checkpoint.keep_last)
            log.info("saved %s", written.path)
        self.world.barrier()


def every(interval: int, step: int) -> bool:
    """Whether something that happens each `interval` steps (0: never) happens after `step`."""
    return interval > 0 and step % interval == 0
