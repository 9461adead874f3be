"""Steps whose numbers are no use: found on the device, dealt with where the host reads them."""

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
"""Verdicts on a step; the last is for one around a bad step, the run having gone back."""
WHY = {NON_FINITE: "non_finite", SPIKE: "spike"}
LEAST_FACTOR = 4.0
"""A norm below this many times the usual one is no spike, however even those before were: among
small batches of good text some have norms two to three times the usual."""
RECENT = 100
"""Steps among which skipped ones are counted."""
WINDOW = "guard/grad_norm/window"
"""Where a checkpoint keeps the norms that the next ones are compared with."""


class Rewind(Exception):
    """Training is to go back to a checkpoint, because of a bad step."""

    def __init__(self, bad: BadStep) -> None:
        """`bad` is the step that is the reason."""
        super().__init__(str(bad))
        self.bad = bad


@dataclass(frozen=True)
class Judgement:
    """On one step, still on the device."""

    bad: Tensor
    """[], 1.0 if the step must change nothing, else 0.0: what optimizers take as `found_inf`."""
    seen: Tensor
    """[3]: loss, gradient norm, verdict."""


class Guard:
    """Judges every step on the device, alike on all ranks, and carries out what the config says.

    A gradient norm is a spike when its logarithm lies more than `spike_sigmas` standard deviations
    above its mean over the last `spike_window` good steps. That is the rule of OLMo's
    SkipStepOptimizer (arXiv 2501.00656: 6 deviations, 128 steps), but of the logarithm, since norms
    change by factors, and without the norms of bad steps, which would hide those that follow.
    """

    def __init__(self, config: GuardConfig, world: World, job: Path) -> None:
        """`job` is the folder that messages name."""
        self._config, self._world, self._job = config, world, job
        self._window = self._empty()
        self._rewinds: Counter[int] = Counter()

    @property
    def rewinds(self) -> bool:
        """Whether a run may go back, and so needs a checkpoint from its very start."""
        return "rewind" in (self._config.non_finite, self._config.spike)

    # ---- on the device ---------------------------------------------------------------------------

    @torch.no_grad()
    def judge(self, loss: Tensor, norm: Tensor) -> Judgement:
        """Judge a step by its loss and gradient norm, each [], of this rank; never waits.

        The ranks' means count, so that all judge the same numbers, to the last bit.
        """
        seen = self._world.sum_(torch.stack([loss, norm])) / self._world.size
        verdict = 1.0 - seen.isfinite().all().float()
        if self._config.spike != "none":
            log = seen[1].log()
            std, mean = torch.std_mean(self._window)  # NaN, which nothing exceeds, until it is full
            margin = (self._config.spike_sigmas * std).clamp(min=math.log(LEAST_FACTOR))
            verdict += SPIKE * (log.isfinite() & (log > mean + margin) & (verdict == FINE))
            moved = torch.cat([self._window[1:], log.view(1)])
            good = log.isfinite() & (verdict == FINE)
            self._window.copy_(torch.where(good, moved, self._window))
        return Judgement((verdict != FINE).float(), torch.cat([seen, verdict.view(1)]))

    def pass_over(self) -> Tensor:
        """What `Judgement.seen` is for a step that is not made."""
        return torch.full((3,), PASSED_OVER, device=self._world.device)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold for a resume to judge alike."""
        return {} if self._config.spike == "none" else {WINDOW: self._window}

    def load(self, tensors: Mapping[str, Whole]) -> None:
        """Go on where `tensors` was taken; after a change of the window, begin anew."""
        self._window = self._empty()
        if WINDOW in tensors and tensors[WINDOW].shape == self._window.shape:
            fill(self._window, tensors[WINDOW])

    def _empty(self) -> Tensor:
        return torch.full((self._config.spike_window,), math.nan, device=self._world.device)

    # ---- on the host -----------------------------------------------------------------------------

    def review(self, record: Record, seen: Sequence[float], position: Position) -> Iterator[Record]:
        """The records of a step: `record` completed; of a bad one also why, and what was done.

        After these, or instead, Diverged or Rewind where the step asks for it.
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
        """Keep in mind that a step was skipped; Diverged when too many were."""
        recent = [step for step in position.skipped if step > bad.step - RECENT]
        position.skipped = [*recent, bad.step]
        if len(position.skipped) >= self._config.max_skips:
            count, first = len(position.skipped), position.skipped[0]
            why = f"{count} of the last {RECENT} steps were bad, the first {first}: no single batch"
            raise self._diverged(bad, why, "allow more: guard.max_skips")

    def avoid(self, bad: BadStep, checkpoint: int, position: Position) -> dict[int, BadStep]:
        """What `Position.avoided` is to be once the run is back at step `checkpoint`.

        Diverged when it has gone back there too often. Nothing is changed by steps that are passed
        over: checkpoints with only such steps between them are one and the same.
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
        """Raise Diverged if a run that has come to its end has not changed its weights once.

        A short run may skip or pass over every step before the limits of the guard are reached.
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
    """The records of a step that changed nothing; null stands for what JSON has no number for."""
    yield record | {"loss": _number(loss), "grad_norm": _number(norm), "skipped": True}
    told = {"why": bad.why, "bad_step": bad.step, "action": action, "ledger": record["ledger"]}
    yield {"kind": "guard", "step": record["step"], **told}


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
