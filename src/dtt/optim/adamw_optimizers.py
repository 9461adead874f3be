"""AdamW with cautious weight decay, with weights rounded stochastically, or moments of 8 bits.

8 bits are block-wise dynamic quantisation (Dettmers et al., 2110.02861). Blocks are cut from the
rows of a whole parameter, not from the shard of a rank, so that codes and scales are the same on
any layout. (torchao's and bitsandbytes' cut the flattened shard: their state only fits the layout
that wrote it.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from torch.optim.adamw import AdamW, adamw

from dtt.mesh.dtypes import wide, wide_dtype
from dtt.mesh.sharding import local, local_shard, zeros_sharded_as
from dtt.optim.eight_bit import BLOCK, blocks_of
from dtt.optim.rounding import SLOWEST_TO_NEAREST, StochasticRounding


def make_adamw(groups: Sequence[dict[str, Any]], rounding: StochasticRounding | None) -> AdamW:
    """Return the AdamW for parameter groups that carry `names` and, if it is true, `cautious`.

    It is torch's own fused one unless decay is cautious or bf16 is rounded stochastically.
    """
    cautious = any(group.get("cautious") for group in groups)
    slow = max(max(group["betas"]) for group in groups) > SLOWEST_TO_NEAREST
    if cautious or (rounding is not None and (rounding.weights or slow)):
        return ExactAdamW(groups, rounding)
    return AdamW(groups, fused=True)


def decay_cautiously(
    weight: Tensor,
    grad: Tensor,
    mean: Tensor,
    group: Mapping[str, Any],
    found_inf: Tensor | None,
) -> None:
    """Multiply the weights that the next step of AdamW moves towards zero by 1 - lr * decay.

    These are weights w with u * w >= 0, where u is the update that is subtracted (Chen et al. 2025,
    arXiv 2510.12402). It has the sign of the new first moment; `mean` is the one before the step.
    If `found_inf` is 1.0, no bit of `weight` changes. It takes a temporary tensor of the size of
    the weights, and four passes over them.
    """
    beta1, rate = group["betas"][0], group["lr"] * group["weight_decay"]
    # The new first moment. torch's kernel computes it again: it offers no place between moment and
    # update.
    factor = torch.lerp(mean, grad, 1.0 - beta1)
    # In place, [1 where u and w agree in sign, else 0] * -rate: no boolean tensor is created.
    factor.mul_(weight).ge_(0.0).mul_(-rate)
    if found_inf is not None:
        # A device-side zero instead of a branch, which would wait for the device.
        factor.mul_(1.0 - found_inf)
    weight.mul_(factor.add_(1.0))


def fused_step(
    weights: list[Tensor],
    grads: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
    group: Mapping[str, Any],
    found_inf: Tensor | None,
) -> None:
    """Update weights, moments and counts of steps in place, with the settings of `group`."""
    cautious = group.get("cautious")
    if cautious:
        for weight, grad, mean in zip(weights, grads, means, strict=True):
            decay_cautiously(weight, grad, mean, group, found_inf)
    beta1, beta2 = group["betas"]
    adamw(
        weights,
        grads,
        means,
        squares,
        [],
        steps,
        fused=True,
        found_inf=found_inf,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=0.0 if cautious else group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


class ExactAdamW(AdamW):
    """AdamW that computes each step in fp32, and stores weights and moments in their dtype.

    `rounding` says which numbers in bf16 are rounded stochastically: weights, which a step may
    change by only a thousandth of their size, and moments of a slow decay. All else is rounded to
    nearest, as torch's kernel itself rounds bf16. Rounded to bf16 on its own, a cautious decay of
    less than 1/512 per step would be lost.
    """

    def __init__(self, params: Iterable[Any], rounding: StochasticRounding | None) -> None:
        """Create the optimizer; `params` are groups that carry the `names` of their parameters.

        Groups may decay cautiously.
        """
        super().__init__(params, fused=True)
        self._rounding = rounding

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            named = zip(group["names"], group["params"], strict=True)
            held = [(name, p) for name, p in named if p.grad is not None]
            if all(wide(p) is p for _, p in held):
                # One call for the group: each costs 50 microseconds of the host's time.
                self._update(held, group)
            else:
                # One parameter in fp32 at a time: 16 bytes per weight of the largest, not of all.
                for one in held:
                    self._update([one], group)

    def _update(self, held: Sequence[tuple[str, Tensor]], group: Mapping[str, Any]) -> None:
        """Update this rank's part of some parameters."""
        kept: list[list[Tensor]] = []
        grads, steps = [], []
        for _, p in held:
            state = self.state[p]
            if not state:
                # On the device, because the fused kernel reads and advances it there.
                state["step"] = torch.zeros((), device=p.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            assert p.grad is not None
            kept.append([local(t) for t in (p, state["exp_avg"], state["exp_avg_sq"])])
            grads.append(wide(local(p.grad)))
            steps.append(state["step"])
        exact = [[wide(tensor) for tensor in tensors] for tensors in kept]
        weights, means, squares = ([one[i] for one in exact] for i in range(3))
        # In place, on fp32 copies of bf16; the originals are written below.
        fused_step(weights, grads, means, squares, steps, group, getattr(self, "found_inf", None))
        for (name, p), targets, values in zip(held, kept, exact, strict=True):
            if values[0] is not targets[0]:
                self._write(name, p, group, targets, values)

    def _write(
        self,
        name: str,
        p: Tensor,
        group: Mapping[str, Any],
        targets: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> None:
        """Round weight, first and second moment of a parameter into bf16."""
        # The offset tells the shards of a parameter apart. Replicas have the same one and draw the
        # same bits.
        key, rounding = f"{name}{local_shard(p).box.offset}", self._rounding
        slow = [beta > SLOWEST_TO_NEAREST for beta in group["betas"]]
        stochastic = [rounding is not None and rounding.weights, *slow]
        suffixes = "", " exp_avg", " exp_avg_sq"
        for target, value, suffix, at_random in zip(
            targets, values, suffixes, stochastic, strict=True
        ):
            if rounding is not None and at_random:
                rounding.write(target, value, key + suffix)
            else:
                target.copy_(value)


# ---- moments of 8 bits ---------------------------------------------------------------------------

CHUNK = 2**24
"""Weights that are updated at a time. It bounds the fp32 copies: those of a head of 128,256 x 4,096
would take 12 GB, more than the quantisation saves there."""
SIGNED = {"exp_avg": True, "exp_avg_sq": False}
"""The moments, and True if they have signs."""
SCALE = "_scale"
"""What follows the name of a moment in that of its scales."""


def code_book(*, signed: bool) -> Tensor:
    """Return the 256 numbers of a dynamic code, ascending, in fp64 on the CPU.

    They are 0, 1 and, for each power of ten from 1e-6 to 1, the midpoints of equal parts of a tenth
    of it to all of it: the larger the power, the more parts.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        parts = 2**exponent if signed else 2 ** (exponent + 1)
        for i in range(parts):
            value = 10.0 ** (exponent - 6) * (0.1 + 0.9 * (i + 0.5) / parts)
            values += [value, -value] if signed else [value]
    return torch.tensor(sorted(values), dtype=torch.float64, device="cpu")


class Quantiser:
    """Conversion of tensors to codes and scales and back, for one kind of moment."""

    def __init__(self, dtype: torch.dtype, device: torch.device, *, signed: bool) -> None:
        """Make the tables; `dtype` is that of scales and of restored numbers."""
        book = code_book(signed=signed)
        self._book = book.to(device, dtype)
        self._bounds = ((book[1:] + book[:-1]) / 2).to(device, dtype)
        # A second moment of 0 beside a first moment that is not 0 would make an update of
        # exp_avg / eps. The smallest code is 3e-7 of the block's maximum: the update shrinks.
        self._least = 0 if signed else 1

    def restore(self, codes: Tensor, scale: Tensor, column: int = 0) -> Tensor:
        """Return the numbers of `codes` [..., n], whose first one is in the row's `column`.

        `scale` [..., blocks] are those of complete rows.
        """
        numbers = self._book.index_select(0, codes.flatten().int()).view(codes.shape)
        return numbers.mul_(spread(scale, column, codes.shape[-1]))

    def codes(self, values: Tensor, scale: Tensor, column: int = 0) -> Tensor:
        """Return the nearest codes of `values` [..., n], which it overwrites."""
        # A block of zeros has the scale 0.
        values.div_(spread(torch.where(scale == 0, 1.0, scale), column, values.shape[-1]))
        found = torch.bucketize(values, self._bounds, out_int32=True)
        return found.to(torch.uint8).clamp_(min=self._least)


def spread(scale: Tensor, column: int, n: int) -> Tensor:
    """Return the scale of each of `n` columns from `column` on: [..., blocks] -> [..., n]."""
    columns = torch.arange(column, column + n, device=scale.device)
    return scale.index_select(-1, columns.div_(BLOCK, rounding_mode="floor"))


def maxima(values: Tensor, column: int, blocks: int) -> Tensor:
    """Return the largest magnitude of each block of a row: [..., n] -> [..., blocks].

    Blocks of which `values` has no column have 0.
    """
    first, before = divmod(column, BLOCK)
    after = -(before + values.shape[-1]) % BLOCK
    sizes = values.abs()
    if before or after:  # a pass over memory
        sizes = pad(sizes, (before, after))
    # Not -1 for their number: a rank may have no rows.
    largest = sizes.view(*sizes.shape[:-1], sizes.shape[-1] // BLOCK, BLOCK).amax(-1)
    return pad(largest, (first, blocks - first - largest.shape[-1]))


class AdamW8bit(ExactAdamW):
    """AdamW that keeps codes of its moments, and computes each step in fp32.

    The update has the moments before they are rounded; the weights are rounded stochastically if
    `rounding` says so.
    """

    def __init__(self, params: Iterable[Any], rounding: StochasticRounding | None) -> None:
        """Create the optimizer; `params` are groups that carry the `names` of their parameters."""
        super().__init__(params, rounding)
        self._quantisers: dict[str, Quantiser] = {}

    def empty_state(self, p: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter before the first step, sharded as it is."""
        state = {"step": torch.zeros((), device=p.device)}
        scales = (*p.shape[:-1], blocks_of(p.shape))
        for moment in SIGNED:
            state[moment] = zeros_sharded_as(p, p.shape, dtype=torch.uint8)
            state[moment + SCALE] = zeros_sharded_as(p, scales, dtype=wide_dtype(p))
        return state

    def _update(self, held: Sequence[tuple[str, Tensor]], group: Mapping[str, Any]) -> None:
        """Update this rank's part of some parameters.

        A collective of the ranks that share rows, as tensor parallelism cuts `o` and `down`.
        """
        for name, p in held:
            self._update_one(name, p, group)

    def _update_one(self, name: str, p: Tensor, group: Mapping[str, Any]) -> None:
        """Update this rank's part of one parameter, some rows at a time."""
        if not self.state[p]:
            self.state[p].update(self.empty_state(p))
        assert p.grad is not None
        state, offset = self.state[p], local_shard(p).box.offset
        parts = [local(t) for t in (p, p.grad, *(state[k] for k in state if k != "step"))]
        rows = max(1, CHUNK // max(1, parts[0].shape[1:].numel()))
        step = state["step"]
        chunks = (torch.split(part, rows) for part in parts)
        for i, chunk in enumerate(zip(*chunks, strict=True)):
            # The kernel counts a step for each chunk.
            step = state["step"].clone()
            # The offset tells the shards of a parameter apart. Replicas have the same one and draw
            # the same bits.
            key = f"{name}{(offset[0] + i * rows, *offset[1:])}"
            self._update_rows(chunk, step, group, offset[-1], row_groups(p), key)
        state["step"].copy_(step)

    def _update_rows(
        self,
        parts: Sequence[Tensor],
        step: Tensor,
        group: Mapping[str, Any],
        column: int,
        row_groups: Sequence[dist.ProcessGroup],
        key: str,
    ) -> None:
        """Update rows of weights; `parts` are weights, gradients, and codes and scales."""
        target, grad, *kept = parts
        weight, found_inf = wide(target), getattr(self, "found_inf", None)
        moments = [
            self._quantiser(moment, weight).restore(codes, scale, column)
            for moment, codes, scale in zip(SIGNED, kept[::2], kept[1::2], strict=True)
        ]
        first, second = moments
        fused_step([weight], [wide(grad)], [first], [second], [step], group, found_inf)
        if weight is not target:
            if self._rounding is not None and self._rounding.weights:
                self._rounding.write(target, weight, key)
            else:
                target.copy_(weight)
        scales = torch.stack([maxima(moment, column, kept[1].shape[-1]) for moment in moments])
        # The maximum is exact in any order, and so the same however the columns are sharded.
        for ranks in row_groups:
            dist.all_reduce(scales, dist.ReduceOp.MAX, group=ranks)
        for i, (moment, values) in enumerate(zip(SIGNED, moments, strict=True)):
            new = self._quantiser(moment, weight).codes(values, scales[i], column), scales[i]
            for old, one in zip(kept[2 * i : 2 * i + 2], new, strict=True):
                # The book has no -1, so that codes of restored numbers may be other ones: a skipped
                # step keeps the old ones, which the device decides.
                old.copy_(one if found_inf is None else torch.where(found_inf > 0, old, one))

    def _quantiser(self, moment: str, like: Tensor) -> Quantiser:
        """Return the quantiser of a moment; all parameters have one dtype and one device."""
        if moment not in self._quantisers:
            made = Quantiser(like.dtype, like.device, signed=SIGNED[moment])
            self._quantisers[moment] = made
        return self._quantisers[moment]


def row_groups(p: Tensor) -> list[dist.ProcessGroup]:
    """Return the groups of ranks that have different columns of the same rows as this one."""
    if not isinstance(p, DTensor):
        return []
    placements: Sequence[Any] = p.placements
    return [
        p.device_mesh.get_group(i)
        for i, placement in enumerate(placements)
        if not placement.is_replicate() and placement.dim == p.ndim - 1
    ]
