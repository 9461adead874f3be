"""The function that a step calls for the objective of a run.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dtt.base.targets import IGNORE_INDEX
from dtt.config.objective import Objective
from dtt.config.own import own_code, own_file_of
from dtt.config.run import RunConfig
from dtt.data.samples.loader import MicroBatch
from dtt.mesh.mesh import Mesh
from dtt.model.output import TEXT_BYTES, Output
from dtt.track.base import OWN
from dtt.train.objectives.next_token import NextTokenConfig
from dtt.train.run_plan import RunPlan
from dtt.train.state import OBJECTIVE
from dtt.train.step import LossFunction

CROSS_ENTROPY = "cross_entropy"


def make_loss(
    cfg: RunConfig, plan: RunPlan, token_bytes: Tensor | None = None, *, evaluates: bool = False
) -> LossFunction:
    """Return the loss of the run; for evaluation, with the bytes of text of each token."""
    return loss_function(
        cfg.objective,
        z_loss=cfg.train.z_loss,
        contexts=plan.sizes.context,
        evaluates=evaluates,
        token_bytes=token_bytes,
    )


def loss_function(
    objective: Objective = NextTokenConfig(),  # noqa: B008  it is frozen
    *,
    z_loss: float = 0.0,
    contexts: int = 1,
    evaluates: bool = False,
    token_bytes: Tensor | None = None,
) -> LossFunction:
    """Return what a step calls for an objective; to evaluate, with the cross-entropy in its place.

    The value of the objective is then beside it, unless its terms are pairs. With `token_bytes`
    [V], the bytes of text of each token id, `TEXT_BYTES` is a metric. `contexts` ranks share each
    sequence (context parallelism), and each reports its share. `z_loss` is the coefficient of the
    model's `forward`.
    """
    needs, plain = objective.needs, objective.needs == "sum" or objective.per_pair
    # A prefix, so that no term of a user's own can replace a number of dtt, such as `tokens`, with
    # which a run resumes.
    prefix = OWN if own_file_of(objective) is not None else ""
    first: list[set[str]] = []

    def losses(output: Output, micro_batch: MicroBatch) -> Output:
        targets_BT, given = micro_batch.targets, output.loss
        if needs == "token_loss":
            given = torch.where(targets_BT != IGNORE_INDEX, given, 0.0)
        with own_code(objective, OBJECTIVE):
            found = objective.loss(given, micro_batch)
            loss, metrics = found if isinstance(found, tuple) else (found, {})
            _check(loss, metrics, first, trains=given.requires_grad)
        # Sorted, because ranks add up the terms by their places. At least fp32: what the sums of a
        # step keep of a bf16 term is its first three digits.
        named = {
            prefix + name: value.detach().to(torch.promote_types(value.dtype, torch.float32))
            for name, value in sorted(metrics.items())
        }
        if not plain:
            # The sum over the targets, from that of each, [B, T], or from logits, [B, T, V].
            entropy = given.sum()
            if needs == "logits":
                flat = given.detach().flatten(0, 1).float()
                entropy = F.cross_entropy(flat, targets_BT.flatten(), reduction="sum")
            if evaluates:
                named[OBJECTIVE], loss = loss, entropy
            else:
                named[CROSS_ENTROPY] = entropy.detach()
        if token_bytes is not None and not objective.per_pair:
            # Not `targets[counted]`: its shape depends on the data, so a GPU would synchronise.
            text_BT = token_bytes[targets_BT.clamp(min=0)] * (targets_BT != IGNORE_INDEX)
            named[TEXT_BYTES] = text_BT.sum()
        share = {name: value / contexts for name, value in named.items()}
        if needs != "sum":  # of which the model has computed this rank's share
            loss = loss / contexts
        return Output(loss, output.aux, output.metrics | share, output.loads)

    if needs == "sum":
        return LossFunction({"z_loss": z_loss}, losses)
    return LossFunction({"reduction": "none" if needs == "token_loss" else "logits"}, losses)


def _check(loss: Any, metrics: Any, first: list[set[str]], *, trains: bool) -> None:
    """Raise ValueError unless `loss` can be minimised and `metrics` reported.

    The metrics of the first micro-batch add their names to `first`; others must have the same.
    """
    for name, value in {"the loss": loss, **metrics}.items():
        if not isinstance(value, Tensor) or value.shape != ():
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"`loss` returned {shape} for {name}, not a tensor []: the sum")
        if value.device != loss.device:
            raise ValueError(f"`loss` returned {name} on {value.device}, not on {loss.device}")
    if not first:
        first.append({*metrics})
    if metrics.keys() != first[0]:
        # The sum over micro-batches would leave out what the first one lacks.
        raise ValueError(f"`loss` returned {sorted(metrics)}, and {sorted(first[0])} at first")
    if trains and not loss.requires_grad:
        raise ValueError("`loss` returned a value that does not depend on the model")


def check_ranks(config: Objective, names: Iterable[str], mesh: Mesh) -> None:
    """Raise ValueError unless all ranks report values of these names; all call this together."""
    of_ranks = mesh.gather([*names])
    for rank, theirs in enumerate(of_ranks):
        with own_code(config, OBJECTIVE):
            if theirs != of_ranks[0]:
                raise ValueError(f"`loss` returned {theirs} on rank {rank}, {of_ranks[0]} on 0")
