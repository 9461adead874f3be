"""AdamW for bf16 weights, which are rounded stochastically."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import AdamW, adamw

from dtt.optim.rounding import StochasticRounding
from dtt.runtime.sharding import local, local_shard


class RoundedAdamW(AdamW):
    """AdamW that computes each step in fp32 and stores weights and moments in bf16.

    It runs torch's fused kernel on one parameter at a time. Weights are rounded stochastically,
    moments to nearest: a step moves a moment by about a twentieth of its distance to the new value,
    which bf16 can represent, while it may change a weight by only a thousandth of its size.
    """

    def __init__(self, params: Iterable[Any], rounding: StochasticRounding) -> None:
        """Create the optimizer; `params` are groups that carry the `names` of their parameters."""
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
            state["step"] = torch.zeros((), device=p.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        assert p.grad is not None
        narrow = [local(t) for t in (p, p.grad, state["exp_avg"], state["exp_avg_sq"])]
        weight, grad, mean, square = (t.float() for t in narrow)
        beta1, beta2 = group["betas"]
        adamw(
            [weight],
            [grad],
            [mean],
            [square],
            [],
            [state["step"]],
            fused=True,
            found_inf=getattr(self, "found_inf", None),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        self._rounding.write(narrow[0], weight, f"{name}{local_shard(p).box.offset}")
        narrow[2].copy_(mean)
        narrow[3].copy_(square)
