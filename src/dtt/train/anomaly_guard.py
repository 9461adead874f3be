"""Anomaly guard: detect non-finite and spiking steps on the device, and skip or stop.

- The guard uses means over all ranks, from the all-reduce of all numbers of a step, so all ranks
  reach the same verdict.
- The verdict stays on the device. Optimizers receive it as `found_inf` and the moving average of
  the weights as `skip`; both then stay bit-for-bit unchanged.
- The host sees the verdict when it reads the losses, and then acts according to `guard`. `stop`
  ends the run with exit code 76 (the default for non-finite numbers). `skip` continues.
- Data, data hash and schedule advance past a skipped step.
- The checkpoint stores the state that a resume needs to reach the same verdicts: the norms and
  recently skipped steps.
- Spike detection is off by default. With clipping, a spike is one update of normal length, and an
  intended change of the data, such as another source or a longer context, can look like a spike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dtt.base.errors import Diverged
from dtt.base.log import log
from dtt.config.train import GuardConfig
from dtt.mesh.dist import World
from dtt.mesh.sharding import FullTensor, fill
from dtt.track.base import Record
from dtt.train.state import Position

FINE, NON_FINITE, SPIKE = 0.0, 1.0, 2.0
"""Verdicts on a step."""
WHY = {NON_FINITE: "non_finite", SPIKE: "spike"}
LEAST_FACTOR = 4.0
"""Minimum factor of a spike over the mean norm, however small the variance of the norms before:
some small batches of good text have norms two to three times the usual one."""
SPIKE_WINDOW = 128
"""Number of normal steps over which the mean and the standard deviation of norms are computed."""
SPIKE_SIGMAS = 6.0
"""Number of standard deviations above the mean at which a norm is a spike."""
RECENT = 100
"""Number of most recent steps among which skipped steps are counted."""
MAX_SKIPS = 10
"""Number of skipped steps among these at which the run stops: the cause is not a single batch."""
WINDOW = "guard/grad_norm/window"
"""Path in a checkpoint of the window of gradient norms."""


@dataclass(frozen=True)
class StepVerdict:
    """The guard's judgement of one step, on the device."""

    skip: Tensor
    """[]: 1.0 if the step must be skipped, else 0.0; the `found_inf` of optimizers."""
    values: Tensor
    """[3]: loss, gradient norm, verdict."""


class Guard:
    """Anomaly guard: it judges every step on the device, and acts on it as configured.

    A gradient norm is a spike when its logarithm lies more than SPIKE_SIGMAS standard deviations
    above its mean over the last SPIKE_WINDOW normal steps. That is the rule of OLMo's
    SkipStepOptimizer (arXiv 2501.00656: 6 deviations, 128 steps), with two differences: it uses the
    logarithm, because norms change by factors, and it leaves out the norms of anomalous steps,
    which would hide those that follow. All ranks reach the same verdict.
    """

    def __init__(self, config: GuardConfig, world: World, job: Path) -> None:
        """Create the guard; `job` is the job folder that error messages name."""
        self._config, self._world, self._job = config, world, job
        self._window = self._empty()

    # ---- on the device ---------------------------------------------------------------------------

    @torch.no_grad()
    def judge(self, values: Tensor) -> StepVerdict:
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
            margin = (SPIKE_SIGMAS * std).clamp(min=math.log(LEAST_FACTOR))
            # Arithmetic instead of `if`: a branch would wait for the device in every step.
            verdict += SPIKE * (log.isfinite() & (log > mean + margin) & (verdict == FINE))
            # A spike does not enter the window: it would raise the deviation and hide the next one.
            moved = torch.cat([self._window[1:], log.view(1)])
            good = log.isfinite() & (verdict == FINE)
            self._window.copy_(torch.where(good, moved, self._window))
        return StepVerdict((verdict != FINE).float(), torch.cat([values, verdict.view(1)]))

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

        Moves `position.trained` or `position.recent_skips` on, so the caller must take all records.
        `values` are `StepVerdict.values` on the host. After the records of an anomalous step, raise
        Diverged if it is to stop the run.
        """
        loss, norm, verdict = values
        step = record["step"]
        if verdict == FINE:
            position.trained += 1
            yield record | {"loss": loss, "grad_norm": norm}
            return
        # The reason names the key: guard.non_finite or guard.spike.
        why, data_hash = WHY[verdict], record["ledger"]
        action = getattr(self._config, why)
        # Logged before the run ends, so that the records have the step that ended it.
        yield record | {"loss": finite(loss), "grad_norm": finite(norm), "skipped": True}
        anomaly = {"why": why, "bad_step": step, "action": action, "ledger": data_hash}
        yield {"kind": "guard", "step": step, **anomaly}
        recent = [*(old for old in position.recent_skips if old > step - RECENT), step]
        if action == "stop":
            reason = "nothing was saved since; the newest checkpoint is from before"
            instead = f"skip that batch and resume: dtt train {self._job} guard.{why}=skip"
        elif len(recent) >= MAX_SKIPS:
            reason = (
                f"{len(recent)} of the last {RECENT} steps were anomalous, the first {recent[0]}"
            )
            instead = f"resume from an earlier checkpoint: dtt train {self._job} --from-step N"
        else:
            position.recent_skips = recent
            return
        what = f"grad_norm is {norm:.4g}" if math.isfinite(loss) else f"loss is {loss}"
        raise Diverged(
            f"training diverged: {what} at step {step}",
            where=f"the batch with data hash {data_hash}: dtt data at-step {self._job} {step}",
            why=reason,
            next="start under a new name with a lower optim.lr, a longer schedule.warmup or "
            f"train.clip_norm=1; or {instead}",
        )

    def check_trained(self, position: Position) -> None:
        """Raise Diverged if a finished run has never changed its weights.

        In a short run every step may be skipped before a limit of the guard is reached.
        """
        if position.trained == 0:
            raise Diverged(
                f"training diverged: none of its {position.step} steps changed the weights",
                where=self._job / "metrics.jsonl",
                why="every step was non-finite or a spike",
                next="start under a new name with a lower optim.lr, a longer schedule.warmup or "
                "train.clip_norm=1",
            )
        if 2 * position.trained < position.step and self._world.first:
            log.warning("only %d of %d steps changed the weights", position.trained, position.step)


def finite(value: float | None) -> float | None:
    """Return `value`, or None if it is NaN or infinite, which JSON cannot represent."""
    return value if value is not None and math.isfinite(value) else None
