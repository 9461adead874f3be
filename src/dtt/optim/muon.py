"""Muon: momentum whose update is orthogonalised (Jordan et al. 2024,
kellerjordan.github.io/posts/muon)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

# The quintic of Jordan et al.: steep at zero, so singular values land near 1 rather than on it.
A, B, C = 3.4445, -4.7750, 2.0315

BATCH_ELEMENTS = 2**27
"""Numbers orthogonalised at once, which bounds the memory of a step: 512 MB a copy in fp32."""


def orthogonalize(matrices: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """The nearest semi-orthogonal matrix of each of `matrices` [N, R, C], about: U V^T of U S V^T.

    Newton-Schulz iterations in `dtype`; singular values end in about [0.7, 1.2]. Returns `dtype`.
    """
    tall = matrices.size(-2) > matrices.size(-1)
    x = (matrices.mT if tall else matrices).to(dtype)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """For two-dimensional hidden weights [out, in]; matrices of one shape are updated in one batch.

    Each step: m = momentum * m + (1 - momentum) * g; u = orthogonalize(g + momentum * (m - g)),
    or of m without Nesterov; w = (1 - lr * weight_decay) * w - lr * 0.2 * sqrt(max(out, in)) * u,
    which gives the step the root mean square of AdamW's (arXiv 2502.16982, section 2.2).
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        momentum: float,
        nesterov: bool,
        ns_steps: int,
        weight_decay: float,
        ns_dtype: torch.dtype,
    ) -> None:
        """`params` are parameters or groups; `ns_dtype` is what Newton-Schulz computes in."""
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._momentum, self._nesterov = momentum, nesterov
        self._ns_steps, self._ns_dtype = ns_steps, ns_dtype
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim != 2:
                    raise ValueError(f"Muon is for matrices, got a parameter of shape {p.shape}")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
            for shape, params in by_shape.items():
                at_once = max(1, BATCH_ELEMENTS // shape.numel())
                for start in range(0, len(params), at_once):
                    self._update(
                        params[start : start + at_once], group["lr"], group["weight_decay"]
                    )

    def _update(self, params: list[Tensor], lr: float, weight_decay: float) -> None:
        """Step parameters of one shape."""
        update = orthogonalize(self._averaged(params), self._ns_steps, self._ns_dtype)
        torch._foreach_mul_(params, 1 - lr * weight_decay)
        scale = 0.2 * max(params[0].shape) ** 0.5
        updates = list(update.to(params[0].dtype).unbind())
        torch._foreach_add_(params, updates, alpha=-lr * scale)

    def _averaged(self, params: list[Tensor]) -> Tensor:
        """Advance the momenta of `params`; returns what is to be orthogonalised, stacked."""
        gradients = [p.grad for p in params if p.grad is not None]
        momenta = []
        for p in params:
            state = self.state[p]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(p)
            momenta.append(state["momentum"])
        torch._foreach_lerp_(momenta, gradients, 1 - self._momentum)
        if self._nesterov:
            return torch.stack(gradients).lerp_(torch.stack(momenta), self._momentum)
        return torch.stack(momenta)
