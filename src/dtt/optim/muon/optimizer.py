"""The Muon optimizer: momentum with an orthogonalised update.

Jordan et al. 2024, kellerjordan.github.io/posts/muon; with NorMuon, cautious weight decay and
momentum warm-up.

With several ranks, Muon works as follows:

- One rank orthogonalises each matrix (`optim/muon/redistribution.py`). The assignment is
  greedy: the most expensive matrix first, always to the rank with the least work.
- Momentum is sharded like the weights, and each rank updates its shard. The parts of a matrix go
  to the assigned rank in the compute dtype, and each part is sent from only one replica. The
  update goes back to all ranks that hold a part, and each applies its own part
  (`optim/muon/redistribution.py`). Under DDP every rank holds full matrices, so only updates are
  sent.
- NorMuon needs complete rows and the norm of the complete update. The assigned rank therefore
  also receives the second moments of the rows, and sends back new ones and a factor per row.
- Communication is bucketed: while one bucket is orthogonalised, the parts of the next and the
  updates of the previous one are in flight (`optim/muon/all_to_all.py`).

All ranks derive the same plan from the layout, once. So the result equals that of one process on
every mesh, with uneven and empty shards too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import Any, Literal

import torch
from torch import Tensor

from dtt.config.value_types import parse_decay
from dtt.mesh.dtypes import wide
from dtt.mesh.sharding import TensorLayout, layout_of, world_size, zeros_sharded_as
from dtt.optim.muon.all_to_all import WaitTimer, stagger
from dtt.optim.muon.newton_schulz import orthogonalize
from dtt.optim.muon.redistribution import Bucket, Layouts, ShardBatch, plan
from dtt.optim.rounding import SLOWEST_TO_NEAREST, StochasticRounding

BATCH_ELEMENTS = 2**26
"""Maximum elements updated at once. Bounds the memory of a step: 256 MB per copy in fp32."""

MOMENTUM_START = 0.85
"""Momentum of the first step of a momentum warm-up, as in modded-nanogpt."""

EPS = 1e-10
"""Constant added to norms, so that divisions by the norm of a zero row stay finite."""


class Muon(torch.optim.Optimizer):
    """Muon optimizer for hidden weights [out, in], and stacks [E, out, in] of them.

    Each step updates every matrix; matrices of one shape are batched:

        m = momentum * m + (1 - momentum) * g
        u = orthogonalize(g + momentum * (m - g))        (Nesterov momentum)
        w = w - lr * (scale * u + weight_decay * w)

    `scale` is 0.2 * sqrt(max(out, in)), which matches the RMS of the update to that of AdamW (arXiv
    2502.16982, section 2.2), or sqrt(max(1, out / in)), as in Jordan et al. Cautious decay (arXiv
    2510.12402) skips weights whose magnitude the update increases. NorMuon (arXiv 2510.05491)
    divides each row of u by the root of its running mean square, and rescales u to the norm it had.
    In a group with `split`, each parameter is cut along its rows into matrices with these numbers
    of rows.
    """

    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None
    """0-dim tensor on the device; if 1.0, the step changes nothing, bit for bit, regardless of the
    gradients. Set it before `step`, as with torch's fused optimizers; the host never reads it.
    """

    def __init__(
        self,
        params: Iterable[Any],
        config: Any,
        ns_dtype: torch.dtype,
        rounding: StochasticRounding | None = None,
        layouts: Layouts | None = None,
    ) -> None:
        """Create the optimizer; `params` are parameters or groups, `config` is a `MuonConfig`.

        `ns_dtype` is the compute dtype of Newton-Schulz. With `rounding`, weights are bf16, and
        groups hold the `names` of their parameters. Plain tensors that are not in `layouts` are on
        every rank. Raise ValueError for a parameter that has neither 2 nor 3 dimensions.
        """
        decay = parse_decay(config.weight_decay)
        defaults = {
            "lr": config.lr,
            "weight_decay": None if decay.horizon else decay.value,
            "cautious": decay.cautious,
            "momentum": config.momentum,
            "split": None,
        }
        super().__init__(params, defaults)
        self._ns_dtype, self._rounding = ns_dtype, rounding
        self._scale: Literal["rms", "spectral"] = config.scale
        self._momentum_warmup: int = config.momentum_warmup
        self._normuon_beta2: float | None = config.normuon_beta2
        self._layouts: dict[Tensor, TensorLayout] = {}
        self._buckets: list[Bucket] = []
        self._planned: list[int] = []
        """Ids of the parameters in the buckets: they are planned again when these change."""
        self._wait_timer = WaitTimer()
        self._names: dict[Tensor, str] = {}
        for group in self.param_groups:
            self._names |= zip(group["params"], group.get("names", ()), strict=False)
            for p in group["params"]:
                if p.ndim not in (2, 3):
                    raise ValueError(f"Muon is for matrices, got a parameter of shape {p.shape}")
                given = (layouts or {}).get(p)
                self._layouts[p] = layout_of(p, world_size()) if given is None else given

    @property
    def waited_seconds(self) -> float:
        """Seconds that this rank (on a GPU, its stream) has waited for other ranks, in total."""
        return self._wait_timer.seconds()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. A collective: all ranks call it together."""
        assert closure is None
        groups = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        updated = list(chain(*groups))
        for p in updated:
            # Sharded as the parameter is, in fp32 or bf16 as it is: the state takes no memory of
            # other ranks. One number per row is 1/columns of the size of the momentum.
            state = self.state[p]
            if "momentum" not in state:
                state["momentum"] = zeros_sharded_as(p, p.shape)
            if self._normuon_beta2 is not None and "row_moment" not in state:
                state["row_moment"] = zeros_sharded_as(p, (*p.shape[:-1], 1))
            if self._momentum_warmup and "step" not in state:
                state["step"] = torch.zeros((), device=p.device)
        # Planned once. A parameter may get its first gradient later, or none, and then the buckets
        # change.
        if list(map(id, updated)) != self._planned:
            self._buckets = self._plan(groups)
            self._planned = list(map(id, updated))
        stagger(map(self._update, self._buckets))
        if self._momentum_warmup and updated:
            # Counts are tensors on the device, as a skipped step must not count.
            counts = [self.state[p]["step"] for p in updated]
            done = torch.stack(counts)
            self._write(counts, done, done + 1)

    def _plan(self, groups: Sequence[Sequence[Tensor]]) -> list[Bucket]:
        """Return this rank's side of the update of the parameters in each group."""
        members = zip(groups, (group["split"] for group in self.param_groups), strict=True)
        rows = self._normuon_beta2 is not None
        return plan(members, self._layouts, BATCH_ELEMENTS, self._ns_dtype, rows)

    def _update(self, bucket: Bucket) -> Iterator[None]:
        """Update the matrices of a bucket; yield while messages are in flight.

        Other buckets compute in the meantime.
        """
        # Both collectives start before anything waits, so that they share one latency.
        momenta = bucket.gather.start([self._averaged(batch) for batch in bucket.batches])
        old: list[Tensor] = []  # NorMuon's second moments of rows [N, r, 1]
        if self._normuon_beta2 is not None:
            old = [wide(torch.stack(self._state(batch, "row_moment"))) for batch in bucket.batches]
        moments = bucket.gather_rows.start(old)
        # Without communication there is nothing to overlap, and a yield would only keep more
        # buckets in memory.
        if momenta.work is not None:
            yield
        updates = [
            orthogonalize(matrices, self._ns_dtype) for matrices in momenta.wait(self._wait_timer)
        ]
        normalized = [  # none without NorMuon; no name holds the updates longer than needed
            self._normalized(update, moment)
            for update, moment in zip(updates, moments.wait(self._wait_timer), strict=False)
        ]
        shards = bucket.scatter.start(updates)
        rows = bucket.scatter_rows.start(normalized)
        # Released before the yield: other buckets compute meanwhile, and their peak would add up.
        del momenta, updates, normalized
        if shards.work is not None:
            yield
        for of_batch in zip_longest(
            bucket.batches, shards.wait(self._wait_timer), rows.wait(self._wait_timer)
        ):
            self._apply(*of_batch)

    def _averaged(self, batch: ShardBatch) -> Tensor:
        """Update the momenta of a batch; return the matrices to orthogonalise [N, r, c]."""
        momentum: float = self.param_groups[batch.group]["momentum"]
        decay: float | Tensor = momentum
        if steps := self._momentum_warmup:  # [N, 1, 1], by the steps of each parameter
            done = torch.stack([self.state[shard.parameter]["step"] for shard in batch.shards])
            share = (done / steps).clamp_(max=1.0)[:, None, None]
            decay = MOMENTUM_START + (momentum - MOMENTUM_START) * share
        # Copies the gradients of the batch; `lerp_` below reuses the copy for the result.
        gradients = torch.stack(batch.of(lambda p: p.grad))
        momenta = self._state(batch, "momentum")
        old = torch.stack(momenta)
        if at_random := self._rounds(momentum):
            old, gradients = wide(old), wide(gradients)
        new = torch.lerp(old, gradients, _weight(1 - decay, old))
        self._store(batch, momenta, old, new, " momentum", at_random=at_random)
        # Nesterov: g + momentum * (m - g), in the memory of the gradients.
        return gradients.lerp_(new, _weight(decay, new))

    def _normalized(self, update: Tensor, old: Tensor) -> Tensor:
        """Return NorMuon's new moments and scale factors for the rows of full matrices, [N, R, 2].

        The factors bring all rows to about the same norm and keep the norm of the matrix.
        """
        assert self._normuon_beta2 is not None
        squares = update.to(old.dtype).square().mean(dim=-1, keepdim=True)
        # The assigned rank has complete rows, so the mean square needs no all-reduce.
        new = old.lerp(squares, 1 - self._normuon_beta2)
        factor = 1 / (new.sqrt() + EPS)
        columns = update.size(-1)
        norm, scaled = (
            (columns * x.sum(dim=-2, keepdim=True)).sqrt() for x in (squares, squares * factor**2)
        )
        return torch.cat([new, factor * (norm / (scaled + EPS))], dim=-1)

    def _apply(self, batch: ShardBatch, update: Tensor, rows: Tensor | None) -> None:
        """Apply the update to the shards [N, r, c] of weights that this rank holds."""
        group = self.param_groups[batch.group]
        weights = batch.of(lambda p: p)
        old = torch.stack(weights)
        rounds = self._rounding is not None and self._rounding.weights
        if rounds:
            old = wide(old)  # exact sums: rounding comes last, once
        update = update.to(old.dtype)
        if rows is not None:
            assert self._normuon_beta2 is not None
            moments, new = self._state(batch, "row_moment"), rows[..., :1]
            kept = torch.stack(moments)
            if at_random := self._rounds(self._normuon_beta2):
                kept, new = wide(kept), new.contiguous()
            self._store(batch, moments, kept, new, " row_moment", at_random=at_random)
            update = update * rows[..., 1:]
        decayed = old
        if group["cautious"]:
            # In the mask, not the decay: weights that the update enlarges do not decay in this
            # step.
            decayed = torch.where(update * old >= 0, old, 0.0)
        lr = group["lr"]
        change = update.mul_(-lr * self._factor(*batch.shape))
        change.add_(decayed, alpha=-lr * group["weight_decay"])
        new = change.add_(old)
        # Decided on the device before rounding: a skipped step keeps the bf16 weights bit for bit,
        # as they are exact in fp32.
        self._store(batch, weights, old, new, at_random=rounds)

    def _rounds(self, decay: float) -> bool:
        """Return True if averages of this decay are in bf16 and must be rounded stochastically."""
        return self._rounding is not None and decay > SLOWEST_TO_NEAREST

    def _store(
        self,
        batch: ShardBatch,
        targets: list[Tensor],
        old: Tensor,
        new: Tensor,
        state: str = "",
        *,
        at_random: bool,
    ) -> None:
        """Write weights, or a `state` of them, rounded `at_random`, unless the step is skipped."""
        if self._rounding is None or not at_random:
            self._write(targets, old, new)
            return
        new = self._unless_skipped(old, new)
        # Without the column: ranks that hold parts of one row have the same moment of it.
        last = -1 if state == " row_moment" else None
        for target, value, shard in zip(targets, new, batch.shards, strict=True):
            key = f"{self._names[shard.parameter]}{shard.offset[:last]}{state}"
            self._rounding.write(target, value, key)

    def _state(self, batch: ShardBatch, name: str) -> list[Tensor]:
        """Return views of a state of the shards of a batch."""
        return batch.of(lambda p: self.state[p][name])

    def _factor(self, rows: int, columns: int) -> float:
        match self._scale:
            case "rms":
                return 0.2 * math.sqrt(max(rows, columns))
            case "spectral":
                return math.sqrt(max(1.0, rows / columns))

    def _write(self, targets: list[Tensor], old: Tensor, new: Tensor) -> None:
        """Copy the slices of `new` into `targets`, or those of `old` if this step is skipped."""
        torch._foreach_copy_(targets, list(self._unless_skipped(old, new).unbind()))

    def _unless_skipped(self, old: Tensor, new: Tensor) -> Tensor:
        """Return `new`, or `old` if the step is skipped: decided on the device, without a wait."""
        if self.found_inf is None:
            return new
        # `out=new` needs no further copy of the batch.
        return torch.where(self.found_inf == 1, old, new, out=new)


def _weight(weight: float | Tensor, ends: Tensor) -> float | Tensor:
    """Return `weight` as `lerp` requires it: a tensor must have the dtype of its end points."""
    return weight.to(ends.dtype) if isinstance(weight, Tensor) else weight
