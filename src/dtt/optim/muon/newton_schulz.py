"""Newton-Schulz iterations for the polar factor U V^T of a matrix U S V^T, without an SVD."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice, repeat
from typing import Literal, assert_never

import torch
from torch import Tensor

Quintic = tuple[float, float, float]
"""Coefficients a, b, c: an iteration maps every singular value s to a s + b s^3 + c s^5."""

CLASSIC: Quintic = (3.4445, -4.7750, 2.0315)
"""Jordan et al. 2024, kellerjordan.github.io/posts/muon: steep at zero, so singular values end
near 1 rather than at 1."""

POLAR_EXPRESS: tuple[Quintic, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
"""Polynomials of Polar Express (Amsel et al. 2025, arXiv 2505.16932, algorithm 1). Each is the best
of its degree on the interval to which the previous ones map singular values of 0.001 to 1. The last
one is repeated."""

SAFETY = 1.01
"""Divisor of singular values before each polynomial but the last, and once more at the start.
Rounding in bf16 must not take them out of the interval for which a polynomial is optimal."""

STEPS = 5
"""Number of iterations of Muon."""

HALVED = 384
"""Minimum number of rows for which `_gram` skips the redundant half of X X^T, on a CPU in fp32.
Newton-Schulz is then at least 15 % faster; in bf16 it would be slower with 768 rows."""


def quintics(kind: Literal["classic", "polar-express"], steps: int) -> tuple[Quintic, ...]:
    """Return the polynomials of `steps` iterations."""
    match kind:
        case "classic":
            return (CLASSIC,) * steps
        case "polar-express":
            first, *middle = (_after_division(q, SAFETY) for q in POLAR_EXPRESS[:-1])
            safe = (_after_division(first, SAFETY), *middle)
            return tuple(islice(chain(safe, repeat(POLAR_EXPRESS[-1])), steps))
        case _:
            assert_never(kind)


def _after_division(quintic: Quintic, divisor: float) -> Quintic:
    """Return the coefficients of the polynomial of s / divisor, as a polynomial of s."""
    a, b, c = quintic
    return a / divisor, b / divisor**3, c / divisor**5


def orthogonalize(matrices: Tensor, polynomials: Sequence[Quintic], dtype: torch.dtype) -> Tensor:
    """Return approximately the nearest semi-orthogonal matrix to each of `matrices` [N, R, C].

    Computes in `dtype`, which is also the dtype of the result. Five polynomials map singular values
    of at least a hundredth of the matrix's norm to [0.68, 1.21] (classic) or [0.86, 1.13] (Polar
    Express).
    """
    # X Xᵀ is [min, min] this way. For an MLP of 4:1, the other side would take ten times the FLOPs
    # and 16 times the memory.
    tall = matrices.size(-2) > matrices.size(-1)
    x = (matrices.mT if tall else matrices).to(dtype)
    # The Frobenius norm bounds the spectral norm, so all singular values start at 1 or below, where
    # the iteration converges. The constant keeps a zero matrix finite.
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    in_halves = x.device.type == "cpu" and dtype == torch.float32 and x.size(-2) >= HALVED
    for a, b, c in polynomials:
        if in_halves:
            gram = _gram(x)
            factor = _gram(gram).mul_(c).add_(gram, alpha=b)
        else:
            gram = x @ x.mT
            # Two products and the sums in one kernel each: b G + c G², then a X + (b G + c G²) X.
            factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, factor, x, beta=a)
    return x.mT if tall else x


def _gram(x: Tensor) -> Tensor:
    """Return X X^T [N, R, R]. Only one of the two off-diagonal blocks is computed.

    The other one is its transpose; the diagonal blocks are computed recursively.
    """
    rows = x.size(-2)
    if rows < HALVED:
        return x @ x.mT
    # The recursion stops at HALVED rows, where copying the blocks costs more than it saves.
    top, bottom = x[:, : rows // 2], x[:, rows // 2 :]
    below = bottom @ top.mT
    halves = [_gram(top), below.mT], [below, _gram(bottom)]
    return torch.cat([torch.cat(half, dim=-1) for half in halves], dim=-2)
