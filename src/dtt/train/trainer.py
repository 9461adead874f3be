"""The training loop, read top to bottom."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dtt.checkpoint import store
from dtt.checkpoint.saver import Saver
from dtt.checkpoint.store import Checkpoint
from dtt.config.run import RunConfig
from dtt.config.train import TrainConfig
from dtt.data.dataset import Dataset
from dtt.data.loader import Batch
from dtt.data.order import extend_ledger
from dtt.errors import DamagedError
from dtt.model.decoder import Decoder
from dtt.optim import schedule
from dtt.optim.groups import set_learning_rate
from dtt.parallel.apply import autocast, gradient_sync
from dtt.runtime.dist import World
from dtt.runtime.jobdir import JobDir
from dtt.runtime.log import log
from dtt.runtime.watchdog import Watchdog
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
    dataset: Dataset
    batches_from: Callable[[int], Iterator[Batch]]
    evaluator: Evaluator | None
    sampler: Sampler | None
    trackers: Sequence[Tracker]
    """On the first rank; the others have none."""
    requests: Requests
    watchdog: Watchdog
    saver: Saver
    meter: Meter
    run_id: str
    """What trackers know the run by; kept in its checkpoints."""
    position: Position = field(default_factory=Position)
    saved_step: int | None = None
    _unread: list[tuple[Record, Tensor, Tensor]] = field(default_factory=list)
    """Steps whose loss and gradient norm are still on the device."""
    _step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=10))
    _save_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=10))

    def run(self, resume: Checkpoint | None) -> bool:
        """Train to the end (True) or until asked to stop (False); either way all is saved."""
        self.restore(resume)
        if resume is None or self.evaluation_due():
            self.look()
        with self.watchdog.phase("step"):
            self.train()
            if self.saved_step != self.position.step:
                self.save()
            with self.watchdog.phase("save"):
                self.saver.wait()
        self.log_saves()
        self.requests.forget(self.world)
        return self.position.step == self.plan.steps and not self.evaluation_due()

    def train(self) -> None:
        """The loop: step, then whatever is due after it."""
        cfg, steps = self.cfg, self.plan.steps
        batches = self.batches_from(self.position.step)
        self.meter.restart()
        while self.position.step < steps:
            request = self.requests.agreed(self.world, self.position.step, self.saver.failed)
            if request is Request.FAILED:
                self.saver.wait()  # raises, on every rank
            if request is Request.STOP:
                break
            if request is Request.SAVE and self.saved_step != self.position.step:
                self.save()
            multiplier = schedule.multiplier(cfg.schedule, self.position.step, steps)
            set_learning_rate(self.optimizers, multiplier)
            with self.meter.step(self.plan.tokens_per_step):
                self.step(next(batches), multiplier)
            step = self.position.step
            self.watchdog.step(step)
            if every(cfg.train.log_every, step) or step == steps:
                self.log_progress()
            self.look()
            if every(cfg.checkpoint.every, step):
                self.save()

    def restore(self, resume: Checkpoint | None) -> None:
        """Take up the state of a checkpoint, or the seeds of a fresh start."""
        if resume is None:
            seed_rank(self.cfg.seed, self.world.rank)
            return
        self.model.load_state_dict(resume.tensors(store.MODEL))
        state = resume.tensors(store.STATE)
        load_optimizers(self.optimizers, state)
        restore_rng(state, self.world.rank, self.cfg.seed + resume.step, self.world.device)
        self.position = Position.from_json(resume.position())
        self.dataset.restore(resume.position()["sources"])
        self.saved_step = resume.step
        self.check_order()
        log.info("resumed from %s", resume.path)

    def check_order(self) -> None:
        """DamagedError unless the order of the data still gives what the last step trained on."""
        position = self.position
        if position.step == 0:
            return
        first = self.dataset.first_sample(position.step - 1)
        samples = self.dataset.samples_at(first, position.samples - first)
        if extend_ledger(position.previous_ledger, samples) != position.ledger:
            raise DamagedError(
                "the data is not in the order that this job was trained in",
                why=f"step {position.step} would now see other samples",
                next="use the token files, seed and batch size the job was started with",
            )

    def step(self, batch: Batch, multiplier: float) -> None:
        """One optimizer step. Nothing here waits for the device."""
        # DDP averages gradients over ranks; the loss is a mean over the whole global batch.
        # A packed sequence may hold a single token, and so no target.
        scale = self.world.size / max(1, batch.targets)
        loss = torch.zeros((), device=self.world.device)
        for i, micro_batch in enumerate(batch.micro_batches):
            with gradient_sync(self.module, wanted=i == len(batch.micro_batches) - 1):
                with autocast(self.world.device, self.plan.precision):
                    part = scale * self.module(
                        micro_batch.tokens,
                        micro_batch.targets,
                        documents_BT=micro_batch.documents,
                    )
                part.backward()
            loss += part.detach()
        limit = self.cfg.train.clip_norm or float("inf")
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit, foreach=True)
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        self.advance(batch)
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
        position.samples += len(batch.samples)
        position.tokens += batch.targets
        position.previous_ledger = position.ledger
        position.ledger = extend_ledger(position.ledger, batch.samples)

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
        reading = self.meter.read()
        self._step_seconds.append(reading["seconds_per_step"] or 0.0)
        self.emit({"kind": "perf", "step": self.position.step, **reading})
        epochs = self.dataset.epochs(self.position.samples)
        self.emit({"kind": "data", "step": self.position.step, "epochs": epochs})
        self.log_saves()

    def look(self) -> None:
        """Validation loss and a sample, if they are due after this step.

        An evaluation that a stop request broke off is due again when the run goes on.
        """
        step, ends = self.position.step, (0, self.plan.steps)
        if self.evaluation_due():
            self.evaluate()
            if self.evaluation_due():
                return
        if every(self.cfg.train.sample_every, step) or step in ends:
            self.sample()

    def evaluation_due(self) -> bool:
        """Whether there should be a validation loss of this step, and is none yet."""
        return self.evaluator is not None and evaluation_due(
            self.cfg.train, self.plan.steps, self.position
        )

    def evaluate(self) -> None:
        """Validation loss, on all ranks together."""
        assert self.evaluator is not None
        self.read_losses()
        with self.watchdog.phase("evaluate"), self.meter.paused():
            record = self.evaluator.record(self.model, self.position.step, self.stop_wanted)
        if record is not None:
            self.position.evaluated, self.position.eval_loss = record["step"], record["loss"]
            self.emit(record)

    def stop_wanted(self) -> bool:
        """Whether to break off what takes long; also tells the watchdog that it goes on."""
        self.watchdog.beat()
        return self.requests.stop_wanted(self.world)

    def sample(self) -> None:
        """A sample, on the first rank."""
        if self.sampler is not None:
            self.read_losses()
            if self.world.first:
                with self.watchdog.phase("sample"), self.meter.paused():
                    self.emit(self.sampler.record(self.model, self.position.step))

    def emit(self, record: Record) -> None:
        """Give a record to every tracker."""
        for tracker in self.trackers:
            tracker.log(record)

    def save(self) -> None:
        """Begin a checkpoint, all ranks together; it is written while training goes on."""
        self.read_losses()
        step = self.position.step
        with self.watchdog.phase("save"), self.meter.paused():
            self.check_ranks()
            shared = {
                store.MODEL: self.model.state_dict(),
                store.STATE: optimizer_tensors(self.optimizers),
            }
            own = rng_tensors(self.world.rank, self.world.device)
            # As of one step earlier, so that a resume can see the last step's samples again.
            sources = self.dataset.state(self.dataset.first_sample(max(0, step - 1)))
            position = self.position.to_json() | {"run_id": self.run_id, "sources": sources}
            self.saver.begin(step, shared, own, position, self.flush)
        self.saved_step = step

    def check_ranks(self) -> None:
        """DamagedError, on every rank, unless all of them have trained on the same samples."""
        mine = (self.position.ledger, self.position.tokens)
        if self.world.agree(mine != self.world.from_first(mine)):
            raise DamagedError(
                "the processes of this run do not read the same data",
                why=f"the samples of some step since the last save, up to {self.position.step}, "
                "differ",
                next="make every node see the same files, and go on from the last checkpoint",
            )

    def flush(self) -> None:
        """What a run that goes on from a checkpoint must find is on the disk before it."""
        for tracker in self.trackers:
            tracker.flush()

    def log_saves(self) -> None:
        """What the saves took that have been finished since the last call."""
        saves = self.saver.finished()
        for save in saves:
            following, during = self.meter.slowdown(save.began, save.ended)
            slowdown = {"next_step_slowdown": following, "slowdown": during}
            self.emit({"kind": "save", **save.record(), **slowdown})
            self._save_seconds.append(
                save.blocked_seconds + save.write_seconds + save.verify_seconds
            )
        if saves and self.world.first:
            self.job.write_lead(max(self._step_seconds, default=0.0), max(self._save_seconds))


def evaluation_due(train: TrainConfig, steps: int, position: Position) -> bool:
    """Whether a run of `steps` should have a validation loss at this position, and has none."""
    wanted = every(train.eval_every, position.step) or position.step in (0, steps)
    return wanted and position.evaluated != position.step


def every(interval: int, step: int) -> bool:
    """Whether something that happens each `interval` steps (0: never) happens after `step`."""
    return interval > 0 and step % interval == 0
