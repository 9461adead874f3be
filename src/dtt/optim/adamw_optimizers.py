"""AdamW with cautious weight decay, and for bf16 weights that are rounded stochastically."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import AdamW, adamw

from dtt.mesh.dtypes import wide
from dtt.mesh.sharding import local, local_shard
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
