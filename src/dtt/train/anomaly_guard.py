"""Anomaly guard: detect non-finite and spiking steps on the device, and skip, rewind or stop."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dtt.base.errors import Diverged
from dtt.base.log import log
from dtt.config.guard import GuardConfig
from dtt.mesh.dist import World
from dtt.mesh.sharding import FullTensor, fill
from dtt.track.base import Record
from dtt.train.state import AnomalousStep, Position

FINE, NON_FINITE, SPIKE, SKIPPED = 0.0, 1.0, 2.0, 3.0
"""Verdicts on a step. The last one is for a step that is skipped after a rewind, because it is
close to an anomalous one."""
WHY = {NON_FINITE: "non_finite", SPIKE: "spike"}
LEAST_FACTOR = 4.0
"""Minimum factor of a spike over the mean norm, however small the variance of the norms before:
some small batches of good text have norms two to three times the usual one."""
SPIKE_WINDOW = 128
"""Number of normal steps over which the mean and the standard deviation of norms are computed."""
MAX_REWINDS = 3
"""Number of times a run returns to the same weights before it stops."""
RECENT = 100
"""Number of most recent steps among which skipped steps are counted."""
WINDOW = "guard/grad_norm/window"
"""Path in a checkpoint of the window of gradient norms."""


class Rewind(Exception):
    """Request to go back to a checkpoint because of an anomalous step."""

    def __init__(self, step: AnomalousStep) -> None:
        """Create the request; `step` is the step that caused it."""
        super().__init__(str(step))
        self.step = step


@dataclass(frozen=True)
class Judgement:
    """The guard's judgement of one step, on the device."""

    skip: Tensor
    """[]: 1.0 if the step must be skipped, else 0.0; the `found_inf` of optimizers."""
    values: Tensor
    """[3]: loss, gradient norm, verdict."""


class Guard:
    """Anomaly guard: it judges every step on the device, and acts on it as configured.

    A gradient norm is a spike when its logarithm lies more than `spike_sigmas` standard deviations
    above its mean over the last SPIKE_WINDOW normal steps. That is the rule of OLMo's
    SkipStepOptimizer (arXiv 2501.00656: 6 deviations, 128 steps), with two differences: it uses the
    logarithm, because norms change by factors, and it leaves out the norms of anomalous steps,
    which would hide those that follow. All ranks reach the same verdict.
    """

    def __init__(self, config: GuardConfig, world: World, job: Path) -> None:
        """Create the guard; `job` is the job folder that error messages name."""
        self._config, self._world, self._job = config, world, job
        self._window = self._empty()
        self._rewinds: Counter[int] = Counter()

    # ---- on the device ---------------------------------------------------------------------------

    @torch.no_grad()
    def judge(self, values: Tensor) -> Judgement:
        """Judge a step by its loss and gradient norm [2], without a host synchronisation.

        They must be bitwise equal on all ranks, as `Mesh.mean` makes them.
        """
        # NaN compares false with everything, so a test for large values alone would miss it.
        verdict = 1.0 - values.isfinite().all().float()
        if self._config.spike != "none":
            # Norms change by factors. In the logarithm a factor is a distance, whatever the scale
            # of the run.
            log = values[1].log()
            # Until the window is full it holds NaN: mean and std are NaN, which nothing exceeds.
            std, mean = torch.std_mean(self._window)
            # A quiet stretch has a tiny deviation, so that normal steps would exceed six of them.
            margin = (self._config.spike_sigmas * std).clamp(min=math.log(LEAST_FACTOR))
            # Arithmetic instead of `if`: a branch would wait for the device in every step.
            verdict += SPIKE * (log.isfinite() & (log > mean + margin) & (verdict == FINE))
            # A spike does not enter the window: it would raise the deviation and hide the next one.
            moved = torch.cat([self._window[1:], log.view(1)])
            good = log.isfinite() & (verdict == FINE)
            self._window.copy_(torch.where(good, moved, self._window))
        return Judgement((verdict != FINE).float(), torch.cat([values, verdict.view(1)]))

    def skipped_values(self) -> Tensor:
        """Return the `Judgement.values` of a step that is skipped after a rewind, [3]."""
        return torch.full((3,), SKIPPED, device=self._world.device)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint, so that a resumed run reaches the same verdicts."""
        return {} if self._config.spike == "none" else {WINDOW: self._window}

    def load(self, tensors: Mapping[str, FullTensor]) -> None:
        """Restore the state from a checkpoint; the window starts empty if its size has changed."""
        self._window = self._empty()
        if WINDOW in tensors and tensors[WINDOW].shape == self._window.shape:
            fill(self._window, tensors[WINDOW])

    def _empty(self) -> Tensor:
        return torch.full((SPIKE_WINDOW,), math.nan, device=self._world.device)

    # ---- on the host -----------------------------------------------------------------------------

    def review(
        self, record: Record, values: Sequence[float], position: Position
    ) -> Iterator[Record]:
        """Yield the records of a step: `record` completed and, if anomalous, a `guard` record.

        `values` are `Judgement.values` on the host. For an anomalous step, raise Rewind or
        Diverged as configured; before Diverged, the records are yielded.
        """
        loss, norm, verdict = values
        step = record["step"]
        if verdict == FINE:
            position.trained += 1
            yield record | {"loss": loss, "grad_norm": norm}
        elif verdict == SKIPPED:
            yield from _skipped_records(record, None, None, position.steps_to_skip[step], "rewind")
        else:
            what = f"grad_norm is {norm:.4g}" if math.isfinite(loss) else f"loss is {loss}"
            bad = AnomalousStep(step, WHY[verdict], what, record["ledger"])
            # The reason names the key: guard.non_finite or guard.spike.
            action = getattr(self._config, bad.why)
            if action == "rewind":
                raise Rewind(bad)
            # Logged before the run ends, so that the records have the step that ended it.
            yield from _skipped_records(record, loss, norm, bad, action)
            if action == "stop":
                raise self._diverged(
                    bad,
                    "nothing was saved since; the newest checkpoint is from before",
                    f"skip that batch and resume: dtt train {self._job} guard.{bad.why}=skip",
                )
            self._count(bad, position)

    def _count(self, bad: AnomalousStep, position: Position) -> None:
        """Count a skipped step; raise Diverged if too many of the last `RECENT` were skipped."""
        recent = [step for step in position.recent_skips if step > bad.step - RECENT]
        position.recent_skips = [*recent, bad.step]
        if len(position.recent_skips) >= self._config.max_skips:
            count, first = len(position.recent_skips), position.recent_skips[0]
            why = f"{count} of the last {RECENT} steps were anomalous, the first {first}"
            raise self._diverged(bad, why, "allow more: guard.max_skips")

    def steps_to_skip(
        self, cause: AnomalousStep, checkpoint: int, position: Position
    ) -> dict[int, AnomalousStep]:
        """Return the `Position.steps_to_skip` of the run after a rewind to step `checkpoint`.

        Raise Diverged if the run has gone back to the same weights too often. Skipped steps
        change nothing, so checkpoints with only such steps between them have the same weights
        and are counted as one.
        """
        origin = checkpoint
        # A step that was skipped left the weights as they were, so go back to the first checkpoint
        # with these weights.
        while origin in position.steps_to_skip:
            origin -= 1
        self._rewinds[origin] += 1
        if self._rewinds[origin] > MAX_REWINDS:
            why = f"the run has gone back to the weights of step {origin} {MAX_REWINDS} times"
            raise self._diverged(cause, why, "skip more: guard.rewind_around")
        around = self._config.rewind_around
        # Steps before the checkpoint are done and cannot be skipped any more.
        first = max(checkpoint + 1, cause.step - around)
        return position.steps_to_skip | dict.fromkeys(range(first, cause.step + around + 1), cause)

    def check_trained(self, position: Position) -> None:
        """Raise Diverged if a finished run has never changed its weights.

        In a short run every step may be skipped before a limit of the guard is reached.
        """
        if position.trained == 0:
            raise Diverged(
                f"training diverged: none of its {position.step} steps changed the weights",
                where=self._job / "metrics.jsonl",
                why="every step was non-finite or a spike, or close to one that caused a rewind",
                next="start under a new name with a lower optim.lr, a longer schedule.warmup or "
                "train.clip_norm=1",
            )
        if 2 * position.trained < position.step and self._world.first:
            log.warning("only %d of %d steps changed the weights", position.trained, position.step)

    def _diverged(self, bad: AnomalousStep, why: str, instead: str) -> Diverged:
        return Diverged(
            f"training diverged: {bad.what} at step {bad.step}",
            where=f"the batch with data hash {bad.ledger}: dtt data at-step {self._job} {bad.step}",
            why=why,
            next="start under a new name with a lower optim.lr, a longer schedule.warmup or "
            f"train.clip_norm=1; or {instead}",
        )


def _skipped_records(
    record: Record, loss: float | None, norm: float | None, bad: AnomalousStep, action: str
) -> Iterator[Record]:
    """Yield the records of a skipped step; NaN and infinity, which JSON lacks, become null."""
    yield record | {"loss": finite(loss), "grad_norm": finite(norm), "skipped": True}
    anomaly = {"why": bad.why, "bad_step": bad.step, "action": action, "ledger": record["ledger"]}
    yield {"kind": "guard", "step": record["step"], **anomaly}


def finite(value: float | None) -> float | None:
    """Return `value`, or None if it is NaN or infinite, which JSON cannot represent."""
    return value if value is not None and math.isfinite(value) else None
