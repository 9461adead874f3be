"""Mixture of experts: a router sends each token to some of several MLPs, whose outputs are added.

No token is dropped, and none is padded: the tokens are sorted by expert, and each matrix product
has as many rows as its expert has tokens (Gale et al., 2022, arXiv 2211.15841).

Shapes: B sequences, T tokens, N = B T, E experts, K experts of a token, M = N K rows of experts,
D dim, F width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dtt.mesh.collectives import total
from dtt.mesh.dtypes import wide
from dtt.mesh.sharding import local, local_summand
from dtt.model.architecture import Architecture, ExpertMixture
from dtt.model.linear import Linear, grouped_linear


class RouterLosses(NamedTuple):
    """Coefficients of the auxiliary losses of a router; 0: none."""

    balance: float = 0.0
    """Of the balance loss of each sequence (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20)."""
    z: float = 0.0
    """Of the mean of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, equation 5)."""


class Routing(NamedTuple):
    """The choice of a router."""

    weights_NK: Tensor
    """Weights of the experts of each token in the sum."""
    experts_NK: Tensor
    """Their indices."""
    scores_NE: Tensor
    logits_NE: Tensor


class Router(nn.Module):
    """Choice of the experts of each token, and of their weights in the sum."""

    def __init__(self, arch: Architecture, mixture: ExpertMixture) -> None:
        """Create the weight [E, D] and, where scores are corrected, the bias of the choice [E]."""
        super().__init__()
        self.mixture = mixture
        self.weight = nn.Parameter(torch.empty(mixture.experts, arch.dim))
        # No optimizer trains it: it follows the load of the experts. It changes which experts are
        # chosen, and not their weights (Wang et al., 2024, arXiv 2408.15664).
        self.balance = nn.Parameter(torch.empty(mixture.experts)) if mixture.corrected else None
        self.coefficients = RouterLosses()
        self.group: ProcessGroup | None = None
        """The ranks that share each sequence; None: this one alone."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Convert the parameters, as `Module.to` does, but keep the correction in fp32.

        Its steps of a thousandth would be lost in bf16.
        """
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.balance is not None:
            self.balance.data = wide(self.balance.data)
        return self

    def forward(self, x_ND: Tensor) -> Routing:
        """Return the experts of each token.

        Scores are computed in fp32, as small differences decide which expert is taken: by weights
        that are rounded to the compute dtype first. FSDP2 gathers them so, and an export has them.
        """
        mixture = self.mixture
        kind = x_ND.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_ND.dtype
        weight_ED = local_summand(self.weight).to(dtype)
        with torch.autocast(kind, enabled=False):
            logits_NE = F.linear(wide(x_ND.to(dtype)), wide(weight_ED))
        softmax = mixture.scores == "softmax"
        scores_NE = logits_NE.softmax(-1) if softmax else logits_NE.sigmoid()
        experts_NK = self._best(scores_NE.detach())
        weights_NK = scores_NE.gather(1, experts_NK)
        if mixture.normalise:
            weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + mixture.epsilon)
        return Routing(weights_NK * mixture.scale, experts_NK, scores_NE, logits_NE)

    @torch.no_grad()
    def _best(self, scores_NE: Tensor) -> Tensor:
        """Return the indices of the experts with the highest scores, [N, K]."""
        mixture = self.mixture
        if self.balance is not None:
            scores_NE = scores_NE + self.balance
        if mixture.groups > 1:
            # Only experts of the best groups, by the sum of their two best scores (DeepSeek-V3,
            # arXiv 2412.19437, section 2.1.2): on several nodes a token then travels to few.
            by_group = scores_NE.view(len(scores_NE), mixture.groups, -1)
            best = by_group.topk(2, dim=-1).values.sum(-1).topk(mixture.groups_per_token).indices
            others = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter(1, best, False)
            scores_NE = by_group.masked_fill(others[..., None], -torch.inf).flatten(1)
        return scores_NE.topk(mixture.per_token, dim=-1).indices

    def losses(self, routing: Routing, load_BE: Tensor, counted_BT: Tensor) -> dict[str, Tensor]:
        """Return the auxiliary losses by name, [] each: sums over this rank's counted tokens.

        `load_BE` is the number of this rank's counted tokens of each sequence for each expert.
        """
        losses: dict[str, Tensor] = {}
        if self.coefficients.balance:
            share_NE = routing.scores_NE
            if self.mixture.scores == "sigmoid":
                share_NE = share_NE / share_NE.sum(-1, keepdim=True)
            # Of whole sequences, also where other ranks have some of their tokens. Counts have no
            # gradient, so each rank's part of the loss has that of its tokens.
            load_BE = total(load_BE, self.group)
            tokens_B1 = load_BE.sum(1, keepdim=True).clamp(min=1) / self.mixture.per_token
            of_mean_BE = load_BE * (self.mixture.experts / self.mixture.per_token) / tokens_B1
            counted_BTE = share_NE.view(*counted_BT.shape, -1) * counted_BT[..., None]
            of_sequences = (counted_BTE.sum(1) * of_mean_BE).sum()
            losses["balance_loss"] = self.coefficients.balance * of_sequences
        if self.coefficients.z:
            squares_N = routing.logits_NE.logsumexp(-1).square()
            counted = (squares_N * counted_BT.flatten()).sum()
            losses["router_z_loss"] = self.coefficients.z * counted
        return losses


Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function of rows [M, D], sorted by expert, of their weights [M] and of the number of rows of each
expert: the weighted results [M, D]."""
Exchange = Callable[[Tensor, Tensor, Tensor, Compute], Callable[[], Tensor]]
"""Function that sends what a `Compute` takes to the ranks of the experts; the function that it
returns computes there, and returns the results here."""


class Experts(nn.Module):
    """Stacks of the gated MLPs of all experts."""

    def __init__(self, arch: Architecture, mixture: ExpertMixture) -> None:
        """Create the projections D → F (gate and up) and F → D, [E, out, in] each."""
        super().__init__()
        inwards = mixture.experts, mixture.ffn_dim, arch.dim
        self.gate = nn.Parameter(torch.empty(inwards))
        self.up = nn.Parameter(torch.empty(inwards))
        self.down = nn.Parameter(torch.empty(mixture.experts, arch.dim, mixture.ffn_dim))
        self.experts = mixture.experts
        self.exchange: Exchange | None = None
        """Expert parallelism: computes the rows on the ranks of their experts."""

    def forward(
        self,
        x_ND: Tensor,
        weights_NK: Tensor,
        experts_NK: Tensor,
        shared: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return the weighted sum of the experts of each token, and of the shared one: [N, D]."""
        # Stable, so that an expert sees its tokens in their order on every device. Of 16 bits: a
        # GPU sorts byte by byte, and the 64 of an index would be eight passes in place of two.
        order_M = experts_NK.flatten().to(torch.int16).argsort(stable=True)
        place_M = inverse(order_M)
        counts_E = load(experts_NK[None], self.experts)[0]
        rows_MD = sorted_rows(x_ND, order_M, place_M, experts_NK.shape[1])
        weights_M = sorted_rows(weights_NK.flatten(), order_M, place_M, 1)
        results: Callable[[], Tensor]
        if self.exchange is None:
            results = partial(self.compute, rows_MD, weights_M, counts_E)
        else:
            results = self.exchange(rows_MD, weights_M, counts_E, self.compute)
        # While rows travel, if they do: every rank has the shared expert.
        shared_ND = None if shared is None else shared(x_ND)
        # Back in the order of the tokens, where the outputs of a token are next to each other: the
        # sum has one order. `index_add_` would add in another order each time on a GPU.
        out_ND = summed_rows(results(), place_M, order_M, experts_NK.shape[1])
        return out_ND if shared_ND is None else out_ND + shared_ND

    def compute(self, rows_MD: Tensor, weights_M: Tensor, counts_E: Tensor) -> Tensor:
        """Apply the experts of this rank, each to the next `counts_E[e]` rows: [M, D] → [M, D]."""
        ends_E = counts_E.cumsum(0).to(torch.int32)
        # Two products. One, with joined weights, would read the rows once, but the weights twice
        # more: autograd would keep the joined copy, also where FSDP2 frees what it has gathered
        # (benchmarks/log.md, "Mixtures of experts").
        gate_MF = grouped_linear(rows_MD, local(self.gate), ends_E)
        up_MF = grouped_linear(rows_MD, local(self.up), ends_E)
        # Weighted before the last product: the gradient of the weights then needs none of its
        # outputs, which are K times as large as the hidden states.
        hidden_MF = F.silu(gate_MF) * up_MF * weights_M[:, None].to(up_MF.dtype)
        return grouped_linear(hidden_MF, local(self.down), ends_E)


class Mixed(NamedTuple):
    """Output of a mixture, auxiliary losses and load."""

    out: Tensor
    """[B, T, D]."""
    aux: dict[str, Tensor]
    """Auxiliary losses by name, [] each: sums over this rank's counted tokens."""
    load: Tensor | None
    """Number of this rank's counted tokens for each expert, [E] int64; None if none are counted."""


class MixtureMLP(nn.Module):
    """MLP of a mixture of experts, and of the shared expert that all tokens pass, if any."""

    def __init__(self, arch: Architecture, mixture: ExpertMixture) -> None:
        """Create router, experts and shared expert."""
        super().__init__()
        self.router = Router(arch, mixture)
        self.experts = Experts(arch, mixture)
        self.shared = SharedExpert(arch.dim, mixture.shared_dim) if mixture.shared_dim else None

    def forward(self, x_BTD: Tensor, counted_BT: Tensor | None) -> Mixed:
        """Apply the MLP; `counted_BT` bool are the tokens of the load and auxiliary losses."""
        x_ND = x_BTD.flatten(0, 1)
        routing = self.router(x_ND)
        aux: dict[str, Tensor] = {}
        load_E = None
        if counted_BT is not None:
            experts_BTK = routing.experts_NK.view(*counted_BT.shape, -1)
            load_BE = load(experts_BTK, self.router.mixture.experts, counted_BT)
            aux, load_E = self.router.losses(routing, load_BE, counted_BT), load_BE.sum(0)
        out_ND = self.experts(x_ND, routing.weights_NK, routing.experts_NK, self.shared)
        return Mixed(out_ND.view_as(x_BTD), aux, load_E)


class SharedExpert(nn.Module):
    """Gated MLP that every token passes."""

    def __init__(self, dim: int, width: int) -> None:
        """Create the projections."""
        super().__init__()
        self.gate = Linear(dim, width, bias=False)
        self.up = Linear(dim, width, bias=False)
        self.down = Linear(width, dim, bias=False)

    def forward(self, x_ND: Tensor) -> Tensor:
        """Apply the MLP: [N, D] → [N, D]."""
        # Not by calling the layers: under tensor parallelism each rank has some tokens and all of
        # the weights.
        gate, up, down = (local_summand(p.weight) for p in (self.gate, self.up, self.down))
        return F.linear(F.silu(F.linear(x_ND, gate)) * F.linear(x_ND, up), down)


def routers(model: nn.Module) -> dict[int, Router]:
    """Return the routers of a Decoder (`model.layers`) that this rank has, by layer."""
    layers = enumerate(getattr(model, "layers", ()))
    mlps = ((i, getattr(layer, "mlp", None)) for i, layer in layers)
    return {i: mlp.router for i, mlp in mlps if isinstance(mlp, MixtureMLP)}


def load(experts_BTK: Tensor, experts: int, counted_BT: Tensor | None = None) -> Tensor:
    """Return the number of counted tokens of each sequence for each of `experts`, [B, E] int64."""
    chosen_BM = experts_BTK.flatten(1)
    # Integers, so that no order of adding changes them. `bincount` would wait for a GPU.
    zeros_BE = chosen_BM.new_zeros(len(chosen_BM), experts)
    if counted_BT is None:
        return zeros_BE.scatter_add(1, chosen_BM, torch.ones_like(chosen_BM))
    counted_BM = counted_BT[..., None].expand_as(experts_BTK).flatten(1)
    return zeros_BE.scatter_add(1, chosen_BM, counted_BM.to(chosen_BM.dtype))


def inverse(order_M: Tensor) -> Tensor:
    """Return the inverse of a permutation."""
    rows = torch.arange(len(order_M), device=order_M.device)
    return torch.empty_like(order_M).scatter_(0, order_M, rows)


# Rows that are copied and summed in a known order, which autograd does not know: the backward pass
# of `x[order]` would add rows to zeros one by one, on a GPU in any order. Each of the two is the
# other's backward pass, and none materialises an expanded gradient. Inductor reads the K rows of a
# token inside the kernel of their sum. On a CPU `index_select` copies whole rows, four times as
# fast as indexing.
class _Sorted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_M: Tensor, place_M: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(place_M)
        ctx.k = k
        return _copied(x_ND, order_M, k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (place_M,) = ctx.saved_tensors
        return _added(grads[0], place_M, ctx.k), None, None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, place_M: Tensor, order_M: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order_M)
        ctx.k = k
        return _added(rows_MD, place_M, k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (order_M,) = ctx.saved_tensors
        return _copied(grads[0], order_M, ctx.k), None, None, None


def _copied(x_ND: Tensor, order_M: Tensor, k: int) -> Tensor:
    return x_ND.index_select(0, order_M if k == 1 else order_M // k)


def _added(rows_MD: Tensor, place_M: Tensor, k: int) -> Tensor:
    rows_MD = rows_MD.index_select(0, place_M)
    return rows_MD if k == 1 else rows_MD.view(-1, k, rows_MD.shape[-1]).sum(1)


sorted_rows: Callable[[Tensor, Tensor, Tensor, int], Tensor] = _Sorted.apply
"""Return the rows [M, D] in the order of `order`, of which k in a row are one of [M / k, D]; the
third argument is the inverse of the permutation."""
summed_rows: Callable[[Tensor, Tensor, Tensor, int], Tensor] = _Summed.apply
"""Return the sums [M / k, D] of k consecutive ones of the rows in the order of the second argument;
the third is the inverse of the permutation."""
