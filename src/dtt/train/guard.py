"""Anomaly guard: detect non-finite and spiking steps on the device, and skip, rewind or stop."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dtt.config.guard import GuardConfig
from dtt.errors import Diverged
from dtt.runtime.dist import World
from dtt.runtime.log import log
from dtt.runtime.sharding import Whole, fill
from dtt.track.base import Record
from dtt.train.state import BadStep, Position

FINE, NON_FINITE, SPIKE, PASSED_OVER = 0.0, 1.0, 2.0, 3.0
"""Verdicts on a step. The last one is for a step that is left out after a rewind, because it is
close to an anomalous one."""
WHY = {NON_FINITE: "non_finite", SPIKE: "spike"}
LEAST_FACTOR = 4.0
"""Minimum factor of a spike over the mean norm, however small the variance of the norms before:
some small batches of good text have norms two to three times the usual one."""
RECENT = 100
"""Number of last steps among which skipped steps are counted."""
WINDOW = "guard/grad_norm/window"
"""Path in a checkpoint of the window of gradient norms."""


class Rewind(Exception):
    """Request to go back to a checkpoint because of an anomalous step."""

    def __init__(self, bad: BadStep) -> None:
        """Make the request; `bad` is the step that caused it."""
        super().__init__(str(bad))
        self.bad = bad


@dataclass(frozen=True)
class Judgement:
    """The guard's judgement of one step, on the device."""

    bad: Tensor
    """[]: 1.0 if the step must be skipped, else 0.0; the `found_inf` of optimizers."""
    seen: Tensor
    """[3]: loss, gradient norm, verdict."""


class Guard:
    """Anomaly guard: it judges every step on the device, and acts on it as configured.

    A gradient norm is a spike when its logarithm lies more than `spike_sigmas` standard deviations
    above its mean over the last `spike_window` normal steps. That is the rule of OLMo's
    SkipStepOptimizer (arXiv 2501.00656: 6 deviations, 128 steps), with two differences: it uses the
    logarithm, because norms change by factors, and it leaves out the norms of anomalous steps,
    which would hide those that follow. All ranks reach the same verdict.
    """

    def __init__(self, config: GuardConfig, world: World, job: Path) -> None:
        """Make the guard; `job` is the job folder that error messages name."""
        self._config, self._world, self._job = config, world, job
        self._window = self._empty()
        self._rewinds: Counter[int] = Counter()

    @property
    def rewinds(self) -> bool:
        """True if the run may rewind, and so needs a checkpoint before its first step."""
        return "rewind" in (self._config.non_finite, self._config.spike)

    # ---- on the device ---------------------------------------------------------------------------

    @torch.no_grad()
    def judge(self, loss: Tensor, norm: Tensor) -> Judgement:
        """Judge a step by this rank's loss [] and gradient norm [], without a host synchronisation.

        The verdict is on the means over ranks, which are bitwise equal on all ranks.
        """
        seen = self._world.sum_(torch.stack([loss, norm])) / self._world.size
        verdict = 1.0 - seen.isfinite().all().float()
        if self._config.spike != "none":
            log = seen[1].log()
            # Until the window is full it holds NaN: mean and std are NaN, which nothing exceeds.
            std, mean = torch.std_mean(self._window)
            margin = (self._config.spike_sigmas * std).clamp(min=math.log(LEAST_FACTOR))
            verdict += SPIKE * (log.isfinite() & (log > mean + margin) & (verdict == FINE))
            moved = torch.cat([self._window[1:], log.view(1)])
            good = log.isfinite() & (verdict == FINE)
            self._window.copy_(torch.where(good, moved, self._window))
        return Judgement((verdict != FINE).float(), torch.cat([seen, verdict.view(1)]))

    def pass_over(self) -> Tensor:
        """Return the `Judgement.seen` of a step that is left out, [3]."""
        return torch.full((3,), PASSED_OVER, device=self._world.device)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint: a resumed run then judges alike."""
        return {} if self._config.spike == "none" else {WINDOW: self._window}

    def load(self, tensors: Mapping[str, Whole]) -> None:
        """Restore the state from a checkpoint; if the window size has changed, start with none."""
        self._window = self._empty()
        if WINDOW in tensors and tensors[WINDOW].shape == self._window.shape:
            fill(self._window, tensors[WINDOW])

    def _empty(self) -> Tensor:
        return torch.full((self._config.spike_window,), math.nan, device=self._world.device)

    # ---- on the host -----------------------------------------------------------------------------

    def review(self, record: Record, seen: Sequence[float], position: Position) -> Iterator[Record]:
        """Yield the records of a step: `record` completed and, if anomalous, a `guard` record.

        `seen` is `Judgement.seen` on the host. For an anomalous step, raise Rewind or Diverged as
        configured; before Diverged, the records are yielded.
        """
        loss, norm, verdict = seen
        step = record["step"]
        if verdict == FINE:
            position.trained += 1
            yield record | {"loss": loss, "grad_norm": norm}
        elif verdict == PASSED_OVER:
            yield from _left_out(record, None, None, position.avoided[step], "rewind")
        else:
            what = f"grad_norm is {norm:.4g}" if math.isfinite(loss) else f"loss is {loss}"
            bad = BadStep(step, WHY[verdict], what, record["ledger"])
            action = getattr(self._config, bad.why)
            if action == "rewind":
                raise Rewind(bad)
            yield from _left_out(record, loss, norm, bad, action)
            if action == "stop":
                raise self._diverged(
                    bad,
                    "nothing was saved since; the newest checkpoint is from before",
                    f"go on without that batch: dtt train {self._job} guard.{bad.why}=skip",
                )
            self._count(bad, position)

    def _count(self, bad: BadStep, position: Position) -> None:
        """Count a skipped step; raise Diverged if too many of the last `RECENT` were skipped."""
        recent = [step for step in position.skipped if step > bad.step - RECENT]
        position.skipped = [*recent, bad.step]
        if len(position.skipped) >= self._config.max_skips:
            count, first = len(position.skipped), position.skipped[0]
            why = f"{count} of the last {RECENT} steps were bad, the first {first}: no single batch"
            raise self._diverged(bad, why, "allow more: guard.max_skips")

    def avoid(self, bad: BadStep, checkpoint: int, position: Position) -> dict[int, BadStep]:
        """Return the `Position.avoided` of the run after a rewind to step `checkpoint`.

        Raise Diverged if the run has gone back to the same weights too often. Steps that are left
        out change nothing, so checkpoints with only such steps between them have the same weights
        and are counted as one.
        """
        origin = checkpoint
        while origin in position.avoided:
            origin -= 1
        self._rewinds[origin] += 1
        if self._rewinds[origin] > (most := self._config.max_rewinds):
            why = f"the run has gone back to the weights of step {origin} {most} times"
            raise self._diverged(bad, why, "allow more: guard.max_rewinds")
        around = self._config.rewind_around
        first = max(checkpoint + 1, bad.step - around)
        return position.avoided | dict.fromkeys(range(first, bad.step + around + 1), bad)

    def check_trained(self, position: Position) -> None:
        """Raise Diverged if a finished run has never changed its weights.

        In a short run every step may be skipped or left out before a limit of the guard is reached.
        """
        if position.trained == 0:
            raise Diverged(
                f"training diverged: none of its {position.step} steps changed the weights",
                where=self._job / "metrics.jsonl",
                why="every step was non-finite or a spike, or near one that the run went back from",
                next="start under a new name with a lower optim.lr, a longer schedule.warmup or "
                "train.clip_norm=1",
            )
        if 2 * position.trained < position.step and self._world.first:
            log.warning("only %d of %d steps changed the weights", position.trained, position.step)

    def _diverged(self, bad: BadStep, why: str, instead: str) -> Diverged:
        return Diverged(
            f"training diverged: {bad.what} at step {bad.step}",
            where=f"the batch of ledger {bad.ledger}: dtt data at-step {self._job} {bad.step}",
            why=why,
            next="start under a new name with a lower optim.lr, a longer schedule.warmup or "
            f"train.clip_norm=1; or {instead}",
        )


def _left_out(
    record: Record, loss: float | None, norm: float | None, bad: BadStep, action: str
) -> Iterator[Record]:
    """Yield the records of a skipped step; NaN and infinity, which JSON lacks, become null."""
    yield record | {"loss": _number(loss), "grad_norm": _number(norm), "skipped": True}
    told = {"why": bad.why, "bad_step": bad.step, "action": action, "ledger": record["ledger"]}
    yield {"kind": "guard", "step": record["step"], **told}


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
