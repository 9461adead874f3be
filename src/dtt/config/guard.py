"""Detection of non-finite and spiking steps, and the action taken on them."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from dtt.config.base import Section, resumable


class GuardConfig(Section):
    """Handling of non-finite and spiking steps.

    Such a step never changes weights or optimizer state, whatever the action. `stop` ends the
    run with exit code 76; the newest checkpoint is from before the step. `skip` continues as if the
    batch of the step did not exist. `rewind` returns to the newest checkpoint and skips the batches
    around the step, because those before it may have caused it (PaLM, arXiv 2204.02311, section
    5.1).
    """

    non_finite: Literal["stop", "skip", "rewind"] = resumable("stop")
    """Action when the loss or the gradient norm is NaN or infinite. With fp32 and bf16 the cause is
    usually a learning rate that is too high, a hardware fault or a bug, which should be
    investigated."""
    spike: Literal["none", "stop", "skip", "rewind"] = resumable("none")
    """Action when the gradient norm is far above that of the preceding steps. The default is none:
    clipping bounds the effect of such a step, and a change in the data may look like a spike."""
    spike_sigmas: PositiveFloat = resumable(6.0)
    """A norm is a spike if its logarithm is this many standard deviations above the mean of the
    last 128 steps, without skipped ones, and the norm is at least four times the usual one. Until
    there are 128, no step is judged a spike."""
    max_skips: PositiveInt = resumable(10)
    """Number of skipped steps among the last 100 at which the run stops: then the cause is not a
    single batch."""
    rewind_around: NonNegativeInt = resumable(10)
    """Number of steps before and after an anomalous one that `rewind` skips as well. A run that has
    returned to one checkpoint three times stops; checkpoints with only skipped steps between them
    count as one."""
