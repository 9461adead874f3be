"""Orthogonalisation against an SVD in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dtt.optim.muon import newton_schulz
from dtt.optim.muon.newton_schulz import HALVED, orthogonalize

EXACT = 12 * ((15 / 8, -10 / 8, 3 / 8),)
"""Newton-Schulz of the fifth order, which ends at 1."""


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
def test_singular_vectors_stay_and_singular_values_become_about_one(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = matrices(shape)
    values = values_in_the_basis_of(x, orthogonalize(x, torch.float64))
    assert values.min() > 0.5
    assert values.max() < 1.3
    monkeypatch.setattr(newton_schulz, "POLYNOMIALS", 2 * EXACT)
    torch.testing.assert_close(orthogonalize(x, torch.float64), polar(x))


@pytest.mark.parametrize("shape", [(2, 385, 400), (1, 900, 771)])
def test_large_matrices_made_of_halves_are_those_of_whole_products(shape: tuple[int, ...]) -> None:
    x = matrices(shape)
    assert min(shape[1:]) >= HALVED
    whole = orthogonalize(x, torch.float64)
    torch.testing.assert_close(orthogonalize(x, torch.float32).double(), whole, atol=2e-5, rtol=0)


def test_the_batch_is_the_same_as_one_by_one_and_zero_stays_zero() -> None:
    x = matrices((4, 8, 12)).float()
    x[1] = 0
    alone = torch.stack([orthogonalize(m[None], torch.float32)[0] for m in x])
    together = orthogonalize(x, torch.float32)
    torch.testing.assert_close(together, alone)
    assert not together[1].any()
