"""Direct preference optimization (DPO) as a variant of the section `objective`.

Shapes: R rows (packed samples), T tokens, D documents of a row, at most T; P pairs, D / 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import PositiveFloat

from dtt.base.targets import IGNORE_INDEX
from dtt.config.objective import Objective

if TYPE_CHECKING:  # keeps torch out of the check of a configuration
    from torch import Tensor

    from dtt.data.samples.loader import MicroBatch

METRICS = "reward_margin", "reward_accuracy", "logp_chosen", "logp_rejected"
"""Names of the metrics: the mean over the pairs of the difference of the rewards of the chosen and
the rejected answer; the share of pairs with a positive difference; the mean log-probabilities of
chosen and rejected answers, in nats."""


class DpoConfig(Objective):
    """Direct preference optimization (DPO, Rafailov et al. 2023, arXiv 2305.18290), for
    `data.type: preference`.

    The log-probabilities of the reference model are computed once, before the first step, and kept
    in the folder of the job. Training then holds no second model.
    """

    per_pair = needs_reference = True
    type: Literal["dpo"] = "dpo"
    beta: PositiveFloat = 0.1
    """Strength of the penalty for moving away from the reference model: a reward is `beta` times
    the log-ratio of the probabilities that the model and the reference model give an answer."""
    length_normalised: bool = False
    """Divide the log-ratio of each answer by its number of tokens, so that long answers weigh as
    much as short ones (Lambert et al. 2024, arXiv 2411.15124). The mean log-ratios are small, so
    `beta` must be larger, such as 5."""
    reference: str | None = None
    """Reference model, in the form of `init.from`; null: the initial weights, `init.from`."""

    def loss(self, out: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sums of the loss and the metrics over pairs (arXiv 2305.18290, equation 7)."""
        import torch
        import torch.nn.functional as F

        assert batch.doc_ids is not None
        counted_RT = batch.targets != IGNORE_INDEX
        logp_RT = -out
        # The difference of each token, before it is summed: the sums of both models are large and
        # almost equal, so the difference of the sums would lose the digits that matter.
        ratio_RT = torch.where(counted_RT, logp_RT - batch.extra["reference_logprobs"], 0.0)
        ratio_RP2 = _by_pair(ratio_RT, batch.doc_ids)
        counts_RP2 = _by_pair(counted_RT.float(), batch.doc_ids)
        # A pair without targets on one side would divide by zero; `exists` removes it below.
        if self.length_normalised:
            ratio_RP2 = ratio_RP2 / counts_RP2.clamp(min=1.0)
        # Rows have fewer than P pairs, and a sample that pads an evaluation has none.
        exists_RP = (counts_RP2 > 0).all(-1)
        margin_RP = self.beta * (ratio_RP2[..., 0] - ratio_RP2[..., 1])
        margin_RP = torch.where(exists_RP, margin_RP, 0.0)
        # logsigmoid is stable for large margins, where log(sigmoid) would be log(0).
        loss = torch.where(exists_RP, -F.logsigmoid(margin_RP), 0.0).sum()
        with torch.no_grad():
            accuracy = (margin_RP > 0).float()
            chosen, rejected = _by_pair(logp_RT, batch.doc_ids).sum((0, 1))
            metrics = margin_RP.sum(), accuracy.sum(), chosen, rejected
        return loss, dict(zip(METRICS, metrics, strict=True))


def _by_pair(values_RT: Tensor, doc_ids_RT: Tensor) -> Tensor:
    """Return the sum of the values of each document, by pair: [R, P, 2]."""
    import torch

    rows, tokens = values_RT.shape
    # Even, so that documents can be viewed as pairs.
    documents = tokens + tokens % 2
    row_R1 = torch.arange(rows, device=values_RT.device)[:, None]
    # A row of the flat table per row of the batch: document numbers start at 0 in each.
    index_RT = row_R1 * documents + doc_ids_RT
    # Not `scatter_add`, whose order of additions on a GPU differs from run to run.
    sums = values_RT.new_zeros(rows * documents).index_put(
        (index_RT.flatten(),), values_RT.flatten(), accumulate=True
    )
    return sums.view(rows, documents // 2, 2)
