"""Direct preference optimization (DPO): the loss of pairs of answers, and its metrics.

Shapes: R rows (packed samples), T tokens, D documents of a row, at most T; P pairs, D / 2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dtt.base.targets import IGNORE_INDEX
from dtt.config.objective import DpoConfig
from dtt.data.samples.loader import MicroBatch
from dtt.model.output import Output
from dtt.train.step import TOKEN_LOSSES, LossFunction

METRICS = "reward_margin", "reward_accuracy", "logp_chosen", "logp_rejected"
"""Names of the metrics: the mean over the pairs of the difference of the rewards of the chosen and
the rejected answer; the share of pairs with a positive difference; the mean log-probabilities of
chosen and rejected answers, in nats."""


def dpo(cfg: DpoConfig, *, contexts: int = 1) -> LossFunction:
    """Return the objective of DPO (Rafailov et al. 2023, arXiv 2305.18290, equation 7).

    Each row of a micro-batch consists of complete pairs: document 2i is the chosen answer, document
    2i + 1 the rejected one. All results are sums over pairs. `contexts` is the number of ranks that
    share each sequence (context parallelism): each of them returns its fraction of the sums.
    """

    def losses(output: Output, micro_batch: MicroBatch) -> Output:
        assert micro_batch.doc_ids is not None
        counted_RT = micro_batch.targets != IGNORE_INDEX
        logp_RT = -output.loss
        # The difference of each token, before it is summed: the sums of both models are large and
        # almost equal, so the difference of the sums would lose the digits that matter.
        ratio_RT = torch.where(counted_RT, logp_RT - micro_batch.extra["reference_logprobs"], 0.0)
        ratio_RP2 = _by_pair(ratio_RT, micro_batch.doc_ids)
        counts_RP2 = _by_pair(counted_RT.float(), micro_batch.doc_ids)
        # A pair without targets on one side would divide by zero; `exists` removes it below.
        if cfg.length_normalised:
            ratio_RP2 = ratio_RP2 / counts_RP2.clamp(min=1.0)
        # Rows have fewer than P pairs, and a sample that pads an evaluation has none.
        exists_RP = (counts_RP2 > 0).all(-1)
        margin_RP = cfg.beta * (ratio_RP2[..., 0] - ratio_RP2[..., 1])
        margin_RP = torch.where(exists_RP, margin_RP, 0.0)
        # logsigmoid is stable for large margins, where log(sigmoid) would be log(0).
        loss = torch.where(exists_RP, -F.logsigmoid(margin_RP), 0.0).sum()
        with torch.no_grad():
            accuracy = (margin_RP > 0).float()
            chosen, rejected = _by_pair(logp_RT, micro_batch.doc_ids).sum((0, 1))
            metrics = margin_RP.sum(), accuracy.sum(), chosen, rejected
        # All ranks of a context group compute the same pairs, and their gradients add up.
        share = {name: value / contexts for name, value in zip(METRICS, metrics, strict=True)}
        return Output(loss / contexts, output.aux, output.metrics | share)

    return LossFunction(TOKEN_LOSSES.options, losses)


def _by_pair(values_RT: Tensor, doc_ids_RT: Tensor) -> Tensor:
    """Return the sum of the values of each document, by pair: [R, P, 2]."""
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
