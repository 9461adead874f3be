"""Muon: steps against the SVD in float64, against torch's own Muon, and what is left alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from dtt.optim.muon.newton_schulz import orthogonalize
from dtt.optim.muon.optimizer import Muon
from dtt.optim.muon.variant import MuonConfig

SHAPES = ((16, 8), (16, 8), (8, 24))
EVERYTHING = MuonConfig(
    momentum_warmup=4, normuon_beta2=0.9, weight_decay={"value": 0.1, "cautious": True},
    scale="spectral",
)  # fmt: skip


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights(shapes: Sequence[tuple[int, ...]]) -> list[nn.Parameter]:
    return [nn.Parameter(random(*shape, seed=i)) for i, shape in enumerate(shapes)]


def set_gradients(params: Sequence[nn.Parameter], step: int) -> None:
    for i, p in enumerate(params):
        p.grad = random(*p.shape, seed=1000 * (step + 1) + i)


def train(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter], steps: range) -> None:
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


def polar(x: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
    return u @ vh


@pytest.fixture
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterations that end at an orthogonal matrix."""
    exact = 24 * ((15 / 8, -10 / 8, 3 / 8),)
    monkeypatch.setattr("dtt.optim.muon.newton_schulz.POLYNOMIALS", exact)


@pytest.mark.usefixtures("_exact")
def test_a_step_equals_that_of_the_svd_in_float64() -> None:
    config = MuonConfig(lr=0.1, momentum=0.9, weight_decay=0.5)
    params = weights(SHAPES)
    optimizer = Muon(params, config, torch.float64)
    for step in range(3):
        before = [p.detach().double() for p in params]
        momenta = [optimizer.state[p].get("momentum", torch.zeros_like(p)) for p in params]
        momenta = [m.double().clone() for m in momenta]
        set_gradients(params, step)
        optimizer.step()
        for p, w, m in zip(params, before, momenta, strict=True):
            assert p.grad is not None
            g = p.grad.double()
            m = 0.9 * m + 0.1 * g
            scale = 0.2 * max(p.shape) ** 0.5
            expected = w - 0.1 * (scale * polar(0.9 * m + 0.1 * g) + 0.5 * w)
            torch.testing.assert_close(p.double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("scale", "theirs"), [("rms", "match_rms_adamw"), ("spectral", "original")]
)
def test_ten_steps_equal_those_of_torch_muon(
    scale: Literal["rms", "spectral"], theirs: str
) -> None:
    ours, others = weights(SHAPES), weights(SHAPES)
    config = MuonConfig(lr=0.01, scale=scale)
    reference = torch.optim.Muon(
        others, lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn=theirs
    )
    train(Muon(ours, config, torch.bfloat16), ours, range(10))
    train(reference, others, range(10))
    for a, b, start in zip(ours, others, weights(SHAPES), strict=True):
        moved = (b - start).abs().max().item()
        torch.testing.assert_close(a, b, atol=0.01 * moved, rtol=0)  # both iterate in bf16


def test_momentum_warms_up_linearly() -> None:
    [p] = weights([(4, 4)])
    config = MuonConfig(momentum=0.95, momentum_warmup=4)
    optimizer = Muon([p], config, torch.float32)
    expected = torch.zeros(4, 4)
    for step, momentum in enumerate((0.85, 0.875, 0.9, 0.925, 0.95, 0.95)):
        train(optimizer, [p], range(step, step + 1))
        assert p.grad is not None
        expected = momentum * expected + (1 - momentum) * p.grad
        torch.testing.assert_close(optimizer.state[p]["momentum"], expected)


def test_momentum_warms_up_in_bf16() -> None:
    config = MuonConfig(momentum=0.5, momentum_warmup=4)
    wide, narrow = weights([(16, 8)]), [nn.Parameter(p.bfloat16()) for p in weights([(16, 8)])]
    for params, dtype in ((wide, torch.float32), (narrow, torch.bfloat16)):
        optimizer = Muon(params, config, torch.float32)
        for step in range(3):
            params[0].grad = random(16, 8, seed=step).to(dtype)
            optimizer.step()
    torch.testing.assert_close(narrow[0].float(), wide[0].detach(), atol=0.02, rtol=0.01)


def test_cautious_decay_takes_only_from_weights_that_the_step_makes_smaller() -> None:
    def trained(**settings: Any) -> Tensor:
        params = weights([(16, 8)])
        config = MuonConfig(lr=0.01, **settings)
        train(Muon(params, config, torch.float32), params, range(1))
        return params[0].detach()

    start = weights([(16, 8)])[0].detach()
    undecayed, decayed = trained(weight_decay=0.0), trained(weight_decay=0.5)
    cautious = trained(weight_decay={"value": 0.5, "cautious": True})
    smaller = (undecayed - start) * start <= 0
    assert 0 < smaller.sum() < smaller.numel()
    torch.testing.assert_close(cautious, torch.where(smaller, decayed, undecayed))
    assert not torch.equal(cautious, decayed)


def test_normuon_evens_out_the_rows_and_keeps_the_norm() -> None:
    def steps(beta2: float | None, count: int) -> tuple[list[Tensor], Muon, nn.Parameter]:
        [p] = weights([(24, 8)])
        config = MuonConfig(lr=1.0, weight_decay=0.0, normuon_beta2=beta2, momentum=0.0)
        optimizer = Muon([p], config, torch.float32)
        updates = []
        for step in range(count):
            before = p.detach().clone()
            train(optimizer, [p], range(step, step + 1))
            updates.append(before - p.detach())
        return updates, optimizer, p

    plain, _, _ = steps(None, 4)
    normalized, optimizer, p = steps(0.5, 4)
    moment = torch.zeros(24, 1)
    scale = 0.2 * 24**0.5
    for u, ours in zip(plain, normalized, strict=True):
        u = u / scale
        moment = 0.5 * moment + 0.5 * u.square().mean(dim=1, keepdim=True)
        divided = u / moment.sqrt()
        expected = scale * divided * u.norm() / divided.norm()
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(optimizer.state[p]["row_moment"], moment)
    first = normalized[0].norm(dim=1)  # no history yet: all rows are alike
    assert first.std() < 1e-4 * first.mean()
    assert plain[0].norm(dim=1).std() > 1e-2 * first.mean()


@pytest.mark.parametrize("config", [MuonConfig(), EVERYTHING], ids=["default", "everything"])
@pytest.mark.parametrize(
    ("shape", "split"),
    [((24, 8), (8, 8, 8)), ((24, 8), (16, 4, 4)), ((3, 8, 16), None),
     ((2, 12, 8), (8, 4))],
    ids=["qkv", "grouped qkv", "experts", "experts' gate and up"],
)  # fmt: skip
def test_parts_and_stacks_are_updated_as_if_each_matrix_were_a_parameter(
    config: MuonConfig, shape: tuple[int, ...], split: tuple[int, ...] | None
) -> None:
    def apart(x: Tensor) -> list[Tensor]:
        stack = x if x.ndim == 3 else x[None]
        return [part for m in stack for part in m.split(list(split or m.shape[:1]))]

    [fused] = weights([shape])
    matrices = [nn.Parameter(m.clone()) for m in apart(fused.detach())]
    whole = Muon([{"params": [fused], "split": split}], config, torch.float64)
    single = Muon(matrices, config, torch.float64)
    for step in range(3):
        set_gradients([fused], step)
        assert fused.grad is not None
        for matrix, gradient in zip(matrices, apart(fused.grad), strict=True):
            matrix.grad = gradient.clone()
        whole.step()
        single.step()
    for matrix, part in zip(matrices, apart(fused.detach()), strict=True):
        torch.testing.assert_close(matrix.detach(), part)


@pytest.mark.parametrize("config", [MuonConfig(), EVERYTHING], ids=["default", "everything"])
@pytest.mark.parametrize("gradient", [float("nan"), float("inf"), 1.0])
def test_a_skipped_step_changes_no_bit_of_state_or_of_the_next_step(
    config: MuonConfig, gradient: float
) -> None:
    def state(optimizer: Muon, params: Sequence[nn.Parameter]) -> list[bytes]:
        held = [value for p in params for value in (p.detach(), *optimizer.state[p].values())]
        return [value.numpy().tobytes() for value in held]

    params, others = weights(SHAPES), weights(SHAPES)
    for p in (params[0], others[0]):
        p.data[0, 0] = -0.0
    optimizer, undisturbed = (
        Muon(params, config, torch.float32),
        Muon(others, config, torch.float32),
    )
    optimizer.found_inf = torch.zeros(())
    train(optimizer, params, range(2))
    train(undisturbed, others, range(2))
    assert state(optimizer, params) == state(undisturbed, others)
    before = state(optimizer, params)
    optimizer.found_inf = torch.ones(())
    for p in params:
        p.grad = torch.full_like(p, gradient)
    optimizer.step()
    assert state(optimizer, params) == before
    optimizer.found_inf = torch.zeros(())
    train(optimizer, params, range(2, 4))
    train(undisturbed, others, range(2, 4))
    assert state(optimizer, params) == state(undisturbed, others)


def test_a_skipped_first_step_has_no_effect() -> None:
    params, others = weights(SHAPES), weights(SHAPES)
    optimizer = Muon(params, EVERYTHING, torch.float32)
    optimizer.found_inf = torch.ones(())
    train(optimizer, params, range(1))
    optimizer.found_inf = torch.zeros(())
    train(optimizer, params, range(2))
    train(Muon(others, EVERYTHING, torch.float32), others, range(2))
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


@pytest.mark.parametrize("config", [MuonConfig(), EVERYTHING], ids=["default", "everything"])
def test_a_step_never_synchronises_with_the_device(config: MuonConfig) -> None:
    with torch.device("meta"):  # where tensors have no values: to look at one is an error
        params = [nn.Parameter(torch.empty(shape)) for shape in SHAPES]
        optimizer = Muon(params, config, torch.bfloat16)
        optimizer.found_inf = torch.empty(())
        for p in params:
            p.grad = torch.empty_like(p)
        optimizer.step()
        with pytest.raises(RuntimeError, match="item"):
            bool(optimizer.found_inf)


def test_large_groups_are_updated_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, others = weights([(8, 8)] * 5), weights([(8, 8)] * 5)
    train(Muon(ours, MuonConfig(), torch.float32), ours, range(2))
    sizes: list[int] = []

    def counted(matrices: Tensor, *how: Any) -> Tensor:
        sizes.append(len(matrices))
        return orthogonalize(matrices, *how)

    monkeypatch.setattr("dtt.optim.muon.optimizer.orthogonalize", counted)
    monkeypatch.setattr("dtt.optim.muon.optimizer.BATCH_ELEMENTS", 2 * 64)
    train(Muon(others, MuonConfig(), torch.float32), others, range(2))
    assert sizes == 2 * [2, 2, 1]
    for a, b in zip(ours, others, strict=True):
        torch.testing.assert_close(a, b)


def test_only_matrices_are_accepted() -> None:
    with pytest.raises(ValueError, match="matrices"):
        Muon([nn.Parameter(torch.zeros(3))], MuonConfig(), torch.float32)
