from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.largest_tensor import LargestTensor
from support.ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh

from dtt.mesh.compilation import compiler
from dtt.mesh.dist import World
from dtt.model import loss as loss_module
from dtt.model.loss import VocabularyPart, chunk_rows, linear_cross_entropy

N, D, V = 50, 16, 97


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=g).requires_grad_()
    weight = torch.randn(V, D, generator=g).requires_grad_()
    targets = torch.randint(V, (N,), generator=g)
    targets[::7] = -100
    return hidden, weight, targets


def plain(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "sum",
) -> torch.Tensor:
    """What the gradients must be those of; with z_loss it is more than the loss."""
    logits = hidden @ weight.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    penalty = z_loss * logits.logsumexp(-1)[targets != -100].square().sum()
    return F.cross_entropy(logits, targets, reduction=reduction) + penalty


@pytest.mark.parametrize("softcap", [None, 30.0, 3.0])
@pytest.mark.parametrize("z_loss", [0.0, 1e-4, 0.1])
@pytest.mark.parametrize("chunk", [1, 7, 16, 50, 1000, None])
def test_gradients_with_softcap_and_z_loss_are_those_of_the_definition(
    softcap: float | None, z_loss: float, chunk: int | None
) -> None:
    hidden, weight, targets = problem()
    hidden, weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    targets[14:30] = -100  # whole chunks of nothing
    wanted = torch.autograd.grad(
        plain(hidden, weight, targets, softcap, z_loss) / 13, (hidden, weight)
    )
    loss = linear_cross_entropy(
        hidden, weight, targets, softcap=softcap, z_loss=z_loss, chunk=chunk
    )
    got = torch.autograd.grad(loss / 13, (hidden, weight))
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    without_penalty = plain(hidden, weight, targets, softcap)
    torch.testing.assert_close(loss, without_penalty, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("softcap", "z_loss"), [(None, 0.0), (5.0, 1e-2)])
def test_bf16_autocast_is_as_close_to_fp32_as_plain_cross_entropy_is(
    softcap: float | None, z_loss: float
) -> None:
    hidden, weight, targets = problem()
    options: Any = {"softcap": softcap, "z_loss": z_loss}
    exact = torch.autograd.grad(plain(hidden, weight, targets, **options), (hidden, weight))

    def error(fn: Any) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            loss = fn(hidden, weight, targets, **options)
        assert loss.dtype == torch.float32
        grads = torch.autograd.grad(loss, (hidden, weight))
        assert all(grad.dtype == torch.float32 for grad in grads)
        return max(
            (a - b).norm().item() / b.norm().item() for a, b in zip(grads, exact, strict=True)
        )

    assert error(partial(linear_cross_entropy, chunk=8)) < 1.5 * error(plain) < 0.05


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_without_gradients_the_value_is_the_same(softcap: float | None) -> None:
    hidden, weight, targets = problem()
    expected = linear_cross_entropy(hidden, weight, targets, softcap=softcap, chunk=8)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets, softcap=softcap, chunk=8)
    assert not loss.requires_grad
    assert loss.item() == expected.item()


def test_a_frozen_input_gets_no_gradient() -> None:
    hidden, weight, targets = problem()
    wanted = torch.autograd.grad(plain(hidden, weight, targets), hidden)
    frozen = weight.detach()
    got = torch.autograd.grad(linear_cross_entropy(hidden, frozen, targets, chunk=8), hidden)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    got = torch.autograd.grad(
        linear_cross_entropy(hidden.detach(), weight, targets, chunk=8), weight
    )
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


@pytest.mark.parametrize("grad", [True, False])
def test_no_tensor_is_ever_larger_than_the_weight_or_a_chunk_of_logits(grad: bool) -> None:
    hidden, weight, targets = problem()
    with LargestTensor() as largest, torch.set_grad_enabled(grad):
        loss = linear_cross_entropy(hidden, weight, targets, softcap=5.0, z_loss=0.1, chunk=4)
        if grad:
            loss.backward()
    assert 0 < largest.elements <= max(V * D, 4 * V) < N * V


ROWS = 48
"""Of the head, on each of two ranks."""
CAPPED: Any = {"softcap": 5.0, "z_loss": 0.1}


def even_problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden, weight, targets = problem()
    hidden, weight = (t.detach().double().requires_grad_() for t in (hidden, weight[: 2 * ROWS]))
    return hidden, weight, targets.clamp(max=2 * ROWS - 1)


def part_of_loss(world: World, fused: bool) -> tuple[float, list[Any], int]:
    """Loss, gradients of all hidden states and of this rank's rows, and the largest tensor.

    If they are fused, the second rank cannot compile the passes.
    """
    torch.compile = partial(torch.compile, backend="eager")  # type: ignore[assignment]
    if not world.first:
        compiler.failure = "no compiler"
    if fused:
        loss_module.BLOCK_ELEMENTS["cpu"] = 5 * ROWS
    hidden, weight, targets = even_problem()
    part = VocabularyPart(init_device_mesh("cpu", (2,)), 2 * ROWS)
    mine = weight[part.first : part.first + ROWS]
    with LargestTensor() as largest:
        loss = linear_cross_entropy(
            hidden, mine, targets, part=part, chunk=40, fused=fused, **CAPPED
        )
        grads = torch.autograd.grad(loss, (hidden, mine))
    return loss.item(), [grad.tolist() for grad in grads], largest.elements


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True], ids=["", "one of which cannot compile"])
def test_two_ranks_with_half_of_the_rows_each_have_one_loss_and_exact_gradients(
    fused: bool,
) -> None:
    hidden, weight, targets = even_problem()
    wanted = torch.autograd.grad(plain(hidden, weight, targets, **CAPPED), (hidden, weight))
    (loss, first, largest), (other_loss, second, _) = on_ranks(2, part_of_loss, fused)
    assert loss == other_loss == pytest.approx(plain(hidden, weight, targets, 5.0).item(), 1e-12)
    summands = torch.tensor([first[0], second[0]], dtype=torch.float64)
    rows = torch.tensor([first[1], second[1]], dtype=torch.float64)
    torch.testing.assert_close(summands.sum(0), wanted[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rows.flatten(0, 1), wanted[1], rtol=1e-12, atol=1e-12)
    if not fused:
        assert 0 < largest <= 40 * ROWS


# ---- the two passes that a GPU compiles ---------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("bf16", "softcap", "z_loss"), [(False, 5.0, 0.1), (True, None, 0.0)])
def test_compiled_by_inductor_it_is_as_exact_as_uncompiled(
    bf16: bool, softcap: float | None, z_loss: float
) -> None:
    assert not compiler.failure
    how: Any = {"softcap": softcap, "z_loss": z_loss, "chunk": 16}
    hidden, weight, targets = problem()
    exact = torch.autograd.grad(plain(hidden, weight, targets, softcap, z_loss), (hidden, weight))
    errors, losses = {}, {}
    for fused in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = linear_cross_entropy(hidden, weight, targets, fused=fused, **how)
        grads = torch.autograd.grad(loss, (hidden, weight))
        pairs = zip(grads, exact, strict=True)
        errors[fused] = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
        losses[fused] = loss.item()
    assert not compiler.failure, "it was compiled"
    assert losses[True] == pytest.approx(losses[False], rel=1e-6)
    assert errors[True] < 1.1 * errors[False] + 1e-7
    assert errors[True] < (1e-2 if bf16 else 1e-6)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_where_it_cannot_be_compiled_the_passes_run_block_by_block(
    monkeypatch: pytest.MonkeyPatch, softcap: float | None, z_loss: float
) -> None:
    monkeypatch.setattr(compiler, "failure", "no compiler")
    monkeypatch.setitem(loss_module.BLOCK_ELEMENTS, "cpu", 5 * V)
    hidden, weight, targets = problem()
    wanted = torch.autograd.grad(plain(hidden, weight, targets, softcap, z_loss), (hidden, weight))
    options: Any = {"softcap": softcap, "z_loss": z_loss, "chunk": 16, "fused": True}
    loss = linear_cross_entropy(hidden, weight, targets, **options)
    got = torch.autograd.grad(loss, (hidden, weight))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss, plain(hidden, weight, targets, softcap), rtol=1e-5, atol=0)
    with torch.no_grad():
        assert linear_cross_entropy(hidden, weight, targets, **options).item() == loss.item()


def test_chunks_of_a_gpu_are_whole_tiles_and_as_many_logits_as_its_memory_allows() -> None:
    assert chunk_rows(50_304, None) == 2**26 // 50_304
    for gigabytes, elements in ((16, 2**28), (80, 2**28), (141, 2**29), (192, 2**29), (288, 2**30)):
        for vocab_size in (257, 50_304, 128_256):
            rows = chunk_rows(vocab_size, gigabytes * 10**9)
            assert rows % 128 == 0
            assert elements - 128 * vocab_size < rows * vocab_size <= elements
    assert chunk_rows(2**27, 80 * 10**9) == 128


# ---- the loss of each token, with a factor of its own in the gradient ----------------------------


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_losses_of_tokens_and_weighted_gradients_equal_plain_cross_entropy(
    chunk: int, softcap: float | None
) -> None:
    hidden, weight, targets = problem()
    hidden, weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    factors = torch.randn(N, generator=torch.Generator().manual_seed(1)).double()
    expected = plain(hidden, weight, targets, softcap, reduction="none")
    wanted = torch.autograd.grad(expected, (hidden, weight), factors)
    options: Any = {"softcap": softcap, "chunk": chunk, "reduction": "none"}
    losses = linear_cross_entropy(hidden, weight, targets, **options)
    got = torch.autograd.grad(losses, (hidden, weight), factors)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        assert linear_cross_entropy(hidden, weight, targets, **options).equal(losses)


def test_gradients_of_the_losses_of_tokens_are_as_exact_under_autocast_as_of_their_sum() -> None:
    hidden, weight, targets = problem()
    exact = torch.autograd.grad(plain(hidden.double(), weight.double(), targets), (hidden, weight))
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
