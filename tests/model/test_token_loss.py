"""`reduction="none"`: the cross-entropy of each token, with a factor of its own in the gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dtt.model.loss import linear_cross_entropy

N, D, V = 50, 16, 96


def problem() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, targets and the factor of each token in the gradient."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=g).double().requires_grad_()
    weight = torch.randn(V, D, generator=g).double().requires_grad_()
    targets = torch.randint(V, (N,), generator=g)
    targets[::7] = -100
    return hidden, weight, targets, torch.randn(N, generator=g).double()


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
    logits = hidden @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets, reduction="none")


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_losses_and_weighted_gradients_equal_plain_cross_entropy(
    chunk: int, softcap: float | None
) -> None:
    hidden, weight, targets, factors = problem()
    expected = plain(hidden, weight, targets, softcap)
    wanted = torch.autograd.grad(expected, (hidden, weight), factors)
    options: Any = {"softcap": softcap, "chunk": chunk, "reduction": "none"}
    losses = linear_cross_entropy(hidden, weight, targets, **options)
    got = torch.autograd.grad(losses, (hidden, weight), factors)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        assert linear_cross_entropy(hidden, weight, targets, **options).equal(losses)


def test_under_autocast_the_gradients_are_as_exact_as_those_of_the_sum() -> None:
    hidden, weight, targets, _ = problem()
    exact = torch.autograd.grad(plain(hidden, weight, targets, None).sum(), (hidden, weight))
    hidden, weight = (x.detach().float().requires_grad_() for x in (hidden, weight))
    errors = []
    for reduction in ("sum", "none"):
        options: Any = {"chunk": 7, "reduction": reduction}
        with torch.autocast("cpu", torch.bfloat16):
            loss = linear_cross_entropy(hidden, weight, targets, **options).sum()
        got = torch.autograd.grad(loss, (hidden, weight))
        assert [x.dtype for x in (loss, *got)] == [torch.float32] * 3
        pairs = zip(got, exact, strict=True)
        errors.append(max(((a - b).norm() / b.norm()).item() for a, b in pairs))
    assert errors[1] < 1.1 * errors[0] < 0.02
