"""One training step: the passes over micro-batches, and the update of the weights.

Everything that trains a model uses it: a run, the short trainings of muP, the measurement of `dtt
plan`, and benchmarks. Nothing here waits for the device, but for
optimizers that ignore `found_inf`, and with expert parallelism once in each pass of a layer with
experts (`dtt.parallel.expert`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dtt.config.own import own_code
from dtt.data.samples.loader import MicroBatch
from dtt.model.output import Output
from dtt.optim.ema import Ema
from dtt.optim.rounding import StochasticRounding
from dtt.parallel.apply import autocast, gradient_sync


@dataclass(frozen=True)
class LossFunction:
    """The function that training minimises.

    It never calls the module: where a pipeline divides a model into stages, no rank has all of it.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the forward pass that choose its loss: `reduction`, `z_loss`."""
    losses: Callable[[Output, MicroBatch], Output] = lambda output, _micro_batch: output
    """Function of the output of the forward pass and its micro-batch that returns the losses."""


TOKEN_LOSSES = LossFunction({"reduction": "none"})
"""The cross-entropy of each target, for evaluation: `Output.loss` is [B, T]."""


@dataclass(frozen=True)
class Passes:
    """Forward and backward passes of a module; a pipeline replaces this class."""

    module: nn.Module
    """The model, or the model wrapped (DDP, context parallelism). It returns an `Output`."""
    precision: str
    replicas: int = 1
    """Number of ranks over which gradients are averaged."""
    reduce_each: bool = False
    """If True, sharded gradients are reduced after each micro-batch, not only after the last."""

    def run(
        self, micro_batches: Sequence[MicroBatch], loss_function: LossFunction, terms: int
    ) -> Output:
        """Add the gradients of this rank's micro-batches to the parameters; return the losses.

        `terms` is the number of terms of the loss in the global batch (targets, or preference
        pairs). The gradients, averaged over the replicas, are those of the mean loss per term.

        The returned values are detached and on the device: sums over the micro-batches, divided by
        `terms / replicas`. So their means over the replicas are values per term.
        """
        # Each rank sums over its own terms. FSDP2 and DDP divide by the number of replicas, which
        # this factor undoes. At least one term: packed sequences may all hold a single token.
        scale = self.replicas / max(1, terms)
        outputs = []
        for i, micro_batch in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            with gradient_sync(self.module, last, each=self.reduce_each):
                # Scaled before the backward pass, so that gradients of all micro-batches add up to
                # those of the mean. Scaling them afterwards would take one more pass over all
                # gradients.
                output = self._forward(micro_batch, loss_function).apply(
                    lambda value: scale * value
                )
                # The gradients of the sum of all losses, without a kernel that computes the sum.
                torch.autograd.backward([output.loss, *output.aux.values()])
            # Detached, so that the graph of a micro-batch is freed before the next one.
            outputs.append(output.apply(Tensor.detach))
        return reduce(Output.plus, outputs)

    @torch.no_grad()
    def evaluate(self, micro_batch: MicroBatch, loss_function: LossFunction) -> Output:
        """Return the losses of a micro-batch of this rank, not divided by its number of terms."""
        return self._forward(micro_batch, loss_function)

    def _forward(self, micro_batch: MicroBatch, loss_function: LossFunction) -> Output:
        # Autocast covers the forward pass only: the backward pass repeats the dtypes of its
        # operators.
        with autocast(micro_batch.tokens.device, self.precision):
            output = self.module(
                micro_batch.tokens,
                micro_batch.targets,
                doc_ids_BT=micro_batch.doc_ids,
                **loss_function.options,
            )
            return loss_function.losses(output, micro_batch)


def update(
    optimizers: Mapping[str, Optimizer],
    skip: Tensor,
    *,
    step: int,
    rounding: StochasticRounding | None = None,
    ema: Ema | None = None,
) -> None:
    """Update the weights and their average from the gradients, and clear the gradients.

    `skip` [] is 1.0 on the device if the step must change nothing, else 0.0. `step` is the number
    of steps done before; `rounding` is that of the optimizers.
    """
    if rounding is not None:
        # Set as an attribute, because `Optimizer.step` has no argument to pass it with.
        rounding.step = step
    for optimizer in optimizers.values():
        # The protocol of torch's GradScaler: it sets the same attribute, which the fused kernels
        # read on the device.
        optimizer.found_inf = skip  # type: ignore[attr-defined]
        with own_code(getattr(optimizer, "variant", None), "optim"):
            # Only for an optimizer that does not know this protocol does the host wait.
            if getattr(optimizer, "_step_supports_amp_scaling", False) or not skip.item():
                optimizer.step()
        # zero_grad sets gradients to None: no pass over memory, and the next backward pass writes
        # instead of adding.
        optimizer.zero_grad()
    if ema is not None:
        # After the optimizers: the average is over updated weights.
        ema.update(skip)
