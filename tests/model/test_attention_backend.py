"""Attention within documents and windows, against a dense mask that is written here."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.dense_attention import (
    SCALE,
    assert_the_same,
    chunks_of,
    dense,
    documents_of,
    heads,
    may_attend,
)
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dtt.config.model import ModelConfig
from dtt.mesh.compilation import compiler
from dtt.model import attention_backend, chunked_attention, families
from dtt.model.architecture import Architecture
from dtt.model.block_sparse import TILE, tiled_attention
from dtt.model.decoder import Decoder
from dtt.model.decoding import following_context, prompt_context
from dtt.model.init import initialize
from dtt.model.kv_cache import KVCache

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@given(
    seed=st.integers(0, 999),
    rows=st.integers(1, 3),
    length=st.integers(1, 2 * TILE + 40),
    window=st.none() | st.integers(1, TILE + 20),
    share=st.none() | st.sampled_from([0.005, 0.05, 0.6]),
    groups=st.sampled_from([(4, 4), (4, 2), (3, 1)]),
)
@settings(max_examples=40)
def test_tiles_equal_a_dense_mask_in_output_and_gradients(
    seed: int,
    rows: int,
    length: int,
    window: int | None,
    share: float | None,
    groups: tuple[int, int],
) -> None:
    torch.manual_seed(seed)
    q, k, v = heads(rows, length, *groups)
    documents = None if share is None else documents_of(rows, length, share)
    got = tiled_attention(q, k, v, documents, window, SCALE)
    expected = dense(q, k, v, may_attend(length, documents, window))
    assert_the_same(got, expected, (q, k, v), 1e-5)


@given(
    seed=st.integers(0, 999),
    rank=st.integers(0, 2),
    length=st.integers(1, TILE + 20),
    window=st.none() | st.integers(1, 3 * TILE),
    share=st.none() | st.sampled_from([0.005, 0.05, 0.6]),
)
@settings(max_examples=40)
def test_tiles_of_some_queries_give_their_rows_of_a_dense_mask(
    seed: int, rank: int, length: int, window: int | None, share: float | None
) -> None:
    torch.manual_seed(seed)
    q, k, v = heads(2, 6 * length, 4, 2)
    documents = None if share is None else documents_of(2, 6 * length, share)
    chunks = chunks_of(rank, 3, length)
    places = [place for chunk in chunks for place in chunk]
    starts = [chunk.start for chunk in chunks]
    got = tiled_attention(q[:, :, places], k, v, documents, window, SCALE, starts)
    expected = dense(q, k, v, may_attend(6 * length, documents, window))[:, :, places]
    assert_the_same(got, expected, (q, k, v), 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 4e-2)])
def test_tiles_take_every_precision_of_training(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in heads(2, 300, 4, 2))
    documents = documents_of(2, 300, 0.01)
    got = tiled_attention(q, k, v, documents, 40, SCALE)
    mask = may_attend(300, documents, 40)
    expected = dense(q.double(), k.double(), v.double(), mask).to(dtype)
    assert_the_same(got, expected, (q, k, v), tolerance)


def test_tiles_accept_heads_with_strides() -> None:
    """As they do where RoPE has joined halves of one number, and in the gradient of a sum."""
    q, k, v = (x.detach().mT.contiguous().mT.requires_grad_() for x in heads(2, 40, 4, 2))
    assert q.stride(-1) != 1
    got, expected = (
        attention.sum()
        for attention in (
            tiled_attention(q, k, v, None, 7, SCALE),
            dense(q, k, v, may_attend(40, None, 7)),
        )
    )
    assert_the_same(got, expected, (q, k, v), 1e-5)


def test_the_operators_are_what_torch_expects_of_one() -> None:
    q, k, v = heads(2, 300, 4, 2)
    some = q.detach()[:, :, :100].requires_grad_()
    arguments = (some, k, v, documents_of(2, 300, 0.01), 100, SCALE, [50, 200])
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.dtt.tiled_attention.default, arguments, test_utils=checks)


MEMORY = """
import resource, torch
from dtt.model.block_sparse import tiled_attention

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def run(length):
    q = torch.randn(1, 1, length, 16, requires_grad=True)
    documents = (torch.arange(length) // 500)[None]
    for limits in ((None, 256), (documents, None), (documents, 256)):
        tiled_attention(q, q, q, *limits, 0.25).sum().backward()
    some, starts = q[:, :, : length // 4], (length // 8, length // 4 * 3)
    tiled_attention(some, q, q, None, None, 0.25, starts).sum().backward()

run(600)
before = peak()
run(16384)
print(peak() - before)
"""


@pytest.mark.slow
def test_memory_at_16_thousand_tokens_is_an_eighth_of_what_a_mask_would_take() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 16384**2 / 2**20 / 8


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("share", [None, 0.03])
@torch.no_grad()
def test_flex_attention_equals_tiles(window: int | None, share: float | None) -> None:
    torch.manual_seed(1)
    q, k, v = (x.detach() for x in heads(2, 200, 4, 2))
    documents = None if share is None else documents_of(2, 200, share)
    rule = attention_backend.visible(documents, window)
    blocks = create_block_mask(rule, 2, None, 200, 200, device="cpu", BLOCK_SIZE=16)
    got = flex_attention(q, k, v, block_mask=blocks, scale=SCALE, enable_gqa=True)
    assert isinstance(got, Tensor)
    torch.testing.assert_close(got, tiled_attention(q, k, v, documents, window, SCALE))


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is compiled yet, and nothing has failed to."""
    monkeypatch.setattr(compiler, "failure", "")
    for made in (attention_backend._compiled_flex, attention_backend._block_mask_maker):
        made.cache_clear()
    torch.compiler.reset()
    yield
    for made in (attention_backend._compiled_flex, attention_backend._block_mask_maker):
        made.cache_clear()
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
@torch.no_grad()
def test_every_length_of_flex_attention_is_compiled_with_static_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs = []

    def record(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        assert not any(isinstance(i, torch.SymInt) for i in inputs)
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=record))
    counts = []
    for length in (64, 128, 256, 1024, 256):
        q, k, v = (x.detach() for x in heads(2, length, 4, 2, 16))
        documents = documents_of(2, length, 0.03)
        got = attention_backend.flex(SCALE, torch.zeros(2, length), documents, 50)(q, k, v)
        torch.testing.assert_close(got, tiled_attention(q, k, v, documents, 50, SCALE))
        counts.append(len(graphs))
    # The kernel for each length; from 256 on a mask, too, which is compiled for all documents.
    assert counts == [1, 2, 4, 6, 6]


@pytest.mark.slow(except_for=["100-None-None"])
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("length", "window", "share"),
    [(100, None, None), (200, 30, None), (200, None, 0.03), (100, 30, 0.03)],
)
def test_flex_attention_that_cannot_be_compiled_warns_and_uses_a_dense_mask(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    length: int,
    window: int | None,
    share: float | None,
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no valid Triton configuration")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=fail))
    chunks = chunks_of(0, 2, length // 4)
    places = torch.tensor([place for chunk in chunks for place in chunk])
    documents = None if share is None else documents_of(2, length, share)
    arch = dataclasses.replace(windowed(window), attn_scale=SCALE)
    monkeypatch.setattr(attention_backend, "choose", lambda *_, **__: "FlexAttention")
    q, k, v = heads(2, length, 4, 2)
    tokens = torch.zeros(2, length)
    (made,) = attention_backend.make_context_attention_fns(
        arch, tokens, documents, chunks, lambda x: x
    )
    expected = dense(q, k, v, may_attend(length, documents, window))[:, :, places]
    with torch.no_grad():  # FlexAttention refuses gradients on a CPU before it is compiled
        torch.testing.assert_close(made(q[:, :, places], k, v), expected)
    assert_the_same(made(q[:, :, places], k, v), expected, (q, k, v), 1e-5)
    (said,) = [r.getMessage() for r in caplog.records if r.name == "dtt"]
    assert said.startswith("training continues uncompiled: ")
    assert "no valid Triton configuration" in said


PART = "block-sparse SDPA within a window of 16"


@pytest.mark.parametrize(
    ("device", "windows", "length", "documents", "context", "expected"),
    [
        (CPU, [None], 100, False, 1, "SDPA (flash)"),
        (CPU, [16, 16, None], 16, False, 1, "SDPA (flash)"),
        (
            CPU, [16, 16, None], 64, False, 1,
            f"{PART} (2 of 3 layers), SDPA (flash) (1 of 3 layers)",
        ),
        (CPU, [None], 100, True, 1, "block-sparse SDPA within documents"),
        (GPU, [100], 101, False, 1, "FlexAttention within a window of 100"),
        (GPU, [None], 100, True, 1, "FlexAttention within documents"),
        (GPU, [16], 64, True, 1, "FlexAttention within documents and a window of 16"),
        # Ranks that share a sequence use SDPA, too, unless something limits attention.
        (CPU, [16, None], 16, False, 2, "SDPA (flash for CPUs) by chunks"),
        (
            CPU, [16, None], 32, False, 2,
            f"{PART} (1 of 2 layers), SDPA (flash for CPUs) by chunks (1 of 2 layers)",
        ),
        (CPU, [16, None], 16, True, 2, "block-sparse SDPA within documents"),
    ],
)  # fmt: skip
def test_the_backend_of_each_kind_of_layer_is_described(
    device: torch.device,
    windows: list[int | None],
    length: int,
    documents: bool,
    context: int,
    expected: str,
) -> None:
    described = attention_backend.describe(windowed(*windows), device, length, documents, context)
    assert described == f"attention: {expected}"


def test_plain_causal_attention_is_left_to_sdpa_where_it_has_a_kernel() -> None:
    assert attention_backend.choose(GPU, 100, False, 100) == "SDPA"
    assert attention_backend.choose(GPU, 100, False, 100, by_sdpa=False) == "FlexAttention"


@pytest.mark.parametrize(
    ("name", "width", "kernel"),
    [
        ("cudnn", 16, "cudnn"),
        ("FlashAttention 3", 16, "flash"),
        ("efficient", 16, None),
        ("cudnn", 12, None),
    ],
)
def test_chunks_take_the_kernel_of_whole_sequences_if_it_gives_a_logsumexp(
    monkeypatch: pytest.MonkeyPatch, name: str, width: int, kernel: str | None
) -> None:
    monkeypatch.setattr(chunked_attention, "running_kernel", lambda *_: name)
    arch = dataclasses.replace(windowed(None), head_dim=width)
    assert chunked_attention.chunk_kernel(arch, GPU, 16, "auto", torch.bfloat16) == kernel
    described = attention_backend.describe(arch, GPU, 16, False, context=2)
    assert described == f"attention: {f'SDPA ({kernel}) by chunks' if kernel else 'FlexAttention'}"


def windowed(*windows: int | None) -> Architecture:
    cfg = ModelConfig(family="mistral", dim=32, n_layers=len(windows), n_heads=4, n_kv_heads=2)
    arch = families.get("mistral").architecture(cfg, 100, 64)
    return dataclasses.replace(arch, windows=windows)


@torch.no_grad()
def test_a_kernel_chosen_for_training_does_not_limit_generation() -> None:
    """cuDNN's, which computes nothing on a CPU, stands for one that refuses fp32 on a GPU."""
    model = Decoder(windowed(None))
    initialize(model, seed=1)
    prompt = torch.randint(100, (1, 8))
    expected = model(prompt)[:, -1:]
    model.attention = "cudnn"
    with pytest.raises(RuntimeError):
        model(prompt)
    cache = KVCache(model.arch, 1, 9, CPU, torch.float32)
    context = prompt_context(model.arch, prompt, torch.tensor([7]), cache)
    torch.testing.assert_close(model(prompt, context=context), expected)
    cache.set_lengths([8])
    following = following_context(model.arch, prompt[:, :1], cache)
    assert model(prompt[:, :1], context=following).isfinite().all()


@pytest.mark.slow
def test_a_compiled_block_serves_the_documents_of_every_batch() -> None:
    model = Decoder(windowed(16))
    initialize(model, seed=1)
    compiled = Decoder(model.arch)
    compiled.load_state_dict(model.state_dict())
    torch.compiler.reset()
    for layer in compiled.layers:
        layer.compile(dynamic=False, backend="aot_eager", fullgraph=True)
    tokens = torch.randint(100, (2, 64))
    compiled(tokens, tokens, doc_ids_BT=documents_of(2, 64, 0.1)).loss.backward()
    for share in (0.02, 0.5):
        documents = documents_of(2, 64, share)
        with torch.compiler.set_stance("fail_on_recompile"):
            got = compiled(tokens, tokens, doc_ids_BT=documents).loss
        torch.testing.assert_close(got, model(tokens, tokens, doc_ids_BT=documents).loss)
