"""Muon: the orthogonalisation against an SVD, the step against torch's own Muon."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dtt.optim.muon import Muon, orthogonalize


@pytest.mark.parametrize("shape", [(3, 24, 24), (2, 48, 16), (2, 16, 48)])
def test_orthogonalize_keeps_the_singular_vectors_and_evens_out_the_values(
    shape: tuple[int, int, int],
) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    result = orthogonalize(matrices, 5, torch.float64)
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    rotated = u.mT @ result @ vh.mT  # diagonal if the singular vectors are kept
    values = rotated.diagonal(dim1=-2, dim2=-1)
    assert (rotated - torch.diag_embed(values)).abs().max() < 1e-6
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_the_batch_is_the_same_as_one_by_one() -> None:
    matrices = torch.randn(4, 8, 12, generator=torch.Generator().manual_seed(0))
    alone = torch.stack([orthogonalize(m[None], 5, torch.float32)[0] for m in matrices])
    torch.testing.assert_close(orthogonalize(matrices, 5, torch.float32), alone)


@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_equal_those_of_torch_muon(nesterov: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(s, generator=generator) for s in ((16, 8), (16, 8), (8, 24))]
    ours = [nn.Parameter(w.clone()) for w in start]
    theirs = [nn.Parameter(w.clone()) for w in start]
    mine = Muon(
        ours, lr=0.01, momentum=0.95, nesterov=nesterov, ns_steps=5, weight_decay=0.1,
        ns_dtype=torch.bfloat16,
    )  # fmt: skip
    reference = torch.optim.Muon(
        theirs, lr=0.01, weight_decay=0.1, momentum=0.95, nesterov=nesterov,
        adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    for _ in range(5):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        mine.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=2e-3, rtol=0)  # bf16 iterations, another order


def test_only_matrices_are_taken() -> None:
    with pytest.raises(ValueError, match="matrices"):
        Muon(
            [nn.Parameter(torch.zeros(3))], lr=1, momentum=0, nesterov=False, ns_steps=1,
            weight_decay=0, ns_dtype=torch.float32,
        )  # fmt: skip
