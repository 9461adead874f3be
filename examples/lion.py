"""An optimizer of your own: `dtt train -c examples/lion.yaml`."""

from typing import Any

import torch

import dtt


class Lion(dtt.Optimizer):
    """Lion (Chen et al., arXiv 2302.06675) for all parameters."""

    betas: tuple[float, float] = (0.9, 0.99)
    """Decay of the update, and of the momentum."""

    def build(self, params: dtt.Params, run: dtt.RunFacts) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return _Lion([param.tensor for param in params.values()], self.lr, self.betas)


class _Lion(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            decay, slow = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"], state["step"] = torch.zeros_like(p), 0
                state["step"] += 1
                p.sub_(group["lr"] * torch.lerp(p.grad, state["mean"], decay).sign())
                state["mean"].lerp_(p.grad, 1 - slow)
