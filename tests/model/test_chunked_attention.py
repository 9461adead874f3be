"""Causal attention of chunks of a sequence, against a dense mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.dense_attention import SCALE, assert_the_same, chunks_of, dense, heads, may_attend
from torch import Tensor

from dtt.model.chunked_attention import Chunked


def pair(
    rank: int, ranks: int, length: int, dtype: torch.dtype, groups: tuple[int, int]
) -> tuple[tuple[Tensor, ...], Chunked, list[int], Tensor]:
    """Inputs, attention of a rank's two chunks, and their rows of dense attention in fp64."""
    total = 2 * ranks * length
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in heads(2, total, *groups))
    chunks = chunks_of(rank, ranks, length)
    places = [place for chunk in chunks for place in chunk]
    attend = Chunked(SCALE, tuple(chunk.start for chunk in chunks), "flash for CPUs")
    expected = dense(q.double(), k.double(), v.double(), may_attend(total, None, None))
    return (q, k, v), attend, places, expected[:, :, places].to(dtype)


@given(
    seed=st.integers(0, 999),
    rank=st.integers(0, 3),
    length=st.integers(1, 150),
    groups=st.sampled_from([(4, 4), (4, 2), (3, 1)]),
)
@settings(max_examples=40)
def test_chunks_equal_a_dense_mask_in_output_and_gradients(
    seed: int, rank: int, length: int, groups: tuple[int, int]
) -> None:
    torch.manual_seed(seed)
    (q, k, v), attend, places, expected = pair(rank, 4, length, torch.float64, groups)
    assert_the_same(attend(q[:, :, places], k, v), expected, (q, k, v), 1e-12)


def test_chunks_in_bf16_are_rounded_as_often_as_attention_is() -> None:
    torch.manual_seed(0)
    (q, k, v), attend, places, expected = pair(1, 2, 100, torch.bfloat16, (4, 2))
    assert_the_same(attend(q[:, :, places], k, v), expected, (q, k, v), 4e-2)


def test_chunks_accept_heads_and_gradients_with_strides() -> None:
    torch.manual_seed(0)
    inputs, attend, places, expected = pair(1, 2, 30, torch.float64, (4, 2))
    q, k, v = (x.mT.contiguous().mT for x in inputs)
    assert k.stride(-1) != 1
    # The gradient of a sum has strides of 0.
    got, wanted = attend(q[:, :, places], k, v).sum(), expected.sum()
    assert_the_same(got, wanted, inputs, 1e-12)


@pytest.mark.slow
def test_chunks_are_compiled_whole_for_both_passes() -> None:
    torch.manual_seed(0)
    (q, k, v), attend, places, expected = pair(1, 2, 30, torch.float64, (4, 2))

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(2 * q, k, v)

    compiled = torch.compile(block, fullgraph=True, dynamic=False)
    got = compiled(q[:, :, places] / 2, k, v)
    assert_the_same(got, expected, (q, k, v), 1e-12)
