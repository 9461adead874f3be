"""Weights in 4 bits: the values of bitsandbytes, gradients, and shapes that are refused."""

from __future__ import annotations

import pytest
import torch
from support.bitsandbytes_values import of_bitsandbytes
from support.quantized import rounded
from support.tiny_architectures import tiny_architecture

from dtt.base.errors import ConfigError
from dtt.config.adapter import LoraConfig
from dtt.model.decoder import Decoder
from dtt.model.lora import attach
from dtt.model.nf4 import Nf4Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(256, 512), (3, 64), (100, 192)], ids=str)
def test_values_are_those_of_bitsandbytes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight[1] = 0.0
    assert rounded(weight.to(dtype)).equal(of_bitsandbytes(weight.to(dtype)))


def test_a_layer_has_the_products_and_gradients_of_its_values() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(128, 8)
    values, x = plain.weight.detach(), torch.randn(5, 128, requires_grad=True)
    layer = Nf4Linear(plain)
    layer.fill(values)
    out = layer(x)
    expected = x @ rounded(values).T + plain.bias
    torch.testing.assert_close(out, expected)
    ours, theirs = (torch.autograd.grad(one.square().sum(), x)[0] for one in (out, expected))
    torch.testing.assert_close(ours, theirs)


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="nf4 needs a multiple of 64"):
        attach(Decoder(tiny_architecture("llama")), LoraConfig(base="nf4"), torch.float32)
