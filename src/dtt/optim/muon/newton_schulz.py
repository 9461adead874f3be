"""Newton-Schulz iterations for the polar factor U V^T of a matrix U S V^T, without an SVD."""

from __future__ import annotations

import torch
from torch import Tensor

Quintic = tuple[float, float, float]
"""Coefficients a, b, c: an iteration maps every singular value s to a s + b s^3 + c s^5."""

POLYNOMIALS: tuple[Quintic, ...] = 5 * ((3.4445, -4.7750, 2.0315),)
"""Those of Muon's iterations: steep at zero, so singular values end near 1 rather than at 1 (Jordan
et al. 2024, kellerjordan.github.io/posts/muon)."""

HALVED = 384
"""Minimum number of rows for which `_gram` skips the redundant half of X X^T, on a CPU in fp32.
Newton-Schulz is then at least 15 % faster; in bf16 it would be slower with 768 rows."""


def orthogonalize(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Return approximately the nearest semi-orthogonal matrix to each of `matrices` [N, R, C].

    Computes in `dtype`, which is also the dtype of the result. Singular values of at least a
    hundredth of the matrix's norm become [0.68, 1.21].
    """
    # X Xᵀ is [min, min] this way. For an MLP of 4:1, the other side would take ten times the FLOPs
    # and 16 times the memory.
    tall = matrices.size(-2) > matrices.size(-1)
    x = (matrices.mT if tall else matrices).to(dtype)
    # The Frobenius norm bounds the spectral norm, so all singular values start at 1 or below, where
    # the iteration converges. The constant keeps a zero matrix finite.
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    in_halves = x.device.type == "cpu" and dtype == torch.float32 and x.size(-2) >= HALVED
    for a, b, c in POLYNOMIALS:
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
