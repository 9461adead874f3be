"""The training loop; read it from top to bottom."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dtt.artifacts.jobdir import JobDir
from dtt.base.log import log
from dtt.checkpoint import store
from dtt.checkpoint.store import Checkpoint
from dtt.config.run import RunConfig
from dtt.data.samples.loader import Batch
from dtt.data.samples.shuffle import extend_data_hash
from dtt.evaluate.answers import AnswerEvaluator, Together
from dtt.jobs.stop import Request
from dtt.mesh.compilation import compiler
from dtt.mesh.dist import World
from dtt.mesh.sharding import on_this_rank
from dtt.optim.groups import set_learning_rate
from dtt.track.base import Record
from dtt.train import garbage
from dtt.train.anomaly_guard import Rewind, finite
from dtt.train.components import Control, Observers, TrainData, TrainState
from dtt.train.data_hash import check_order, check_ranks
from dtt.train.run_schedule import RunSchedule
from dtt.train.state import (
    AnomalousStep,
    Position,
    check_position,
    evaluation_due,
    every,
    restore_rng,
    rng_tensors,
    sampling_due,
    seed_rank,
    tasks_due,
)
from dtt.train.step import Objective, forward_backward, update


@dataclass
class Trainer:
    """The training loop and everything it uses; `train/build.py` builds it."""

    cfg: RunConfig
    world: World
    job: JobDir
    run_id: str
    """Id of the run in trackers; kept in its checkpoints."""
    precision: str
    """Resolved precision of the computation."""
    objective: Objective
    state: TrainState
    data: TrainData
    schedule: RunSchedule
    observers: Observers
    control: Control
    position: Position = field(default_factory=Position)
    saved_step: int | None = None
    """Step of the last checkpoint that was started."""
    _unread: list[tuple[Record, Tensor, tuple[str, ...]]] = field(default_factory=list)
    """Records of steps, values that are still on the device (the guard's `Judgement.values`, then
    the metrics of the objective), and the names of these metrics."""

    def run(self, resume: Checkpoint | None) -> bool:
        """Train to the end (return True) or until a stop request (False); save in either case."""
        control, meter, startup = self.control, self.observers.meter, self.observers.startup
        self.restore(resume)
        control.requests.defer()
        startup.end_phase("resume")
        # A run that was stopped during an evaluation repeats it before the next step, so that its
        # records equal those of an uninterrupted run.
        if resume is None or self.evaluation_due():
            self.evaluate_and_sample()
        # A rewind needs a checkpoint to go back to, also in the first steps.
        if resume is None and self.state.guard.rewinds:
            self.save()
        startup.end_phase("first evaluation")
        # After all long-lived objects exist: the collector never visits them again.
        garbage.freeze()
        with control.watchdog.phase("step"):
            while True:
                try:
                    self.train()
                    break
                except Rewind as rewind:
                    self.rewind(rewind.step)
            self.observers.profiler.finish(self.position.step)
            with control.watchdog.phase("save"), meter.paused("save"):
                control.saver.wait()
        self.log_saves()
        self.observers.time_breakdown.finish(self.position.step, meter)
        control.requests.forget(self.world)
        # False for a stop request, and for a run whose last evaluation was cut short: both resume.
        return self.position.step == self.schedule.steps and not self.evaluation_due()

    def train(self) -> None:
        """Run the loop: a step, then all actions due after it; save at the end.

        Raise Rewind if the guard requests it.
        """
        cfg, meter = self.cfg, self.observers.meter
        step_sizes = self.schedule.step_sizes
        # Closed on every way out: the prefetch thread would otherwise keep the files open, and read
        # on.
        with closing(self.data.batches_from(self.position.step)) as batches:
            self.observers.time_breakdown.start(self.position.step, meter)
            while self.position.step < self.schedule.steps:
                # Before the step: all ranks agree, so a stop never leaves a step half done on some
                # ranks.
                if self.handle_requests() is Request.STOP:
                    break
                step = self.position.step
                multiplier = self.schedule.multiplier(step)
                own = self.schedule.own_multipliers(step)
                set_learning_rate(self.state.optimizers, multiplier, own)
                tokens, seq_len = step_sizes.batch_tokens(step), step_sizes.at(step).seq_len
                with self.observers.profiler.step(step + 1), meter.step(tokens, seq_len):
                    batch = next(batches)
                    if batch.tokens is not None:
                        # Padding is computed but not trained on, so it does not count as speed.
                        meter.leave_out(tokens - (batch.tokens - len(batch.samples)))
                    meter.end_phase("data")
                    self.step(batch, multiplier)
                step = self.position.step
                garbage.collect(step)
                self.control.watchdog.step(step)
                # Between log lines the host runs ahead of the device: the losses of these steps
                # wait there unread.
                if every(cfg.train.log_every, step) or step == self.schedule.steps:
                    self.log_progress()
                self.evaluate_and_sample()
                if every(cfg.checkpoint.every, step):
                    self.save()
        if self.saved_step != self.position.step:
            self.save()

    def step(self, batch: Batch, multiplier: float) -> None:
        """Do one optimizer step, or skip it if it is close to the cause of a rewind.

        Nothing here synchronises with the device.
        """
        state, step, meter = self.state, self.position.step, self.observers.meter
        if step + 1 in self.position.steps_to_skip:
            if state.ema is not None:
                # Nothing is averaged, but the average may start after this step. Without this call
                # it would start from the weights of the last save, and then start again.
                state.ema.update(torch.ones((), device=self.world.device), step)
            self.advance_position(batch, multiplier, state.guard.skipped_values(), ())
            return
        losses = forward_backward(
            state.module,
            batch.micro_batches,
            self.objective,
            terms=batch.terms,
            precision=self.precision,
            replicas=state.layout.gradient_replicas,
            reduce_each=self.cfg.parallel.reduce == "each",
        )
        meter.end_phase("forward_backward")
        limit = self.cfg.train.clip_norm or float("inf")
        # Clipping also yields the norm that the guard judges, so an infinite limit stands for none.
        norm = state.params.clip(limit)
        # One all-reduce for all numbers of the step. Its result is bitwise equal on all ranks, so
        # all guards judge alike.
        means = state.layout.mean(torch.stack([losses.loss, norm, *losses.metrics.values()]))
        judgement = state.guard.judge(means[:2])
        # The verdict stays on the device as a factor of the update: no rank waits to learn whether
        # the step counts.
        update(state.optimizers, judgement.skip, step=step, rounding=state.rounding, ema=state.ema)
        meter.end_phase("optimizer")
        values = torch.cat([judgement.values, means[2:]]) if losses.metrics else judgement.values
        self.advance_position(batch, multiplier, values, tuple(losses.metrics))

    def advance_position(
        self, batch: Batch, multiplier: float, values: Tensor, metrics: tuple[str, ...]
    ) -> None:
        """Move the position past `batch`; `values` and `metrics` are those of `_unread`."""
        position = self.position
        position.step += 1
        position.samples += len(batch.samples)
        position.tokens += batch.targets
        # Kept for the check on resume: it reads the last step's samples again.
        position.previous_ledger = position.ledger
        position.ledger = extend_data_hash(position.ledger, batch.samples)
        record = {
            "kind": "train",
            "step": position.step,
            "lr": multiplier * self.cfg.optim.lr,
            "tokens": position.tokens,
            "ledger": position.ledger.hex(),
            **self.schedule.step_sizes.record(position.step - 1),
            **_mask_metrics(batch, self.cfg.train.seq_len + 1),
        }
        self._unread.append((record, values, metrics))

    # ---- requests --------------------------------------------------------------------------------

    def handle_requests(self) -> Request:
        """Act on what any rank requests after this step, and return it; the caller stops."""
        step, meter = self.position.step, self.observers.meter
        requests, saver = self.control.requests, self.control.saver
        # In the same all-reduce as stop requests, so a time budget costs no message of its own.
        end = self.schedule.proposed_end(step, meter.worked(), meter.pauses)
        agreed = requests.agreed(self.world, step, saver.failed, end, bool(compiler.failure))
        if agreed.uncompiled:
            # A rank whose compilation failed has other collectives inside its blocks; all follow
            # it.
            compiler.follow()
        if agreed.request is Request.FAILED:
            saver.wait()  # raises, on every rank
        if agreed.request is Request.STOP:
            return agreed.request
        if agreed.request is Request.PROFILE:
            self.observers.profiler.request(step, agreed.profile_kind)
        if agreed.request is Request.SAVE and self.saved_step != step:
            self.save()
        if agreed.end and self.schedule.end_at(step, agreed.end):
            log.info("the decay starts after step %d and ends with step %d", step, agreed.end)
            if self.saved_step != step:
                self.save()  # so that other decays can branch off; also measures a save
        return agreed.request

    def stop_wanted(self) -> bool:
        """Return True if a stop was requested. Also resets the watchdog: call it in long loops."""
        self.control.watchdog.beat()
        return self.control.requests.stop_wanted(self.world)

    # ---- logging ---------------------------------------------------------------------------------

    def read_losses(self) -> None:
        """Fetch the losses since the last call, review them, and log their records.

        This is where the host waits for the device. Raise Diverged or Rewind, on every rank, if the
        guard decides so for an anomalous step among them.
        """
        if not self._unread:
            return
        unread, self._unread = self._unread, []
        # One copy to the host.
        # A copy per step would wait for the device each time.
        numbers = iter(torch.cat([values for _, values, _ in unread]).tolist())
        for record, _, metrics in unread:
            judged = next(numbers), next(numbers), next(numbers)
            named = {name: finite(next(numbers)) for name in metrics}
            for reviewed in self.state.guard.review(record | named, judged, self.position):
                self.observers.log(reviewed)

    def log_progress(self) -> None:
        """Log the metrics since the last call: losses, speed, epochs and finished saves."""
        self.read_losses()
        step, observers, stop_lead = self.position.step, self.observers, self.control.stop_lead
        meter, time_breakdown = observers.meter, observers.time_breakdown
        if (startup := time_breakdown.startup_record(meter)) is not None:
            observers.log(startup)
        reading = meter.read()
        time_breakdown.write(step, meter)
        stop_lead.add_step(reading["seconds_per_step"] or 0.0)
        steps = self.schedule.expected_steps(step)
        self.control.watchdog.expect(steps)
        observers.log({"kind": "perf", "step": step, "steps": steps, **reading})
        epochs = self.data.dataset.epochs(self.position.samples)
        observers.log({"kind": "data", "step": step, "epochs": epochs})
        self.log_saves()

    def log_saves(self) -> None:
        """Log the `save` records of the saves that have finished since the last call."""
        saves, stop_lead = self.control.saver.finished(), self.control.stop_lead
        for save in saves:
            following, during = self.observers.meter.slowdown(save.began, save.ended)
            slowdown = {"next_step_slowdown": following, "slowdown": during}
            self.observers.log({"kind": "save", **save.record(), **slowdown})
            stop_lead.add_save(save.blocked_seconds + save.write_seconds + save.verify_seconds)
        if saves and self.world.first:
            self.schedule.record_save(stop_lead.slowest_save)
            stop_lead.write()

    # ---- evaluation ------------------------------------------------------------------------------

    def evaluate_and_sample(self) -> None:
        """Evaluate and sample, if due after this step.

        An evaluation that a stop request has cut short is due again when the run resumes.
        """
        if self.validation_due():
            self.evaluate()
        # A validation that a stop cut short is repeated; then the tasks wait for it.
        if self.tasks_due() and not self.validation_due():
            self.evaluate_tasks()
        if self.evaluation_due():
            return
        if sampling_due(self.cfg.train, self.schedule.steps, self.position):
            self.sample()

    def evaluation_due(self) -> bool:
        """Return True if an evaluation is due after this step and was not done yet."""
        return self.validation_due() or self.tasks_due()

    def validation_due(self) -> bool:
        """Return True if the validation loss is due after this step and was not computed yet."""
        return self.observers.evaluator is not None and evaluation_due(
            self.cfg.train, self.schedule.steps, self.position
        )

    def tasks_due(self) -> bool:
        """Return True if the benchmark tasks are due after this step and were not evaluated yet."""
        return self.observers.tasks is not None and tasks_due(
            self.cfg, self.schedule.steps, self.position
        )

    def evaluate(self) -> None:
        """Compute the validation loss; all ranks call it together."""
        state, step = self.state, self.position.step
        evaluator, meter = self.observers.evaluator, self.observers.meter
        assert evaluator is not None
        # First the losses: a diverged run must not spend minutes on an evaluation.
        self.read_losses()
        with self.control.watchdog.phase("evaluate"), meter.paused("evaluate"):
            record = evaluator.record(state.evaluated_module, step, self.stop_wanted, state.ema)
            if record is not None and self.observers.answers is not None:
                record = self.add_stop_rate(record, self.observers.answers)
        if record is not None:
            self.position.evaluated, self.position.eval_loss = record["step"], record["loss"]
            self.observers.log(record)

    def evaluate_tasks(self) -> None:
        """Evaluate the benchmark tasks; all ranks call it together."""
        tasks, step, meter = self.observers.tasks, self.position.step, self.observers.meter
        assert tasks is not None
        self.read_losses()
        with self.control.watchdog.phase("evaluate"), meter.paused("tasks"):
            records = tasks.records(step, self.stop_wanted)
        if records is not None:
            self.position.tasks_evaluated = step
            for record in records:
                self.observers.log(record)

    def add_stop_rate(self, record: Record, answers: AnswerEvaluator) -> Record | None:
        """Return `record` with the share of answers that stop; None if a stop was requested."""
        rate = answers.stop_rate(self.state.model, self.stop_wanted, self.together())
        return None if rate is None else record | {"answer_stop_rate": rate}

    def together(self) -> Together | None:
        """Return the arguments of collective generation; None if the model is not sharded."""
        state, layout = self.state, self.state.layout
        if not layout.sharded:
            return None
        return state.module, layout.granularity, self.world.from_first

    def sample(self) -> None:
        """Generate a sample on rank 0; if the model is sharded, on all ranks together."""
        sampler, layout = self.observers.sampler, self.state.layout
        if sampler is None:
            return
        self.read_losses()
        if self.world.first or layout.sharded:
            with self.control.watchdog.phase("sample"), self.observers.meter.paused("sample"):
                record = sampler.record(self.state.model, self.position.step, self.together())
                self.observers.log(record)

    # ---- checkpoints -----------------------------------------------------------------------------

    def save(self) -> None:
        """Start a checkpoint, which is written in the background; all ranks call it together."""
        self.read_losses()
        step, dataset = self.position.step, self.data.dataset
        if step == self.schedule.steps:
            self.state.guard.check_trained(self.position)
        with self.control.watchdog.phase("save"), self.observers.meter.paused("save"):
            # Before anything is written: a checkpoint of ranks that read different files must not
            # exist.
            check_ranks(self.position, self.world)
            # One step earlier, so that a resume can read the last step's samples again and check
            # their hash.
            sources = dataset.state(dataset.first_sample(max(0, step - 1)))
            position = self.position.to_json() | {"run_id": self.run_id, "sources": sources}
            self.control.saver.begin(
                step,
                self.state.params,
                self.state.tensors()
                | on_this_rank(rng_tensors(self.world.rank, self.world.device)),
                position | self.schedule.state(),
                # Trackers are flushed before a checkpoint is complete: a run that resumes from it
                # finds all records up to it.
                self.observers.flush,
            )
        self.saved_step = step

    def restore(self, resume: Checkpoint | None) -> None:
        """Load the state of a checkpoint; without one, seed the generators of a new run."""
        if resume is None:
            seed_rank(self.cfg.seed, self.world.rank)
            return
        # A rank beyond the saved ones has no generator state; the step keeps its seed from
        # repeating that of the start.
        saved, seed = resume.stored(store.STATE), self.cfg.seed + resume.step
        self.state.restore(resume.stored(store.MODEL), saved)
        restore_rng(saved, self.world.rank, seed, self.world.device)
        self.position = Position.from_json(resume.position())
        self.data.dataset.restore(resume.position()["sources"])
        self.saved_step = resume.step
        check_order(self.position, self.data.dataset)
        log.info("resumed from %s", resume.path)

    def rewind(self, cause: AnomalousStep) -> None:
        """Go back to the newest checkpoint; from there on skip the steps around `cause`."""
        # Losses after the anomalous step belong to steps that are undone.
        self._unread.clear()
        folder = self.job.checkpoints
        with self.control.watchdog.phase("save"):
            self.control.saver.wait()
            # Rank 0 chooses for all: a file server may show the ranks different folders.
            newest = store.newest(folder, check_position) if self.world.first else None
            checkpoint = self.world.from_first(newest)
            assert checkpoint is not None, "one was saved before the first step"
            steps = self.state.guard.steps_to_skip(cause, checkpoint.step, self.position)
            self.observers.rewind(checkpoint.step)
            self.restore(checkpoint)
        self.position.steps_to_skip = steps
        log.warning("%s at step %d: back to step %d", cause.what, cause.step, checkpoint.step)


def _mask_metrics(batch: Batch, width: int) -> Record:
    """Return the metrics of a batch with loss masks, whose samples have `width` positions.

    They are the share of positions that hold tokens, and the share of tokens that are targets.
    """
    if batch.tokens is None:
        return {}
    return {
        "padding_efficiency": round(batch.tokens / (width * len(batch.samples)), 6),
        "trained_share": round(batch.targets / batch.tokens, 6),
    }
