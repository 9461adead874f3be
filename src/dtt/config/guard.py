"""Detection of non-finite and spiking steps, and the action taken on them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from dtt.config.base import Section, free


class GuardConfig(Section):
    """Handling of non-finite and spiking steps.

    Whatever the action, such a step changes neither weights nor optimizer state. `stop` ends the
    run with exit code 76; the newest checkpoint is from before the step. `skip` continues as if the
    batch of the step did not exist. `rewind` returns to the newest checkpoint and skips the batches
    around the step, because those before it may have caused it (PaLM, arXiv 2204.02311, section
    5.1).
    """

    non_finite: Literal["stop", "skip", "rewind"] = free("stop")
    """Action when the loss or the gradient norm is NaN or infinite. With fp32 and bf16 the cause is
    usually a learning rate that is too high, a hardware fault or a bug, which a person should
    investigate."""
    spike: Literal["none", "stop", "skip", "rewind"] = free("none")
    """Action when the gradient norm is far above that of the preceding steps. The default is none:
    clipping bounds the effect of such a step, and a change in the data may look like a spike."""
    spike_sigmas: PositiveFloat = free(6.0)
    """A norm is a spike if its logarithm is this many standard deviations above the mean, and the
    norm is at least four times the usual one."""
    spike_window: Annotated[int, Field(ge=8)] = free(128)
    """Steps over which mean and standard deviation are computed, without skipped ones. Until the
    window is full, no step is judged a spike."""
    max_skips: PositiveInt = free(10)
    """Number of skipped steps among the last 100 at which the run stops: then the cause is not a
    single batch."""
    rewind_around: NonNegativeInt = free(10)
    """Number of steps before and after an anomalous one that `rewind` skips as well."""
    max_rewinds: PositiveInt = free(3)
    """Number of times a run returns to one checkpoint before it stops. Checkpoints with only
    skipped steps between them count as one."""
