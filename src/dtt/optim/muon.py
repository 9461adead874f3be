"""Muon: momentum whose update is orthogonalised (Jordan et al. 2024,
kellerjordan.github.io/posts/muon), with what has been added to it since."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtt.config.optim import MuonConfig
from dtt.optim.newton_schulz import orthogonalize, quintics

BATCH_ELEMENTS = 2**26
"""Numbers updated at once, which bounds the memory of a step: 256 MB a copy in fp32."""

EPS = 1e-10
"""Keeps divisions by the norm of a zero row finite."""


class Matrix(NamedTuple):
    """One matrix [R, C] of a parameter, and its state: views."""

    weight: Tensor
    gradient: Tensor
    momentum: Tensor
    row_moment: Tensor | None
    """[R, 1], with NorMuon."""
    step: Tensor | None
    """That of the whole parameter, when momentum warms up."""


class Muon(torch.optim.Optimizer):
    """For hidden weights [out, in], and stacks [E, out, in] of them.

    Each step, for each matrix, those of one shape in one batch:

        m = momentum * m + (1 - momentum) * g
        u = orthogonalize(g + momentum * (m - g)), or of m without Nesterov
        w = w - lr * (scale * u + weight_decay * w)

    `scale` is 0.2 * sqrt(max(out, in)), which gives the step the root mean square of AdamW's
    (arXiv 2502.16982, section 2.2), or sqrt(max(1, out / in)), as Jordan et al. have it. Cautious
    decay (arXiv 2510.12402) spares weights that the step makes larger. NorMuon (arXiv 2510.05491)
    divides each row of u by the root of its mean square over the steps, and keeps the norm of u.
    The rows of a group with `split` are cut into matrices of so many each.
    """

    found_inf: Tensor | None = None
    """0-dim; 1.0: the step changes nothing, bit for bit, whatever the gradients are. As with
    torch's fused optimizers, it is set before `step`, and the host never looks at it."""

    def __init__(self, params: Iterable[Any], config: MuonConfig, ns_dtype: torch.dtype) -> None:
        """`params` are parameters or groups; `ns_dtype` is what Newton-Schulz computes in."""
        defaults = {
            "lr": config.lr,
            "weight_decay": config.weight_decay,
            "momentum": config.momentum,
            "split": None,
        }
        super().__init__(params, defaults)
        self._config, self._ns_dtype = config, ns_dtype
        self._polynomials = quintics(config.ns_coefficients, config.ns_steps)
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim not in (2, 3):
                    raise ValueError(f"Muon is for matrices, got a parameter of shape {p.shape}")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            by_shape: dict[torch.Size, list[Matrix]] = defaultdict(list)
            for p in params:
                for matrix in self._matrices(p, group["split"]):
                    by_shape[matrix.weight.shape].append(matrix)
            for shape, matrices in by_shape.items():
                at_once = max(1, BATCH_ELEMENTS // shape.numel())
                for start in range(0, len(matrices), at_once):
                    self._update(matrices[start : start + at_once], group)
            if params and self._config.momentum_warmup:
                counts = [self.state[p]["step"] for p in params]
                done = torch.stack(counts)
                self._write(counts, done, done + 1)

    def _matrices(self, p: Tensor, split: Sequence[int] | None) -> list[Matrix]:
        """The matrices of a parameter; makes the state that it lacks."""
        assert p.grad is not None
        config, state = self._config, self.state[p]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        if config.normuon_beta2 is not None and "row_moment" not in state:
            state["row_moment"] = torch.zeros_like(p[..., :1])
        if config.momentum_warmup and "step" not in state:
            state["step"] = torch.zeros((), device=p.device)
        row_moment, step = state.get("row_moment"), state.get("step")
        cut = [pieces(tensor, split) for tensor in (p, p.grad, state["momentum"])]
        rows = repeat(None) if row_moment is None else pieces(row_moment, split)
        return [Matrix(w, g, m, r, step) for w, g, m, r in zip(*cut, rows, strict=False)]

    def _update(self, matrices: Sequence[Matrix], group: Mapping[str, Any]) -> None:
        """Step matrices of one shape."""
        averaged = self._averaged(matrices, group["momentum"])
        update = orthogonalize(averaged, self._polynomials, self._ns_dtype)
        weights = [matrix.weight for matrix in matrices]
        old = torch.stack(weights)
        update = update.to(old.dtype)
        if self._config.normuon_beta2 is not None:
            update = self._normalized(matrices, update, self._config.normuon_beta2)
        decayed = old
        if self._config.cautious_weight_decay:
            decayed = torch.where(update * old >= 0, old, 0.0)
        lr = group["lr"]
        change = update.mul_(-lr * self._scale(*old.shape[1:]))
        change.add_(decayed, alpha=-lr * group["weight_decay"])
        self._write(weights, old, change.add_(old))

    def _averaged(self, matrices: Sequence[Matrix], momentum: float) -> Tensor:
        """Advance the momenta; returns what is to be orthogonalised [N, R, C]."""
        decay = self._warmed_up(matrices, momentum)
        gradients = torch.stack([matrix.gradient for matrix in matrices])
        momenta = [matrix.momentum for matrix in matrices]
        old = torch.stack(momenta)
        new = torch.lerp(old, gradients, 1 - decay)
        self._write(momenta, old, new)
        return gradients.lerp_(new, decay) if self._config.nesterov else new

    def _warmed_up(self, matrices: Sequence[Matrix], momentum: float) -> float | Tensor:
        """The momentum of this step; [N, 1, 1] if it depends on the steps that each has done."""
        start, steps = self._config.momentum_start, self._config.momentum_warmup
        if steps == 0:
            return momentum
        done = torch.stack([matrix.step for matrix in matrices if matrix.step is not None])
        return start + (momentum - start) * (done / steps).clamp_(max=1.0)[:, None, None]

    def _normalized(self, matrices: Sequence[Matrix], update: Tensor, beta2: float) -> Tensor:
        """NorMuon: `update` [N, R, C] with rows of about one norm, and with the norm it had."""
        moments = [matrix.row_moment for matrix in matrices if matrix.row_moment is not None]
        old = torch.stack(moments)
        new = old.lerp(update.square().mean(dim=-1, keepdim=True), 1 - beta2)
        self._write(moments, old, new)
        divided = update / (new.sqrt() + EPS)
        norm, divided_norm = (u.norm(dim=(-2, -1), keepdim=True) for u in (update, divided))
        normalized: Tensor = divided * (norm / (divided_norm + EPS))
        return normalized

    def _scale(self, rows: int, columns: int) -> float:
        match self._config.scale:
            case "rms":
                return 0.2 * math.sqrt(max(rows, columns))
            case "spectral":
                return math.sqrt(max(1.0, rows / columns))

    def _write(self, targets: list[Tensor], old: Tensor, new: Tensor) -> None:
        """Put the slices of `new` into `targets`, or those of `old` if this step is skipped."""
        if self.found_inf is not None:
            torch.where(self.found_inf == 1, old, new, out=new)
        torch._foreach_copy_(targets, list(new.unbind()))


def pieces(tensor: Tensor, split: Sequence[int] | None) -> list[Tensor]:
    """Views of the matrices in `tensor` [R, C] or [E, R, C], R cut into parts as `split` says."""
    parts = [tensor] if split is None else torch.split(tensor, list(split), dim=-2)
    return [m for part in parts for m in (part.unbind() if part.ndim == 3 else [part])]
