"""Orthogonalisation: the polynomials against theory, the result against an SVD in float64."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from dtt.optim.muon.newton_schulz import HALVED, POLAR_EXPRESS, Quintic, orthogonalize, quintics

Kind = Literal["classic", "polar-express"]
CUSHION = 0.02407327424182761
"""Of the published table: no polynomial is made for less than this share of its interval."""


def best_quintic(low: float, high: float) -> Quintic:
    """The odd quintic nearest to 1 on [low, high], by Remez: its error takes its largest size at
    four points, the ends and two between, with alternating sign."""
    inner = np.array([(3 * low + high) / 4, (low + 3 * high) / 4])
    for _ in range(100):
        points = np.array([low, *inner, high])
        rows = np.stack([points, points**3, points**5, [1, -1, 1, -1]], axis=1)
        a, b, c, _ = np.linalg.solve(rows, np.ones(4))
        root = math.sqrt(9 * b * b - 20 * a * c)
        new = np.sqrt(np.array([-3 * b - root, -3 * b + root]) / (10 * c))  # where p' is 0
        if np.allclose(new, inner, rtol=1e-15, atol=0):
            break
        inner = new
    return float(a), float(b), float(c)


def value(quintic: Quintic, s: float) -> float:
    a, b, c = quintic
    return a * s + b * s**3 + c * s**5


def test_the_polar_express_table_is_the_best_quintic_for_each_interval_in_turn() -> None:
    low, high = 1e-3, 1.0
    for published in POLAR_EXPRESS[:6]:  # later ones differ from Newton-Schulz by less than 1e-6
        a, b, c = best_quintic(max(low, CUSHION * high), high)
        centre = 2 / (value((a, b, c), low) + value((a, b, c), high))
        ours = (centre * a, centre * b, centre * c)
        assert published == pytest.approx(ours, rel=1e-12)
        low = value(ours, low)
        high = 2 - low
    assert POLAR_EXPRESS[6] == pytest.approx(POLAR_EXPRESS[7], rel=2e-6)
    assert POLAR_EXPRESS[7] == (15 / 8, -10 / 8, 3 / 8)  # fifth-order Newton-Schulz


def matrices(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def polar(x: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    return u @ vh


def values_in_the_basis_of(x: Tensor, result: Tensor) -> Tensor:
    """Singular values of `result`, which must have the singular vectors of `x`."""
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    rotated = u.mT @ result @ vh.mT
    values = rotated.diagonal(dim1=-2, dim2=-1)
    assert (rotated - torch.diag_embed(values)).abs().max() < 1e-6
    return values


@pytest.mark.parametrize("shape", [(3, 24, 24), (2, 48, 16), (2, 16, 48)])
@pytest.mark.parametrize(
    ("kind", "steps", "low", "high"),
    [("classic", 5, 0.5, 1.3), ("polar-express", 5, 0.85, 1.15), ("polar-express", 12, 1, 1)],
)
def test_singular_vectors_stay_and_singular_values_become_about_one(
    shape: tuple[int, ...], kind: Kind, steps: int, low: float, high: float
) -> None:
    x = matrices(shape)
    values = values_in_the_basis_of(x, orthogonalize(x, quintics(kind, steps), torch.float64))
    assert values.min() > low - 1e-9
    assert values.max() < high + 1e-9


def test_polar_express_gives_the_svds_polar_factor_and_closer_than_the_classic() -> None:
    x = torch.linalg.qr(matrices((64, 64)))[0] * torch.logspace(-2.5, 0, 64)  # hard: 300 to 1
    x = x[None]
    exact = polar(x)

    def error(kind: Kind, steps: int) -> float:
        return float((orthogonalize(x, quintics(kind, steps), torch.float64) - exact).norm())

    classic = [error("classic", steps) for steps in (5, 8, 12)]
    express = [error("polar-express", steps) for steps in (5, 8, 12)]
    assert all(e < c for e, c in zip(express, classic, strict=True))
    assert express[-1] < 1e-10
    assert classic[-1] > 0.1  # it never converges


@pytest.mark.parametrize("kind", ["classic", "polar-express"])
def test_bfloat16_ends_in_the_same_band(kind: Kind) -> None:
    x = matrices((2, 96, 32))
    result = orthogonalize(x, quintics(kind, 5), torch.bfloat16)
    assert result.dtype == torch.bfloat16
    values = torch.linalg.svdvals(result.double())
    assert values.min() > 0.5
    assert values.max() < 1.3


@pytest.mark.parametrize("shape", [(2, 385, 400), (1, 900, 771)])
def test_large_matrices_made_of_halves_are_those_of_whole_products(shape: tuple[int, ...]) -> None:
    x = matrices(shape)
    assert min(shape[1:]) >= HALVED
    polynomials = quintics("polar-express", 3)
    whole = orthogonalize(x, polynomials, torch.float64)
    torch.testing.assert_close(
        orthogonalize(x, polynomials, torch.float32).double(), whole, atol=2e-5, rtol=0
    )


@pytest.mark.parametrize("kind", ["classic", "polar-express"])
def test_the_batch_is_the_same_as_one_by_one_and_zero_stays_zero(kind: Kind) -> None:
    x = matrices((4, 8, 12)).float()
    x[1] = 0
    polynomials = quintics(kind, 5)
    alone = torch.stack([orthogonalize(m[None], polynomials, torch.float32)[0] for m in x])
    together = orthogonalize(x, polynomials, torch.float32)
    torch.testing.assert_close(together, alone)
    assert not together[1].any()
