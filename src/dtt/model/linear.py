"""Linear and Embedding layers without default initialisation.

`dtt.model.init` or a checkpoint sets their values. torch's own initialisation takes half a second
at startup for values that are overwritten, and three on the meta device, where the first random
number loads torch's decompositions.
"""

from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    """`nn.Linear` without default initialisation."""

    def reset_parameters(self) -> None:
        """Do nothing: leave the parameters uninitialised."""


class Embedding(nn.Embedding):
    """`nn.Embedding` without default initialisation."""

    def reset_parameters(self) -> None:
        """Do nothing: leave the parameters uninitialised."""
