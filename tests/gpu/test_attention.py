"""Attention on a GPU equals a dense mask, and the kernel that is named is the one that runs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.dense_attention import (
    SCALE,
    assert_the_same,
    chunks_of,
    dense,
    documents_of,
    heads,
    may_attend,
)
from support.sdpa_kernels import arch, kernels_run
from support.tiny_architectures import DOCUMENTS, VARIANTS, alone, make, tiny_architecture

from dtt.base.errors import EnvironmentUnfit
from dtt.config.train import AttentionKernel
from dtt.model import attention_backend, sdpa
from dtt.model.chunked_attention import Chunked, chunk_kernel

GPU = torch.device("cuda")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("window", "share"), [(None, None), (30, None), (None, 0.03), (30, 0.03)])
def test_some_queries_give_their_rows_of_a_dense_mask(
    window: int | None, share: float | None, rank: int
) -> None:
    torch.manual_seed(1)
    arch = dataclasses.replace(tiny_architecture("mistral"), windows=(window,), attn_scale=SCALE)
    q, k, v = (x.detach().cuda().requires_grad_() for x in heads(2, 800, 4, 2, 64))
    documents = None if share is None else documents_of(2, 800, share)
    chunks = chunks_of(rank, 2, 200)
    tokens = torch.zeros(2, 800, device="cuda")
    on_gpu = None if documents is None else documents.cuda()
    (made,) = attention_backend.make_context_attention_fns(
        arch, tokens, on_gpu, chunks, lambda x: x
    )
    places = [place for chunk in chunks for place in chunk]
    got = made(q[:, :, places], k, v)
    expected = dense(q, k, v, may_attend(800, documents, window))[:, :, places]
    assert_the_same(got, expected, (q, k, v), 1e-3)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("asked", ["auto", "flash"])
def test_chunks_by_sdpa_equal_a_dense_mask(asked: AttentionKernel, rank: int) -> None:
    torch.manual_seed(1)
    q, k, v = (x.detach().cuda().bfloat16().requires_grad_() for x in heads(2, 800, 4, 2, 64))
    chunks = chunks_of(rank, 2, 200)
    places = [place for chunk in chunks for place in chunk]
    kernel = chunk_kernel(arch(), GPU, 200, asked, torch.bfloat16)
    assert kernel is not None
    starts = tuple(chunk.start for chunk in chunks)
    got = Chunked(SCALE, starts, kernel)(q[:, :, places], k, v)
    expected = dense(q.double(), k.double(), v.double(), may_attend(800, None, None))
    assert_the_same(got, expected[:, :, places].bfloat16(), (q, k, v), 4e-2)


@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize(("window", "share"), [(30, None), (None, 0.03), (30, 0.03)])
def test_documents_and_windows_are_those_of_a_dense_mask(
    window: int | None, share: float | None, width: int
) -> None:
    torch.manual_seed(1)
    q, k, v = (x.detach().cuda().requires_grad_() for x in heads(2, 200, 4, 2, width))
    documents = None if share is None else documents_of(2, 200, share)
    tokens = torch.zeros(2, 200, device="cuda")
    on_gpu = None if documents is None else documents.cuda()
    got = attention_backend.flex(SCALE, tokens, on_gpu, window)(q, k, v)
    assert_the_same(got, dense(q, k, v, may_attend(200, documents, window)), (q, k, v), 1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("asked", ["auto", "cudnn", "flash", "efficient", "math"])
def test_the_kernel_that_is_named_runs(asked: AttentionKernel, dtype: torch.dtype) -> None:
    try:
        named = sdpa.running_kernel(arch(), GPU, 64, asked, dtype)
    except EnvironmentUnfit:
        assert asked in ("cudnn", "flash")
        return
    assert kernels_run(GPU, dtype, asked) == {named.replace("FlashAttention 3", "flash")}


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_logits_are_those_of_each_document_alone(variant: str) -> None:
    arch = tiny_architecture(variant)
    model, tokens = make(dataclasses.replace(arch, dropout=0.0))
    on_gpu = model.cuda()(tokens.cuda(), doc_ids_BT=DOCUMENTS.cuda()).cpu()
    torch.testing.assert_close(on_gpu, alone(model.cpu(), tokens), rtol=1e-3, atol=1e-3)
