"""AdamW with moments of 8 bits: block-wise dynamic quantisation (Dettmers et al., 2110.02861).

Blocks are cut from the rows of a whole parameter, not from the shard of a rank, so that codes and
scales are the same on any layout. (torchao's and bitsandbytes' cut the flattened shard: their state
only fits the layout that wrote it.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from dtt.mesh.dtypes import wide, wide_dtype
from dtt.mesh.sharding import local, local_shard, zeros_sharded_as
from dtt.optim.adamw_optimizers import ExactAdamW, fused_step
from dtt.optim.eight_bit import BLOCK, blocks_of
from dtt.optim.rounding import StochasticRounding

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
