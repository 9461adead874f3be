"""An optimizer whose state has matrices: `dtt train -c examples/kronecker.yaml`."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

import dtt


class Kronecker(dtt.Optimizer):
    """Gradients that the second moment of their rows preconditions, as Shampoo's left factor."""

    # Each rank has these matrices whole: they are not of the shape of their parameter.
    whole_state = frozenset({"rows"})

    def build(self, params: dtt.Params, run: dtt.RunFacts) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return _Kronecker([param.tensor for param in params.values()], {"lr": self.lr})


class _Kronecker(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                update = p.grad.sign()
                if p.ndim == 2:
                    # With FSDP2, a parameter is a DTensor, of which this rank has some rows.
                    sharded = isinstance(p, DTensor)
                    grad = p.grad.full_tensor() if sharded else p.grad
                    rows = grad @ grad.T
                    state = self.state[p]
                    state["rows"] = rows + state["rows"] if state else rows
                    update = grad / (state["rows"].diagonal().sqrt() + 1e-8)[:, None]
                    if sharded:
                        update = distribute_tensor(update, p.device_mesh, p.placements)
                p.sub_(group["lr"] * update)
