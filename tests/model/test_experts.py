from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.tiny_architectures import make, tiny_architecture
from torch import Tensor

from dtt.model.architecture import Architecture
from dtt.model.experts import MixtureMLP, RouterLosses
from dtt.model.linear import grouped_linear

MIXTURES = ["mixtral", "qwen3_moe", "olmoe", "dots1"]


@pytest.fixture(params=MIXTURES)
def arch(request: pytest.FixtureRequest) -> Architecture:
    return tiny_architecture(request.param)


def mixture_of(arch: Architecture, dtype: torch.dtype = torch.float64) -> MixtureMLP:
    """The last layer's, whose correction and weights are not tiny."""
    torch.manual_seed(0)
    mlp = make(arch)[0].layers[-1].mlp.to(dtype)
    assert isinstance(mlp, MixtureMLP)
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.normal_(0.0, 0.3)
    return mlp


def one_by_one(mlp: MixtureMLP, x_BTD: Tensor) -> Tensor:
    """The output of a mixture, each token by itself."""
    routing = mlp.router(x_BTD.flatten(0, 1))
    rows = []
    for x_D, weights_K, experts_K in zip(
        x_BTD.flatten(0, 1), routing.weights_NK, routing.experts_NK, strict=True
    ):
        out = torch.zeros_like(x_D)
        for weight, e in zip(weights_K, experts_K.tolist(), strict=True):
            gate, up, down = (s[e] for s in (mlp.experts.gate, mlp.experts.up, mlp.experts.down))
            out = out + weight * (down @ (F.silu(gate @ x_D) * (up @ x_D)))
        rows.append(out if mlp.shared is None else out + mlp.shared(x_D[None])[0])
    return torch.stack(rows).view_as(x_BTD)


def test_output_and_gradients_are_those_of_each_token_by_itself(arch: Architecture) -> None:
    mlp, x_BTD = mixture_of(arch), torch.randn(2, 9, arch.dim, dtype=torch.float64)
    found = mlp(x_BTD.requires_grad_(), None).out
    expected = one_by_one(mlp, x_BTD)
    torch.testing.assert_close(found, expected)
    inputs = [x_BTD, *(p for p in mlp.parameters() if p is not mlp.router.balance)]
    factor = torch.randn_like(found)
    theirs = torch.autograd.grad((expected * factor).sum(), inputs)
    for mine, right in zip(
        torch.autograd.grad((found * factor).sum(), inputs), theirs, strict=True
    ):
        torch.testing.assert_close(mine, right)


def test_each_counted_token_is_counted_once_for_each_of_its_experts(arch: Architecture) -> None:
    mlp, x_BTD = mixture_of(arch), torch.randn(3, 8, arch.dim, dtype=torch.float64)
    counted_BT = torch.rand(3, 8) < 0.7
    load = mlp(x_BTD, counted_BT).load
    routing = mlp.router(x_BTD[counted_BT])
    assert load is not None
    assert load.sum() == mlp.router.mixture.per_token * counted_BT.sum()
    assert torch.equal(load, routing.experts_NK.flatten().bincount(minlength=len(load)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_expert_may_compute_all_tokens_and_others_none(dtype: torch.dtype) -> None:
    arch = tiny_architecture("olmoe")  # an expert for each token
    mlp = mixture_of(arch, dtype)
    with torch.no_grad():
        mlp.router.weight.zero_()[2] = 1.0
    x_BTD = torch.rand(2, 5, arch.dim, dtype=dtype)
    mixed = mlp(x_BTD, torch.ones(2, 5, dtype=torch.bool))
    assert mixed.load is not None
    assert mixed.load.tolist() == [0, 0, 10, 0, 0, 0]
    mixed.out.sum().backward()
    grad = mlp.experts.down.grad
    assert grad is not None
    assert [bool(g.any()) for g in grad] == [False, False, True, False, False, False]


def test_auxiliary_losses_are_those_of_the_papers(arch: Architecture) -> None:
    mlp, x_BTD = mixture_of(arch), torch.randn(3, 8, arch.dim, dtype=torch.float64)
    mixture = mlp.router.mixture
    counted_BT = torch.rand(3, 8) < 0.8
    mlp.router.coefficients = RouterLosses(balance=0.3, z=0.7)
    aux = mlp(x_BTD, counted_BT).aux
    balance = z = 0.0
    for x_TD, counted_T in zip(x_BTD, counted_BT, strict=True):
        # DeepSeek-V3, equations 17 to 20, for the tokens of one sequence, times their number.
        routing = mlp.router(x_TD[counted_T])
        tokens = len(routing.logits_NE)
        scores = routing.scores_NE / routing.scores_NE.sum(1, keepdim=True)
        times = routing.experts_NK.flatten().bincount(minlength=mixture.experts)
        share = times * mixture.experts / (mixture.per_token * tokens)
        balance += tokens * (share * scores.mean(0)).sum()
        z += routing.logits_NE.logsumexp(1).square().sum()
    torch.testing.assert_close(aux["balance_loss"], 0.3 * balance)
    torch.testing.assert_close(aux["router_z_loss"], 0.7 * z)


def test_the_correction_changes_the_choice_and_not_the_weights() -> None:
    arch = tiny_architecture("dots1")
    mlp, x_ND = mixture_of(arch), torch.randn(50, arch.dim, dtype=torch.float64)
    router = mlp.router
    assert router.balance is not None
    with torch.no_grad():
        # In one group with it, so that it is a candidate wherever its group is chosen.
        router.balance.zero_()[3] = 10.0
    routing = router(x_ND)
    assert (routing.experts_NK == 3).any(1).all()
    chosen = routing.scores_NE.gather(1, routing.experts_NK)
    weights = router.mixture.scale * chosen / chosen.sum(1, keepdim=True)
    torch.testing.assert_close(routing.weights_NK, weights)
    assert mlp.to(torch.bfloat16).router.balance.dtype == torch.float32


def test_products_of_no_rows_are_empty() -> None:
    weight = torch.randn(3, 4, 5, requires_grad=True)
    out = grouped_linear(torch.zeros(0, 5), weight, torch.zeros(3, dtype=torch.int32))
    assert out.shape == (0, 4)
    out.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_grouped_products_are_those_of_the_kernel_for_gpus() -> None:
    x, weight = torch.randn(9, 16).bfloat16(), torch.randn(3, 8, 16).bfloat16()
    ends = torch.tensor([4, 4, 9], dtype=torch.int32)
    theirs = F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    torch.testing.assert_close(grouped_linear(x, weight, ends), theirs)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(grouped_linear(x.float(), weight.float(), ends).float(), theirs.float())
