"""Log-likelihoods of targets, computed by the head at scored positions only.

Shapes: N tokens, M scored tokens, C candidate targets of a token, D dim, V vocabulary. If P ranks
shard the head's rows, V is the size of this rank's shard.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dtt.base.targets import IGNORE_INDEX
from dtt.mesh.dtypes import wide_dtype
from dtt.model.loss import VocabularyPart

CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 2**28}
"""Logits computed at a time: 32 MB in fp32 on a CPU, 1 GB on a GPU."""


@torch.no_grad()
def target_scores(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_NC: Tensor,
    softcap: float | None = None,
    part: VocabularyPart | None = None,
    *,
    chunk: int | None = None,
) -> Tensor:
    """Return the log-likelihood of each target, and 1 if it is the most likely token, [N, C, 2].

    Targets are ids, or IGNORE_INDEX, whose scores are 0. Tokens without a target cost nothing. Of
    several tokens with the highest logit, the one with the lowest id counts as the most likely one.
    Logits are computed for `chunk` tokens at a time, under autocast in its dtype; everything after
    them is fp32 (fp64 for fp64 inputs). Scores have no gradient. `softcap` and `part` are those of
    `linear_cross_entropy`.
    """
    device = hidden_ND.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    chunk = chunk or max(1, CHUNK_ELEMENTS[device] // weight_VD.shape[0])
    # The number of scored tokens depends on the data, so a GPU synchronises here. That is cheap
    # beside the head: in multiple-choice tasks most tokens are context, whose logits nobody needs.
    scored_M = (targets_NC != IGNORE_INDEX).any(dim=1).nonzero()[:, 0]
    scores_NC2 = hidden_ND.new_zeros((*targets_NC.shape, 2), dtype=wide_dtype(hidden_ND))
    with torch.autocast(device, enabled=False):
        # Once, not in every chunk.
        weight_VD = weight_VD.to(dtype)
        for rows in torch.split(scored_M, chunk):
            logits = hidden_ND[rows].to(dtype) @ weight_VD.T
            scores_NC2[rows] = _scores(logits.to(scores_NC2.dtype), targets_NC[rows], softcap, part)
    return scores_NC2.masked_fill_((targets_NC == IGNORE_INDEX)[..., None], 0.0)


def _scores(
    logits_MV: Tensor, targets_MC: Tensor, softcap: float | None, part: VocabularyPart | None
) -> Tensor:
    """Return the scores [M, C, 2] of the targets of a chunk; overwrite its logits."""
    if softcap is not None:
        logits_MV.div_(softcap).tanh_().mul_(softcap)
    wanted_MC = targets_MC - (0 if part is None else part.first)
    # A target in another shard gets any valid column here, and 0 through the mask below.
    column_MC = wanted_MC.clamp(0, logits_MV.shape[1] - 1)
    here_MC = column_MC == wanted_MC
    logit_MC = logits_MV.gather(1, column_MC).masked_fill_(~here_MC, 0.0)
    largest_M1, most_likely_M1 = logits_MV.max(dim=1, keepdim=True)
    greedy_MC = (here_MC & (column_MC == most_likely_M1)).to(logits_MV.dtype)
    # In place, as the logits are not read again: `gather` and `max` come before.
    lse_M1 = largest_M1 + logits_MV.sub_(largest_M1).exp_().sum(dim=1, keepdim=True).log()
    if part is not None:  # so far, all of these cover only this shard
        each = part.gather(torch.cat((lse_M1, largest_M1, logit_MC, greedy_MC), dim=1))
        C = targets_MC.shape[1]
        lse_P, largest_P, logit_P, greedy_P = torch.split(each, [1, 1, C, C], dim=2)
        lse_M1, logit_MC = lse_P.logsumexp(dim=0), logit_P.sum(dim=0)
        # `max` returns the first of equal values: the lowest shard, and so the lowest id.
        shard_1MC = largest_P.max(dim=0, keepdim=True).indices.expand(-1, -1, C)
        greedy_MC = greedy_P.gather(0, shard_1MC)[0]
    return torch.stack((logit_MC - lse_M1, greedy_MC), dim=-1)
