"""Mixtures of experts on a GPU: products by one kernel for all experts, and resumes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from support.gpu_runs import SIZES, train, values
from support.running import Dtt

from dtt.model.linear import grouped_linear

COUNTS = ([40, 0, 1, 87], [128, 0, 0, 0], [0, 0, 0, 128])
"""Rows of each of four experts."""
MIXTURE = ("model.family=qwen3_moe", "model.n_experts=4", "model.experts_per_token=2")


@pytest.mark.parametrize("width", [64, 60], ids=["one kernel", "a loop"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_products_of_experts_are_those_of_each_by_itself(counts: list[int], width: int) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(size, device="cuda") for size in ((128, 32), (4, width, 32))]
    inputs = [x.bfloat16().requires_grad_() for x in inputs]
    factor = torch.randn(128, width, device="cuda").bfloat16()
    ends = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
    found = grouped_linear(*inputs, ends)
    rows, weight = (x.detach().double().requires_grad_() for x in inputs)
    experts = zip(rows.split(counts), weight, strict=True)
    expected = torch.cat([x @ w.T for x, w in experts])
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)
    theirs = torch.autograd.grad((expected * factor.double()).sum(), (rows, weight))
    mine = torch.autograd.grad((found * factor).sum(), inputs)
    for gradient, exact in zip(mine, theirs, strict=True):
        torch.testing.assert_close(gradient.double(), exact, rtol=1e-2, atol=4e-2)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_compiled_mixture_resumes_as_it_would_have_continued(
    dtt: Dtt, tokens: Path, device: str, precision: str
) -> None:
    common = (
        f"data.tokens={tokens}", f"train.device={device}", f"train.precision={precision}", *SIZES,
        *MIXTURE, "model.expert_ffn_dim=32", "train.balance_loss=0.01",
    )  # fmt: skip
    log = train(dtt, 1, *common, "name=whole", "train.steps=4")
    log += train(dtt, 1, *common, "name=parts", "train.steps=2")
    log += train(dtt, 1, "jobs/parts", "train.steps=4", "--allow-change", "train.steps")
    train(dtt, 1, *common, "name=eager", "train.compile=false", "train.steps=4")
    assert "training continues uncompiled" not in log
    assert len(re.findall("resumed from", log)) == 1
    assert values(dtt, "parts", "train") == values(dtt, "whole", "train")
    tolerance = {"bf16": 5e-3, "fp32": 1e-4}[precision]
    assert values(dtt, "whole", "train") == pytest.approx(
        values(dtt, "eager", "train"), rel=tolerance
    )
