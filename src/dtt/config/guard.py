"""What is done about a step whose numbers are no use."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from dtt.config.base import Section, free


class GuardConfig(Section):
    """Bad steps. Whatever the action, such a step changes neither weights nor optimizer.

    `stop` ends the run with exit code 76; the newest checkpoint is from before the step. `skip`
    goes on as if the step's batch were not there. `rewind` goes back to the newest checkpoint and
    passes over the batches around the step, since those before it may have led there (PaLM, arXiv
    2204.02311, section 5.1).
    """

    non_finite: Literal["stop", "skip", "rewind"] = free("stop")
    """What to do when the loss or the gradient norm is NaN or infinite. With fp32 and bf16 that is
    mostly a rate too high, a fault of the machine or of the code: a person should look at it."""
    spike: Literal["none", "stop", "skip", "rewind"] = free("none")
    """What to do when the gradient norm is far above that of the steps before. Clipping bounds what
    such a step can do; and a change of data may look like one. So nothing is done unless asked."""
    spike_sigmas: PositiveFloat = free(6.0)
    """A norm is a spike when its logarithm is so many standard deviations above the mean, and the
    norm is at least four times the usual one."""
    spike_window: Annotated[int, Field(ge=8)] = free(128)
    """Steps over which mean and deviation are taken, bad ones left out; the first of a run are
    only looked at."""
    max_skips: PositiveInt = free(10)
    """So many bad steps among 100 stop the run: then it is not the batches."""
    rewind_around: NonNegativeInt = free(10)
    """How many steps before and after a bad one `rewind` passes over, too."""
    max_rewinds: PositiveInt = free(3)
    """Times a run goes back to one checkpoint; then it stops. Those with only steps between them
    that were passed over count as one."""
