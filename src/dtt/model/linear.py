"""Linear and Embedding that get their values from `dtt.model.init`, or from a checkpoint, alone.

torch's own fill themselves when made: half a second of a start for numbers that nobody uses, and
three on the meta device, where the first random number loads torch's decompositions.
"""

from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    """`nn.Linear`, its values not set."""

    def reset_parameters(self) -> None:
        """Set nothing."""


class Embedding(nn.Embedding):
    """`nn.Embedding`, its values not set."""

    def reset_parameters(self) -> None:
        """Set nothing."""
