"""The training loop; read it from top to bottom."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dtt.checkpoint import store
from dtt.checkpoint.saver import Saver
from dtt.checkpoint.store import Checkpoint
from dtt.config.run import RunConfig
from dtt.data.dataset import Dataset
from dtt.data.loader import Batch, Batches
from dtt.data.order import extend_ledger
from dtt.model.decoder import Decoder
from dtt.optim.ema import Ema
from dtt.optim.groups import set_learning_rate
from dtt.optim.rounding import StochasticRounding
from dtt.parallel.apply import autocast, clip_gradients, gradient_sync
from dtt.parallel.mesh import Layout
from dtt.reading import waiting_for_space
from dtt.runtime.compilation import compiler
from dtt.runtime.dist import World
from dtt.runtime.jobdir import JobDir
from dtt.runtime.laps import Laps
from dtt.runtime.log import log
from dtt.runtime.process import in_words
from dtt.runtime.watchdog import Watchdog
from dtt.track.base import Record, Tracker
from dtt.train import garbage
from dtt.train.account import Account
from dtt.train.budget import Budget
from dtt.train.evaluate import Evaluator, Sampler, evaluation_due, every
from dtt.train.guard import Guard, Rewind
from dtt.train.meter import Meter
from dtt.train.order import check_order, check_ranks
from dtt.train.plan import Plan
from dtt.train.profiler import Profiler
from dtt.train.state import (
    BadStep,
    Position,
    check_position,
    load_optimizers,
    load_parameters,
    optimizer_tensors,
    restore_rng,
    rng_tensors,
    seed_rank,
)
from dtt.train.stop import Request, Requests


@dataclass
class Trainer:
    """The training loop and everything it uses; `commands/build.py` makes it."""

    cfg: RunConfig
    plan: Plan
    world: World
    layout: Layout
    job: JobDir
    model: Decoder
    """The unwrapped model. If its parameters are sharded, all ranks must call it together."""
    parameters: Mapping[str, nn.Parameter]
    """Parameters by their unwrapped names; DTensors where they are sharded."""
    module: nn.Module
    """The module called in training: `model`, or `model` wrapped (DDP, context parallelism)."""
    optimizers: Mapping[str, Optimizer]
    rounding: StochasticRounding | None
    """Stochastic rounding of bf16 weights, if configured."""
    ema: Ema | None
    guard: Guard
    dataset: Dataset
    batches_from: Callable[[int], Batches]
    evaluator: Evaluator | None
    sampler: Sampler | None
    trackers: Sequence[Tracker]
    """Trackers of rank 0; the other ranks have none."""
    requests: Requests
    watchdog: Watchdog
    saver: Saver
    meter: Meter
    profiler: Profiler
    account: Account
    start: Laps
    run_id: str
    """Id of the run in trackers; kept in its checkpoints."""
    budget: Budget | None = None
    """Time budget, on rank 0 of a run that a time limit ends."""
    position: Position = field(default_factory=Position)
    saved_step: int | None = None
    """Step of the last checkpoint that was started."""
    _unread: list[tuple[Record, Tensor]] = field(default_factory=list)
    """Records of steps with the guard's `Judgement.seen`, which is still on the device."""
    _step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=10))
    """Seconds per step in the last log lines."""
    _save_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=10))
    """Seconds of the last saves, until each was verified."""

    def run(self, resume: Checkpoint | None) -> bool:
        """Train to the end (return True) or until a stop request (False); save in either case."""
        self.restore(resume)
        self.requests.defer()
        self.start.lap("resume")
        if resume is None or self.evaluation_due():
            self.look()
        if resume is None and self.guard.rewinds:
            self.save()
        self.start.lap("first evaluation")
        garbage.freeze()
        with self.watchdog.phase("step"):
            while not self.train():
                pass
            self.profiler.finish(self.position.step)
            with self.watchdog.phase("save"), self.meter.paused("save"):
                self.saver.wait()
        self.log_saves()
        self.account.end(self.position.step, self.meter)
        self.requests.forget(self.world)
        return self.position.step == self.plan.steps and not self.evaluation_due()

    def train(self) -> bool:
        """Run the steps and save; return False if the run was rewound and must be continued."""
        try:
            with closing(self.batches_from(self.position.step)) as batches:
                self.go_through(batches)
            if self.saved_step != self.position.step:
                self.save()
        except Rewind as rewind:
            self.rewind(rewind.bad)
            return False
        return True

    def go_through(self, batches: Iterator[Batch]) -> None:
        """Run the loop: a step, then whatever is due after it."""
        cfg = self.cfg
        self.account.begin(self.position.step, self.meter)
        while self.position.step < self.plan.steps:
            step = self.position.step
            request = self.requests.agreed(
                self.world, step, self.saver.failed, self.end_wanted(), bool(compiler.failure)
            )
            if self.requests.uncompiled:
                compiler.follow()
            if request is Request.FAILED:
                self.saver.wait()  # raises, on every rank
            if request is Request.STOP:
                break
            if request is Request.PROFILE:
                self.profiler.ask(step, self.requests.profile_kind)
            if request is Request.SAVE and self.saved_step != step:
                self.save()
            if self.requests.end:
                self.decay_until(self.requests.end)
            stage, tokens = self.dataset.stages.at(step), self.dataset.stages.batch_tokens(step)
            multiplier = stage.lr_factor * self.plan.schedule.multiplier(step)
            set_learning_rate(self.optimizers, multiplier)
            with self.profiler.step(step + 1), self.meter.step(tokens, stage.seq_len):
                batch = next(batches)
                self.meter.lap("data")
                self.step(batch, multiplier)
            step = self.position.step
            garbage.collect(step)
            self.watchdog.step(step)
            if every(cfg.train.log_every, step) or step == self.plan.steps:
                self.log_progress()
            self.look()
            if every(cfg.checkpoint.every, step):
                self.save()

    def end_wanted(self) -> int:
        """Return the step with which the time budget would end the run; 0: no change."""
        if self.budget is None:
            return 0
        step, left = self.position.step, self.budget.left()
        self.budget.measure(step, left, self.meter.worked(), self.meter.pauses)
        return self.budget.end(step, left, self.plan.schedule.decay)

    def decay_until(self, end: int) -> None:
        """Start the decay at the current step, or move the end of a decay that has started."""
        step, begun = self.position.step, self.plan.schedule.decay is not None
        self.plan = self.plan.ending(step, end)
        if not begun:
            log.info("the decay begins after step %d, to end with step %d", step, end)
            if self.saved_step != step:
                self.save()  # other decays can branch off here; it also measures a save

    def expected_steps(self) -> int:
        """Return the step with which the run is expected to end; an estimate before the decay."""
        if self.budget is None or self.plan.schedule.decay is not None:
            return self.plan.steps
        return self.budget.latest(self.position.step, self.budget.left())

    def restore(self, resume: Checkpoint | None) -> None:
        """Load the state of a checkpoint; without one, seed the generators of a new run."""
        if resume is None:
            seed_rank(self.cfg.seed, self.world.rank)
            return
        load_parameters(self.parameters, resume.stored(store.MODEL))
        state = resume.stored(store.STATE)
        load_optimizers(self.optimizers, state)
        if self.ema is not None:
            self.ema.restore(state)
        self.guard.load(state)
        restore_rng(state, self.world.rank, self.cfg.seed + resume.step, self.world.device)
        self.position = Position.from_json(resume.position())
        self.dataset.restore(resume.position()["sources"])
        self.saved_step = resume.step
        check_order(self.position, self.dataset)
        log.info("resumed from %s", resume.path)

    def rewind(self, bad: BadStep) -> None:
        """Go back to the newest checkpoint; from there on leave out the steps around `bad`."""
        self._unread.clear()
        with self.watchdog.phase("save"):
            self.saver.wait()
            newest = (
                store.newest(self.job.checkpoints, check_position) if self.world.first else None
            )
            found = self.world.from_first(newest)
            assert found is not None, "one was saved before the first step"
            avoided = self.guard.avoid(bad, found.step, self.position)
            for tracker in self.trackers:
                tracker.rewind(found.step)
            self.restore(found)
        self.position.avoided = avoided
        log.warning("%s at step %d: back to step %d", bad.what, bad.step, found.step)

    def step(self, batch: Batch, multiplier: float) -> None:
        """Do one optimizer step, or leave it out if it is to be avoided after a rewind.

        Nothing here synchronises with the device.
        """
        if self.position.step + 1 in self.position.avoided:
            self.advance(batch, multiplier, self.guard.pass_over())
            return
        # Gradients are averaged over ranks, but the loss is a mean over the whole global batch:
        # hence the factor. A packed sequence may hold a single token, and so no target.
        scale = self.layout.copies / max(1, batch.targets)
        loss = torch.zeros((), device=self.world.device)
        for i, micro_batch in enumerate(batch.micro_batches):
            last = i == len(batch.micro_batches) - 1
            with gradient_sync(self.module, last, each=self.cfg.parallel.reduce == "each"):
                with autocast(self.world.device, self.plan.precision):
                    part = scale * self.module(
                        micro_batch.tokens,
                        micro_batch.targets,
                        documents_BT=micro_batch.documents,
                        z_loss=self.cfg.train.z_loss,
                    )
                part.backward()
            loss += part.detach()
        self.meter.lap("forward_backward")
        limit = self.cfg.train.clip_norm or float("inf")
        norm = clip_gradients(list(self.parameters.values()), limit)
        judgement = self.guard.judge(loss, norm)
        if self.rounding is not None:
            self.rounding.step = self.position.step
        for optimizer in self.optimizers.values():
            optimizer.found_inf = judgement.bad  # type: ignore[attr-defined]  # torch's own name
            optimizer.step()
            optimizer.zero_grad()
        if self.ema is not None:
            self.ema.update(judgement.bad)
        self.meter.lap("optimizer")
        self.advance(batch, multiplier, judgement.seen)

    def advance(self, batch: Batch, multiplier: float, seen: Tensor) -> None:
        """Move the position past `batch`; `seen` [3] is the guard's `Judgement.seen`."""
        position = self.position
        position.step += 1
        position.samples += len(batch.samples)
        position.tokens += batch.targets
        position.previous_ledger = position.ledger
        position.ledger = extend_ledger(position.ledger, batch.samples)
        record = {
            "kind": "train",
            "step": position.step,
            "lr": multiplier * self.cfg.optim.lr,
            "tokens": position.tokens,
            "ledger": position.ledger.hex(),
            **self.dataset.stages.record(position.step - 1),
        }
        self._unread.append((record, seen))

    def read_losses(self) -> None:
        """Fetch the losses since the last call, review them, and emit their records.

        This is where the host waits for the device. Raise Diverged or Rewind, on every rank, if the
        guard decides so for an anomalous step among them.
        """
        if not self._unread:
            return
        unread, self._unread = self._unread, []
        values = torch.stack([seen for _, seen in unread]).tolist()
        for (record, _), seen in zip(unread, values, strict=True):
            for told in self.guard.review(record, seen, self.position):
                self.emit(told)

    def log_progress(self) -> None:
        """Emit the records of a log line: losses, speed, epochs and finished saves."""
        self.read_losses()
        if (started := self.account.started(self.meter)) is not None:
            self.emit(started)
        reading = self.meter.read()
        self.account.keep(self.position.step, self.meter)
        self._step_seconds.append(reading["seconds_per_step"] or 0.0)
        self.watchdog.steps = self.expected_steps()
        record = {"step": self.position.step, "steps": self.watchdog.steps}
        self.emit({"kind": "perf", **record, **reading})
        epochs = self.dataset.epochs(self.position.samples)
        self.emit({"kind": "data", "step": self.position.step, "epochs": epochs})
        self.log_saves()

    def look(self) -> None:
        """Evaluate and sample, if due after this step.

        An evaluation that a stop request has cut short is due again when the run resumes.
        """
        step, ends = self.position.step, (0, self.plan.steps)
        if self.evaluation_due():
            self.evaluate()
            if self.evaluation_due():
                return
        if every(self.cfg.train.sample_every, step) or step in ends:
            self.sample()

    def evaluation_due(self) -> bool:
        """Return True if an evaluation is due after this step and was not done yet."""
        return self.evaluator is not None and evaluation_due(
            self.cfg.train, self.plan.steps, self.position
        )

    def evaluate(self) -> None:
        """Compute the validation loss; all ranks call it together."""
        assert self.evaluator is not None
        self.read_losses()
        with self.watchdog.phase("evaluate"), self.meter.paused("evaluate"):
            # Not through DDP, which has no gradients to sum here. FSDP2 must gather the weights.
            module = self.module if self.layout.sharded else self.model
            record = self.evaluator.record(module, self.position.step, self.stop_wanted, self.ema)
        if record is not None:
            self.position.evaluated, self.position.eval_loss = record["step"], record["loss"]
            self.emit(record)

    def stop_wanted(self) -> bool:
        """Return True if a stop was requested. Also resets the watchdog: call it in long loops."""
        self.watchdog.beat()
        return self.requests.stop_wanted(self.world)

    def sample(self) -> None:
        """Generate a sample on rank 0; if the model is sharded, on all ranks together."""
        if self.sampler is not None:
            self.read_losses()
            if self.world.first or self.layout.sharded:
                how = self.module, self.layout.granularity, self.world.from_first
                together = how if self.layout.sharded else None
                with self.watchdog.phase("sample"), self.meter.paused("sample"):
                    self.emit(self.sampler.record(self.model, self.position.step, together))

    def emit(self, record: Record) -> None:
        """Log a record to every tracker."""
        for tracker in self.trackers:
            tracker.log(record)

    def save(self) -> None:
        """Start a checkpoint, which is written in the background; all ranks call it together."""
        self.read_losses()
        step = self.position.step
        if step == self.plan.steps:
            self.guard.check_trained(self.position)
        with self.watchdog.phase("save"), self.meter.paused("save"):
            check_ranks(self.position, self.world)
            shared = {
                store.MODEL: self.parameters,
                store.STATE: optimizer_tensors(self.optimizers)
                | self.guard.tensors()
                | ({} if self.ema is None else self.ema.tensors()),
            }
            own = rng_tensors(self.world.rank, self.world.device)
            # One step earlier, so that a resume can read the last step's samples again and check
            # their hash.
            sources = self.dataset.state(self.dataset.first_sample(max(0, step - 1)))
            schedule = self.plan.schedule
            position = self.position.to_json() | {
                "run_id": self.run_id,
                "sources": sources,
                "warmup": schedule.warmup,
                "decay": schedule.decay and asdict(schedule.decay),
                "speed": self.budget and self.budget.state(),
            }
            self.saver.begin(step, shared, own, position, self.flush)
        self.saved_step = step

    def flush(self) -> None:
        """Flush the trackers to disk; called before a checkpoint is complete.

        A run that resumes from the checkpoint then finds all records up to it.
        """
        for tracker in self.trackers:
            tracker.flush()

    def log_saves(self) -> None:
        """Emit the `save` records of the saves that have finished since the last call."""
        saves = self.saver.finished()
        for save in saves:
            following, during = self.meter.slowdown(save.began, save.ended)
            slowdown = {"next_step_slowdown": following, "slowdown": during}
            self.emit({"kind": "save", **save.record(), **slowdown})
            self._save_seconds.append(
                save.blocked_seconds + save.write_seconds + save.verify_seconds
            )
        if saves and self.world.first:
            if self.budget is not None:
                self.budget.took(whole_save=max(self._save_seconds))
            self.write_lead()

    def write_lead(self) -> None:
        """Write the lead: the time before a limit at which the run must save and stop.

        On a full disk it warns at once, and the next save writes the lead again: waiting for space,
        or ending the run, is up to the checkpoints.
        """
        try:
            with waiting_for_space(None):
                self.job.write_lead(max(self._step_seconds, default=0.0), max(self._save_seconds))
        except OSError as error:
            log.warning("lead is not up to date: %s", in_words(error))
