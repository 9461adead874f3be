"""One training step: the passes over micro-batches, and the update of the weights.

Everything that trains a model calls these functions: a run, the short trainings of muP, the
measurement of `dtt plan`, and benchmarks. Nothing here synchronises host and device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dtt.data.samples.loader import MicroBatch
from dtt.optim.ema import Ema
from dtt.optim.rounding import StochasticRounding
from dtt.parallel.apply import autocast, gradient_sync

LOSS = "loss"
"""Name of the main loss among the losses that an objective returns."""

Objective = Callable[[nn.Module, MicroBatch], Mapping[str, Tensor]]
"""Function of a module and a micro-batch that returns the losses to minimise, by name: `LOSS`, and
any auxiliary losses. Values that do not require gradients are metrics, which are only reported.
Each is [], a sum over the terms of the micro-batch: its targets or preference pairs."""


@dataclass(frozen=True)
class StepLosses:
    """The losses of one step on this rank; the tensors are detached and on the device."""

    losses: Mapping[str, Tensor]
    """Losses by name, []: sums over the micro-batches, divided by the normaliser.

    Each micro-batch is divided before it is added, because gradients are those of the divided
    losses. The mean over the replicas is the loss per term of the global batch.
    """
    metrics: Mapping[str, Tensor]
    """The metrics of the objective by name, divided as the losses are."""
    terms: int
    """Number of terms in the global batch: its targets or preference pairs."""

    @property
    def loss(self) -> Tensor:
        """The main loss, []."""
        return self.losses[LOSS]


def next_token(z_loss: float = 0.0) -> Objective:
    """Return the objective of language modelling: the cross-entropy of the next token, in nats.

    `z_loss` is the coefficient that the model's `forward` takes.
    """

    def objective(module: nn.Module, micro_batch: MicroBatch) -> dict[str, Tensor]:
        loss = module(
            micro_batch.tokens,
            micro_batch.targets,
            doc_ids_BT=micro_batch.doc_ids,
            z_loss=z_loss,
        )
        return {LOSS: loss}

    return objective


def forward_backward(
    module: nn.Module,
    micro_batches: Sequence[MicroBatch],
    objective: Objective,
    *,
    terms: int,
    precision: str,
    replicas: int = 1,
    reduce_each: bool = False,
) -> StepLosses:
    """Add the gradients of this rank's micro-batches to the parameters; return the losses.

    `terms` is the number of terms of the loss in the global batch (targets, or preference pairs),
    and `replicas` the number of ranks over which gradients are averaged. The normaliser of the
    losses is `terms / replicas`, so that the averaged gradients are those of the mean loss per term
    of the global batch. With `reduce_each`, sharded gradients are reduced after each micro-batch,
    not only after the last.
    """
    # A packed sequence may hold a single token, and so no target.
    # Each rank sums over its own terms. FSDP2 and DDP divide by the number of replicas, which this
    # factor undoes.
    scale = replicas / max(1, terms)
    losses: dict[str, Tensor] = {}
    metrics: dict[str, Tensor] = {}
    for i, micro_batch in enumerate(micro_batches):
        last = i == len(micro_batches) - 1
        with gradient_sync(module, last, each=reduce_each):
            with autocast(micro_batch.tokens.device, precision):
                # Autocast covers the forward pass only: the backward pass repeats the dtypes of its
                # operators.
                values = objective(module, micro_batch)
                # Scaled before the backward pass, so that gradients of all micro-batches add up to
                # those of the mean. Scaling them afterwards would take one more pass over all
                # gradients.
                scaled = {name: scale * value for name, value in values.items()}
            # The gradients of the sum of all losses, without a kernel that computes the sum.
            torch.autograd.backward([value for value in scaled.values() if value.requires_grad])
        for name, value in scaled.items():
            sums = losses if value.requires_grad else metrics
            # Detached, so that the graph of a micro-batch is freed before the next one.
            sums[name] = sums[name] + value.detach() if name in sums else value.detach()
    return StepLosses(losses, metrics, terms)


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
        optimizer.step()
        # zero_grad sets gradients to None: no pass over memory, and the next backward pass writes
        # instead of adding.
        optimizer.zero_grad()
    if ema is not None:
        # After the optimizers: the average is over updated weights.
        ema.update(skip, step)
