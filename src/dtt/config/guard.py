"""Detection of non-finite and spiking steps, and the action taken on them."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from dtt.config.base import Section, resumable


class GuardConfig(Section):
    """Handling of non-finite and spiking steps.

    Such a step never changes weights or optimizer state, whatever the action. `stop` ends the
    run with exit code 76; the newest checkpoint is from before the step, and `--from-step` resumes
    from an earlier one. `skip` continues as if the batch of the step did not exist.
    """

    non_finite: Literal["stop", "skip"] = resumable("stop")
    """Action when the loss or the gradient norm is NaN or infinite. With fp32 and bf16 the cause is
    usually a learning rate that is too high, a hardware fault or a bug, which should be
    investigated."""
    spike: Literal["none", "stop", "skip"] = resumable("none")
    """Action when the gradient norm is far above that of the preceding steps. The default is none:
    clipping bounds the effect of such a step, and a change in the data may look like a spike."""
    spike_sigmas: PositiveFloat = resumable(6.0)
    """A norm is a spike if its logarithm is this many standard deviations above the mean of the
    last 128 steps, without skipped ones, and the norm is at least four times the usual one. Until
    there are 128, no step is judged a spike."""
    max_skips: PositiveInt = resumable(10)
    """Number of skipped steps among the last 100 at which the run stops: then the cause is not a
    single batch."""
