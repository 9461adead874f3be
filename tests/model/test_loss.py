from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dtt.model.loss import linear_cross_entropy

N, D, V = 50, 16, 97


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=g).requires_grad_()
    weight = torch.randn(V, D, generator=g).requires_grad_()
    targets = torch.randint(V, (N,), generator=g)
    targets[::7] = -100
    return hidden, weight, targets


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((hidden @ weight.T).float(), targets, reduction="sum")


@pytest.mark.parametrize("chunk", [1, 7, 25, 50, 1000, None])
def test_value_and_gradients_equal_plain_cross_entropy(chunk: int | None) -> None:
    hidden, weight, targets = problem()
    expected = plain(hidden, weight, targets)
    wanted = torch.autograd.grad(expected / 13, (hidden, weight))
    loss = linear_cross_entropy(hidden, weight, targets, chunk)
    got = torch.autograd.grad(loss / 13, (hidden, weight))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_bf16_autocast_is_as_close_to_fp32_as_plain_cross_entropy_is() -> None:
    hidden, weight, targets = problem()
    exact = torch.autograd.grad(plain(hidden, weight, targets), (hidden, weight))

    def error(fn: Any) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            loss = fn(hidden, weight, targets)
        assert loss.dtype == torch.float32
        grads = torch.autograd.grad(loss, (hidden, weight))
        assert all(grad.dtype == torch.float32 for grad in grads)
        return max(
            (a - b).norm().item() / b.norm().item() for a, b in zip(grads, exact, strict=True)
        )

    assert error(lambda *a: linear_cross_entropy(*a, chunk=8)) < 1.5 * error(plain) < 0.05


def test_without_gradients_the_value_is_the_same() -> None:
    hidden, weight, targets = problem()
    expected = linear_cross_entropy(hidden, weight, targets, 8)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets, 8)
    assert not loss.requires_grad
    assert loss.item() == expected.item()


def test_a_frozen_input_gets_no_gradient() -> None:
    hidden, weight, targets = problem()
    wanted = torch.autograd.grad(plain(hidden, weight, targets), hidden)
    frozen = weight.detach()
    got = torch.autograd.grad(linear_cross_entropy(hidden, frozen, targets, 8), hidden)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    got = torch.autograd.grad(linear_cross_entropy(hidden.detach(), weight, targets, 8), weight)
    assert got[0].shape == weight.shape


def test_ignored_targets_alone_give_zero() -> None:
    hidden, weight, targets = problem()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100))
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad is not None
    assert not hidden.grad.any()
    assert weight.grad is not None
    assert not weight.grad.any()


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements any operation put out."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("grad", [True, False])
def test_no_tensor_is_ever_larger_than_the_weight_or_a_chunk_of_logits(grad: bool) -> None:
    hidden, weight, targets = problem()
    with LargestTensor() as largest, torch.set_grad_enabled(grad):
        loss = linear_cross_entropy(hidden, weight, targets, chunk=4)
        if grad:
            loss.backward()
    assert 0 < largest.elements <= max(V * D, 4 * V) < N * V
