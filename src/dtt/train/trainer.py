"""The training loop; read it from top to bottom."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dtt.base.log import log
from dtt.checkpoint import store
from dtt.data.samples.loader import Batch
from dtt.data.samples.shuffle import extend_data_hash
from dtt.jobs.stop import Request
from dtt.mesh.compilation import compiler
from dtt.optim.groups import peak_lr, set_learning_rate
from dtt.track.base import Record
from dtt.train.actions.action import StepAction, name_of, restore_actions
from dtt.train.actions.built_in import finished_saves, position_of
from dtt.train.anomaly_guard import finite
from dtt.train.expert_load import METRICS, described
from dtt.train.objectives.loss_function import check_ranks
from dtt.train.objects import Run
from dtt.train.state import check_order, restore_rng, seed_rank
from dtt.train.step import update

GC_EVERY = 100
"""Steps between collections of garbage, which happen on all ranks after the same step."""
Names = Mapping[str, Sequence[int]]
"""Names of metrics, with the layers that have one each; without layers it is a number for all."""


@dataclass(frozen=True, kw_only=True)
class Trainer(Run):
    """The training loop and everything it uses; `train/build.py` builds it."""

    actions: Sequence[StepAction]
    """What the run does after a step, in order."""
    _unread: list[tuple[Record, Tensor, Names]] = field(default_factory=list)
    """Records of steps, values that are still on the device (the guard's `StepVerdict.values`, then
    auxiliary losses and metrics), and the names of the latter."""
    _reported: list[str] = field(default_factory=list)
    """Names of the values of the first step, which all ranks have."""

    def run(self) -> bool:
        """Train to the end (return True) or until a stop request (False); save in either case."""
        meter, startup = self.meter, self.attempt.startup
        self.restore()
        # From here on a stop saves first; before, it ended the process at once.
        self.attempt.requests.defer()
        startup.end_phase("resume")
        # A run that was stopped during an evaluation repeats it before the next step, so that its
        # records equal those of an uninterrupted run.
        self.act()
        startup.end_phase("first evaluation")
        # After all long-lived objects exist: the collector never visits them again.
        gc.freeze()
        with self.watchdog.phase("step"):
            self.train()
            self.profiler.finish(self.position.step)
            with self.watchdog.phase("save"), meter.paused("save"):
                self.saver.wait()
        self.log(*finished_saves(self))
        meter.restart()  # counts the time since the last reading
        self.times.write(self.position.step)
        ended = self.position.step == self.schedule.steps
        with self.watchdog.phase("save"):
            self.saver.finish_mirror(ended=ended)
        self.attempt.requests.forget(self.world)
        # False for a stop request, and for a run whose last evaluation was cut short: both resume.
        return ended and not any(action.due(self.position) for action in self.actions)

    def train(self) -> None:
        """Run the loop: a step, then all actions due after it; save when it ends."""
        meter = self.meter
        step_sizes, first = self.dataset.step_sizes, self.position.step
        # Closed on every way out: the prefetch thread would otherwise keep the files open, and read
        # on.
        with closing(self.batches_from(self.position.step)) as batches:
            self.times.start(self.position.step)
            while self.position.step < self.schedule.steps:
                # Before the step: all ranks agree, so a stop never leaves a step half done on some
                # ranks.
                if self.handle_requests() is Request.STOP:
                    break
                step = self.position.step
                multiplier = self.schedule.rates.multiplier(step)
                set_learning_rate(self.state.optimizers, multiplier)
                tokens, seq_len = step_sizes.batch_tokens(step), step_sizes.at(step).seq_len
                with self.profiler.step(step + 1), meter.step(tokens, seq_len):
                    batch = next(batches)
                    if batch.tokens is not None:
                        # Padding is computed but not trained on, so it does not count as speed. A
                        # sample holds one token more than it has inputs.
                        meter.leave_out(tokens - (batch.tokens - len(batch.samples)))
                    meter.end_phase("data")
                    self.step(batch, multiplier)
                # After a step, as the first one creates the state of the optimizers.
                if step == first:
                    self.saver.allocate(self.state.params.trainable(), self.state.tensors())
                step = self.position.step
                if step % GC_EVERY == 0:
                    gc.collect()
                self.watchdog.step(step)
                # Between actions the host runs ahead of the device: the losses of these steps wait
                # there unread.
                self.act()
        self.save()

    def step(self, batch: Batch, multiplier: float) -> None:
        """Do one optimizer step, without waiting for the device.

        But for the check of names in the first step, and optimizers that ignore `found_inf`.
        """
        state, step, meter = self.state, self.position.step, self.meter
        # The backward pass of the last micro-batch also averages the gradients over the ranks, in
        # the hooks of DDP and FSDP2, while it computes those of earlier layers: `gradient_sync`.
        losses = state.passes.run(batch.micro_batches, self.loss_function, batch.terms)
        reported = losses.aux | losses.metrics
        if not self._reported:
            # Once, as the names do not change. By their places in the stack below, ranks would add
            # up values of different names, or wait for more of them forever.
            check_ranks(state.objective, reported, state.mesh)
            self._reported.extend(["loss", *reported])
        meter.end_phase("forward_backward")
        limit = self.cfg.train.clip_norm or float("inf")
        # Clipping also yields the norm that the guard judges, so an infinite limit stands for none.
        norm = state.params.clip(limit)
        # One all-reduce for all numbers of the step. Its result is bitwise equal on all ranks, so
        # all guards judge alike.
        means = state.mesh.mean(torch.stack([losses.loss, norm, *reported.values()]))
        # If it is to stop the run, Diverged follows in `read_losses`, up to `log_every` steps
        # later. `save` reads the losses first, so that no checkpoint has such a step.
        judgement = state.guard.judge(means[:2])
        values = [judgement.values, means[2:]]
        names: dict[str, Sequence[int]] = dict.fromkeys(reported, ())
        if state.experts is not None:
            # Before the average of the weights, which is over corrected choices.
            load_LE = state.experts.total(losses.loads, self.world.device)
            state.experts.follow(load_LE, judgement.skip)
            values.append(described(load_LE).flatten().to(means.dtype))
            names |= dict.fromkeys(METRICS, state.experts.layers)
        # The verdict stays on the device as a factor of the update: no rank waits to learn whether
        # the step counts.
        update(state.optimizers, judgement.skip, step=step, rounding=state.rounding, ema=state.ema)
        meter.end_phase("optimizer")
        self.advance_position(batch, multiplier, torch.cat(values), names)

    def advance_position(
        self, batch: Batch, multiplier: float, values: Tensor, metrics: Names
    ) -> None:
        """Move the position past `batch`; `values` and `metrics` are those of `_unread`."""
        position = self.position
        position.step += 1
        position.samples += len(batch.samples)
        position.tokens += batch.targets
        # Kept for the check on resume: it reads the last step's samples again.
        position.previous_data_hash = position.data_hash
        position.data_hash = extend_data_hash(position.data_hash, batch.samples)
        record = {
            "kind": "train",
            "step": position.step,
            "lr": multiplier * peak_lr(self.cfg.optim, self.state.optimizers),
            "tokens": position.tokens,
            "ledger": position.data_hash.hex(),
            **self.dataset.step_sizes.record(position.step - 1),
        }
        if batch.tokens is not None:  # there are loss masks
            positions = (self.cfg.train.seq_len + 1) * len(batch.samples)
            # The share of positions that hold tokens, and the share of tokens that are targets.
            record["padding_efficiency"] = round(batch.tokens / positions, 6)
            record["trained_share"] = round(batch.targets / batch.tokens, 6)
        self._unread.append((record, values, metrics))

    # ---- actions ---------------------------------------------------------------------------------

    def act(self) -> None:
        """Run the actions that are due, in order.

        If a stop request cuts one short, it is due again when the run resumes, with all after it.
        """
        steps = self.schedule.steps
        for action in self.actions:
            if action.due(self.position):
                # First the losses: a diverged run must not spend minutes on an evaluation.
                self.read_losses()
                records = action.run(self, self.stop_wanted)
                if records is None:
                    return
                self.log(*records)
        if self.schedule.steps != steps:
            self.act()  # one of the user's own has ended the run: others are due at its end

    # ---- requests --------------------------------------------------------------------------------

    def handle_requests(self) -> Request:
        """Act on what any rank requests before the next step, and return it; the caller stops."""
        step, meter = self.position.step, self.meter
        requests, saver = self.attempt.requests, self.saver
        # In the same messages as stop requests, so a time budget costs no message of its own.
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
            self.profiler.request(step, agreed.profile_kind)
        if agreed.request is Request.SAVE:
            self.save()
        if agreed.end:
            self.schedule.end_at(step, agreed.end)
            log.info("the decay starts after step %d and ends with step %d", step, agreed.end)
            self.save()  # so that other decays can branch off
        return agreed.request

    def stop_wanted(self) -> bool:
        """Return True if a stop was requested. Also resets the watchdog: call it in long loops."""
        self.watchdog.beat()
        return self.attempt.requests.stop_wanted(self.world)

    # ---- logging ---------------------------------------------------------------------------------

    def read_losses(self) -> None:
        """Fetch the losses since the last call, review them, and log their records.

        This is where the host waits for the device. Raise Diverged, on every rank, if the guard
        decides so for an anomalous step among them.
        """
        if not self._unread:
            return
        unread = list(self._unread)
        self._unread.clear()
        # One copy to the host: a copy per step would wait for the device each time.
        numbers = iter(torch.cat([values for _, values, _ in unread]).tolist())
        for record, _, metrics in unread:
            judged = next(numbers), next(numbers), next(numbers)
            named: Record = {}
            for name, layers in metrics.items():
                of_layers = {str(layer): finite(next(numbers)) for layer in layers}
                named[name] = of_layers or finite(next(numbers))
            for reviewed in self.state.guard.review(record | named, judged, self.position):
                self.log(reviewed)

    # ---- checkpoints -----------------------------------------------------------------------------

    def save(self) -> None:
        """Start a checkpoint of this step, unless there is one; all ranks call it together."""
        if self.position.done.get("save") != self.position.step:
            self.read_losses()
            next(a for a in self.actions if a.name == "save").run(self, self.stop_wanted)

    def restore(self) -> None:
        """Load the state of the checkpoint; without one, seed the generators of a new run."""
        resume = self.resume
        if resume is None:
            seed_rank(self.cfg.seed, self.world.rank)
            return
        # A rank beyond the saved ones has no generator state; the step keeps its seed from
        # repeating that of the start.
        saved, seed = resume.stored(store.STATE), self.cfg.seed + resume.step
        self.state.restore(resume.stored(store.MODEL), saved)
        restore_rng(saved, self.world.rank, seed, self.world.device)
        # A thousand ranks have millions of entries.
        resume.headers.clear()
        # Rank 0 reads the records: the trackers are there, and have dropped what is repeated.
        position = position_of(resume, self.job, self.cfg) if self.world.first else None
        vars(self.position).update(vars(self.world.from_first(position)))
        record = resume.position()
        self.dataset.restore(record["sources"])
        restore_actions(self.cfg.actions, record.get("own_actions", {}))
        # Without the action that ended it, the run continues.
        for action in self.cfg.actions:
            if name_of(action) == record.get("ended_by"):
                self.schedule.end_now(resume.step, name_of(action))
        check_order(self.position, self.dataset)
        log.info("resumed from %s", resume.path)
