"""The result of a forward pass with targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

TEXT_BYTES = "text_bytes"
"""Name of the metric that holds the number of bytes of the targets' text."""


class Output(NamedTuple):
    """Losses to minimise, and values to report.

    A tuple, because FSDP2 and DDP look for the tensors whose gradients start a backward pass in
    tuples, lists and dicts. Inside a dataclass they would not find any.
    """

    loss: Tensor
    """Main loss in nats: the sum over the terms of the batch (its targets or preference pairs), [].

    A forward pass with `reduction="none"` returns the loss of each target, [B, T], and one with
    `reduction="logits"` the logits, [B, T, V]; an `Objective` makes the sum of them.
    """
    aux: dict[str, Tensor]
    """Auxiliary losses by name, [] each: sums over the batch that are minimised with the main loss.

    Those of a decoder are what its blocks return. An evaluation does not report them.
    """
    metrics: dict[str, Tensor]
    """Values by name that are only reported, [] each: sums over the terms of the batch."""
    loads: dict[int, Tensor] = {}  # noqa: RUF012  (never changed)
    """Number of targets that each expert computed, [E] int64, by the index of the layer."""

    def named(self) -> dict[str, Tensor]:
        """Return all values by name; that of the main loss is `loss`."""
        return {"loss": self.loss, **self.aux, **self.metrics}

    def apply(self, function: Callable[[Tensor], Tensor]) -> Output:
        """Return the result of `function` for each value but the loads, which are counts."""
        return Output(
            function(self.loss),
            {name: function(value) for name, value in self.aux.items()},
            {name: function(value) for name, value in self.metrics.items()},
            self.loads,
        )

    def plus(self, other: Output) -> Output:
        """Return the sums of the values of two micro-batches, which have the same names."""
        return Output(
            self.loss + other.loss,
            {name: value + other.aux[name] for name, value in self.aux.items()},
            {name: value + other.metrics[name] for name, value in self.metrics.items()},
            {layer: load + other.loads[layer] for layer, load in self.loads.items()},
        )


class StagePass(NamedTuple):
    """The part of a pass that a pipeline stage computes.

    A tuple, as torch's FSDP2 looks for tensors with gradients among the arguments of a module, and
    would not find one inside a dataclass.
    """

    layers: range
    hidden_BTD: Tensor | None
    """Hidden states of the stage before; None at the first stage, which embeds the tokens."""


class HiddenStates(NamedTuple):
    """The result of the layers of a pipeline stage that is not the last."""

    hidden: Tensor
    """Residual stream of this rank's tokens, [B, T, D]: the input of the next stage."""
    aux: dict[str, Tensor]
    """Auxiliary losses of these layers, as in `Output`."""
    loads: dict[int, Tensor]
    """Loads of these layers, as in `Output`."""
