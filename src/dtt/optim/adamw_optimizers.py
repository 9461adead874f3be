"""AdamW with cautious weight decay, and for bf16 weights that are rounded stochastically."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import AdamW, adamw

from dtt.mesh.sharding import local, local_shard
from dtt.optim.rounding import SLOWEST_TO_NEAREST, StochasticRounding


def make_adamw(
    groups: Sequence[dict[str, Any]], rounding: StochasticRounding | None
) -> CautiousAdamW | RoundedAdamW | AdamW:
    """Return the AdamW for parameter groups that carry `names` and, if it is true, `cautious`.

    It is torch's own fused one unless decay is cautious or bf16 is rounded stochastically.
    """
    cautious = [group for group in groups if group.get("cautious")]
    # Rounded to bf16 on its own, a decay of less than 1/512 per step would be lost.
    narrow = any(p.dtype == torch.bfloat16 for group in cautious for p in group["params"])
    slow = max(max(group["betas"]) for group in groups) > SLOWEST_TO_NEAREST
    if narrow or (rounding is not None and (rounding.weights or slow)):
        return RoundedAdamW(groups, rounding)
    return CautiousAdamW(groups, fused=True) if cautious else AdamW(groups, fused=True)


class CautiousAdamW(AdamW):
    """AdamW with cautious weight decay in the groups whose `cautious` is true.

    These decay only weights w with u * w >= 0, where u is the update that is subtracted (Chen et
    al. 2025, arXiv 2510.12402). u has the sign of the new first moment, which is known before the
    step. The decay is therefore applied first, by hand, and torch's fused kernel does the rest. It
    needs one temporary tensor of a parameter's size, and four more passes over the weights.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        cautious = [group for group in self.param_groups if group.get("cautious")]
        decays = [group["weight_decay"] for group in cautious]
        # One parameter at a time: the temporary then has the size of the largest parameter, not of
        # all.
        for group in cautious:
            for p in group["params"]:
                if p.grad is not None:
                    # `self.state` is a defaultdict: reading it would create an entry.
                    mean = self.state[p].get("exp_avg") if p in self.state else None
                    found_inf = getattr(self, "found_inf", None)
                    decay_cautiously(
                        local(p), local(p.grad), mean if mean is None else local(mean), group,
                        found_inf,
                    )  # fmt: skip
            # The kernel must not decay a second time. Restored below for the next step.
            group["weight_decay"] = 0.0
        try:
            super().step()
        finally:
            for group, decay in zip(cautious, decays, strict=True):
                group["weight_decay"] = decay


def decay_cautiously(
    weight: Tensor,
    grad: Tensor,
    mean: Tensor | None,
    group: Mapping[str, Any],
    found_inf: Tensor | None,
) -> None:
    """Multiply the weights that the next step of AdamW moves towards zero by 1 - lr * decay.

    `mean` is the first moment before the step; None before the first one. If `found_inf` is 1.0,
    no bit of `weight` changes.
    """
    beta1, rate = group["betas"][0], group["lr"] * group["weight_decay"]
    # The new first moment. torch's kernel computes it again: it offers no place between moment and
    # update.
    factor = grad.clone() if mean is None else torch.lerp(mean, grad, 1.0 - beta1)
    # In place, [1 where u and w agree in sign, else 0] * -rate: no boolean tensor is created.
    factor.mul_(weight).ge_(0.0).mul_(-rate)
    if found_inf is not None:
        # A device-side zero instead of a branch, which would wait for the device.
        factor.mul_(1.0 - found_inf)
    weight.mul_(factor.add_(1.0))


def fused_step(
    weight: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    step: Tensor,
    group: Mapping[str, Any],
    found_inf: Tensor | None,
) -> None:
    """Update weight, moments and count of steps in place, with the settings of `group`."""
    cautious = group.get("cautious")
    if cautious:
        decay_cautiously(weight, grad, mean, group, found_inf)
    beta1, beta2 = group["betas"]
    adamw(
        [weight],
        [grad],
        [mean],
        [square],
        [],
        [step],
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


class RoundedAdamW(AdamW):
    """AdamW that computes each step in fp32 and stores weights and moments in bf16.

    It runs torch's fused kernel on one parameter at a time. `rounding` says what is rounded
    stochastically: weights, which a step may change by only a thousandth of their size, and moments
    of a slow decay. All else is rounded to nearest, as the kernel itself rounds bf16.
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
            for name, p in zip(group["names"], group["params"], strict=True):
                if p.grad is not None:
                    self._update(name, p, group)

    def _update(self, name: str, p: Tensor, group: dict[str, Any]) -> None:
        """Update this rank's part of one parameter."""
        state = self.state[p]
        if not state:
            # On the device, because the fused kernel reads and advances it there.
            state["step"] = torch.zeros((), device=p.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        assert p.grad is not None
        narrow = [local(t) for t in (p, p.grad, state["exp_avg"], state["exp_avg_sq"])]
        # One parameter in fp32 at a time: 16 bytes per weight of the largest parameter, not of all.
        weight, grad, mean, square = (t.float() for t in narrow)
        found_inf = getattr(self, "found_inf", None)
        # In place on the fp32 copies; the bf16 originals are written below.
        fused_step(weight, grad, mean, square, state["step"], group, found_inf)
        # The offset tells the shards of a parameter apart. Replicas have the same one and draw the
        # same bits.
        self._write(narrow, (weight, mean, square), group, f"{name}{local_shard(p).box.offset}")

    def _write(
        self,
        narrow: Sequence[Tensor],
        exact: tuple[Tensor, Tensor, Tensor],
        group: Mapping[str, Any],
        key: str,
    ) -> None:
        """Round weight, first and second moment into bf16."""
        weight, mean, square = exact
        target, _, target_mean, target_square = narrow
        beta1, beta2 = group["betas"]
        if self._rounding is None:
            torch._foreach_copy_([target, target_mean, target_square], [weight, mean, square])
            return
        moments = (
            (target_mean, mean, beta1, " exp_avg"),
            (target_square, square, beta2, " exp_avg_sq"),
        )
        if self._rounding.weights:
            self._rounding.write(target, weight, key)
        else:
            target.copy_(weight)
        for target, moment, beta, state in moments:
            if beta > SLOWEST_TO_NEAREST:
                self._rounding.write(target, moment, key + state)
            else:
                target.copy_(moment)
