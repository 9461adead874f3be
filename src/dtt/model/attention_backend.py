"""Attention backends: one `AttentionFn` for each layer and forward pass.

Shapes: B sequences, T tokens, S tokens in a cache or on all ranks that share a sequence, H query
heads, G key/value heads, K head_dim.

Plain causal attention uses SDPA. Document masks and sliding windows use block-sparse attention:
SDPA tile by tile on a CPU, FlexAttention on a GPU. Both skip masked blocks and never materialise a
[T, T] mask. All also support queries that are a part of the sequence (context parallelism).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dtt.config.train import AttentionKernel
from dtt.mesh.compilation import compiler
from dtt.model.architecture import AnyArchitecture, Architecture, BuiltArchitecture
from dtt.model.block_sparse import tiled_attention
from dtt.model.chunked_attention import Chunked, Kernel, chunk_kernel
from dtt.model.sdpa import (
    WITH_A_MASK,
    AttentionFn,
    Kernels,
    grouped_heads,
    running_kernel,
    sdpa,
)

T = TypeVar("T")
Backend = Literal["SDPA", "block-sparse SDPA", "FlexAttention"]
EAGER_MASK = 128
"""Sequence length in tokens up to which the block mask is created uncompiled: it is at most one
block."""

WARPS = 8
"""Warps of FlexAttention's kernels on Hopper, by measurement on an H200.

With torch's four, a thread has more numbers of a tile than its 255 registers hold, and spills them.
At a head width of 64 that takes 9 % of the time of both passes, at 128 nothing. At 192 and 256
eight warps make the backward pass faster, by a third, and the forward pass slower, by half."""


def kernel_options(width: int, hopper: bool) -> dict[str, int]:
    """Return the options of FlexAttention's kernels for a head width."""
    options: dict[str, int] = {}
    if hopper:
        options["bwd_num_warps"] = WARPS
        if width <= 128 or width > 256:
            options["fwd_num_warps"] = WARPS
    if width > 256:
        # Computed as if of 512. With torch's three stages, a tile of queries and three of keys and
        # values take 263,168 bytes of shared memory, and a block of an H100 has 232,448: the kernel
        # would fail at its first launch.
        options["fwd_num_stages"] = 1
    return options


def choose(
    device: torch.device,
    seq_len: int,
    documents: bool,
    window: int | None,
    by_sdpa: bool = True,
) -> Backend:
    """Return the attention backend for `seq_len` tokens, with separate documents or a window.

    `by_sdpa`: SDPA has a kernel for plain causal attention of this rank's tokens.
    """
    # A window that covers the sequence limits nothing.
    if by_sdpa and not documents and (window is None or window >= seq_len):
        return "SDPA"
    return "FlexAttention" if device.type == "cuda" else "block-sparse SDPA"


def describe(
    arch: AnyArchitecture,
    device: torch.device,
    seq_len: int,
    documents: bool,
    context: int = 1,
    *,
    requested: AttentionKernel = "auto",
    dtype: torch.dtype = torch.float32,
) -> str:
    """Return one line for the log that names the backend of each layer.

    `context` ranks share each sequence. Raises EnvironmentUnfit if `requested` cannot compute plain
    causal attention of these sizes in `dtype`.
    """
    if isinstance(arch, BuiltArchitecture):
        return f"attention: as {arch.family} computes it"
    plain: str | None = None
    if any(choose(device, seq_len, documents, window) == "SDPA" for window in arch.windows):
        if context == 1:
            plain = f"SDPA ({running_kernel(arch, device, seq_len, requested, dtype)})"
        elif kernel := chunk_kernel(arch, device, seq_len // (2 * context), requested, dtype):
            plain = f"SDPA ({kernel}) by chunks"
    layers: Counter[str] = Counter()
    for window in arch.windows:
        backend = choose(device, seq_len, documents, window, plain is not None)
        limits = ["documents"] * documents
        if window is not None and window < seq_len:
            limits.append(f"a window of {window}")
        if backend == "SDPA" and plain:
            layers[plain] += 1
        else:
            layers[f"{backend} within {' and '.join(limits)}" if limits else backend] += 1
    if len(layers) == 1:
        return f"attention: {next(iter(layers))}"
    parts = (f"{what} ({n} of {arch.n_layers} layers)" for what, n in layers.items())
    return f"attention: {', '.join(parts)}"


def by_window(windows: Sequence[int | None], make: Callable[[int | None], T]) -> list[T]:
    """Return what `make` returns for the window of each layer; layers with the same share it."""
    made = {window: make(window) for window in set(windows)}
    return [made[window] for window in windows]


def make_context_attention_fns(
    arch: Architecture,
    tokens_BS: Tensor,
    doc_ids_BS: Tensor | None,
    chunks: Sequence[range],
    gather: Callable[[Tensor], Tensor],
    requested: AttentionKernel = "auto",
    dtype: torch.dtype = torch.float32,
) -> list[AttentionFn]:
    """Return the attention function of each layer under context parallelism.

    This rank holds `chunks`, all of the same length, given as ranges of positions among the S
    tokens. `gather` all-gathers a tensor [..., T, K] to [..., S, K], in the order of the tokens.
    `dtype` is that of queries, keys and values.
    """
    device, (_, seq_len) = tokens_BS.device, tokens_BS.shape
    kernel = None
    if any(choose(device, seq_len, doc_ids_BS is not None, w) == "SDPA" for w in arch.windows):
        kernel = chunk_kernel(arch, device, len(chunks[0]), requested, dtype)
    return by_window(
        arch.windows,
        lambda w: Gathered(
            gather,
            attention_within(arch.attn_scale, w, tokens_BS, doc_ids_BS, (), chunks, kernel),
        ),
    )


def attention_within(
    scale: float,
    window: int | None,
    tokens_BS: Tensor,
    doc_ids_BS: Tensor | None,
    allowed: Kernels = (),
    chunks: Sequence[range] | None = None,
    kernel: Kernel | None = None,
) -> AttentionFn:
    """Return causal attention within documents and a window, by the kernels `allowed`.

    The queries are all tokens, or with `chunks` those at some positions, for which there may be a
    `kernel` of SDPA.
    """
    starts = (0,) if chunks is None else tuple(chunk.start for chunk in chunks)
    by_sdpa = chunks is None or kernel is not None
    documents = doc_ids_BS is not None
    match choose(tokens_BS.device, tokens_BS.shape[1], documents, window, by_sdpa):
        case "SDPA":
            if kernel:
                return Chunked(scale, starts, kernel)
            return partial(sdpa, allowed=allowed, scale=scale, is_causal=True)
        case "block-sparse SDPA":
            return partial(
                tiled_attention, doc_ids_BS=doc_ids_BS, window=window, scale=scale, starts=starts
            )
        case "FlexAttention":
            return flex(scale, tokens_BS, doc_ids_BS, window, chunks)


@dataclass(frozen=True)
class Flex:
    """Block-sparse attention on a GPU with FlexAttention (Dong et al., 2024).

    If FlexAttention cannot be compiled, it uses SDPA with a dense mask.
    """

    scale: float
    rule: Callable[..., Tensor]
    """`mask_mod` function of FlexAttention."""
    shape: tuple[int, int, int]
    """Number of sequences with their own mask (1: all share one), of queries, and of keys."""
    device: torch.device
    block_mask: Any
    """FlexAttention's `BlockMask`; None if it could not be compiled."""
    hopper: bool = False
    """True to use the kernels' options for Hopper."""

    def __call__(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        """Compute attention; see `AttentionFn`."""
        if compiler.failure:
            return self.dense(q_BHTK, k_BGTK, v_BGTK)
        # Inside a compiled block FlexAttention is traced into the block's graph and needs no
        # compilation of its own. Dynamo would warn of the cache of `_compiled_flex`.
        kernel = _flex() if torch.compiler.is_compiling() else _compiled_flex()
        width = q_BHTK.shape[-1]
        # Zeros add nothing to q kᵀ, and `scale` is given: the default would follow the padded
        # width.
        if width < 16:  # the kernels need a head_dim of at least 16
            q_BHTK, k_BGTK, v_BGTK = (F.pad(x, (0, 16 - width)) for x in (q_BHTK, k_BGTK, v_BGTK))
        out_BHTK: Any = kernel(
            q_BHTK,
            k_BGTK,
            v_BGTK,
            block_mask=self.block_mask,
            scale=self.scale,
            enable_gqa=grouped_heads(q_BHTK, k_BGTK),
            kernel_options=kernel_options(width, self.hopper),
        )
        if out_BHTK is None:  # compilation failed in this call
            out_BHTK = self.dense(q_BHTK, k_BGTK, v_BGTK)
        narrowed: Tensor = out_BHTK[..., :width]
        return narrowed

    def dense(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        """Compute attention with SDPA and a boolean mask [T, S]: slower, but equally exact.

        FlexAttention without compilation would instead materialise the scores of all heads in fp32.
        """
        return sdpa(q_BHTK, k_BGTK, v_BGTK, WITH_A_MASK, scale=self.scale, attn_mask=self.mask)

    @cached_property
    def mask(self) -> Tensor:
        """Boolean mask [B or 1, 1, T, S]: True where the query may attend to the key."""
        rows, queries, keys = (torch.arange(n, device=self.device) for n in self.shape)
        seen = self.rule(rows[:, None, None], rows[0], queries[:, None], keys)
        return seen.expand(self.shape)[:, None]


def flex(
    scale: float,
    tokens_BS: Tensor,
    doc_ids_BS: Tensor | None,
    window: int | None,
    chunks: Sequence[range] | None = None,
) -> Flex:
    """Build a `Flex` with the block mask, which lets the kernels skip fully masked blocks.

    `chunks`: positions of the queries among the S tokens, if the queries are only a part of them.
    """
    rows, length = tokens_BS.shape
    positions_T = None
    if chunks is not None:
        ranges = (torch.arange(c.start, c.stop, device=tokens_BS.device) for c in chunks)
        positions_T = torch.cat(list(ranges))
    rule = visible(doc_ids_BS, window, positions_T)
    queries = length if positions_T is None else len(positions_T)
    shape = (1 if doc_ids_BS is None else rows, queries, length)
    return flex_with(rule, scale, shape, tokens_BS.device, own_masks=doc_ids_BS is not None)


def flex_with(
    rule: Callable[..., Tensor],
    scale: float,
    shape: tuple[int, int, int],
    device: torch.device,
    *,
    own_masks: bool = False,
) -> Flex:
    """Build a `Flex` with the `mask_mod` function `rule`; the shape is that of `Flex`.

    `own_masks`: the rule depends on the sequence.
    """
    block_mask = None
    if not compiler.failure:
        rows, queries, keys = shape
        create = _block_mask_maker(compiled=keys > EAGER_MASK)
        # None instead of a number of rows or heads makes the mask one for all of them: building it
        # then costs 1/B or 1/H of the time and memory.
        block_mask = create(rule, rows if own_masks else None, None, queries, keys, device=device)
    # Below 128 queries another kernel computes, with tiles of its own. AMD's GPUs have a capability
    # of 9, too.
    tiled = device.type == "cuda" and torch.version.hip is None and shape[1] >= 128
    hopper = tiled and torch.cuda.get_device_capability(device)[0] == 9
    return Flex(scale, rule, shape, device, block_mask, hopper)


def visible(
    doc_ids_BS: Tensor | None, window: int | None, positions_T: Tensor | None = None
) -> Callable[..., Tensor]:
    """Return FlexAttention's `mask_mod`: True if query `q` of sequence `b` may attend to key `k`.

    A token attends to itself and to earlier tokens, limited by the window and its document.
    `doc_ids_BS` holds the document id of each token; documents are contiguous. Query `q` is at
    position `positions_T[q]`, or at q without `positions_T`.
    """

    def mask_mod(b: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if positions_T is not None:
            q = positions_T[q]
        seen = k <= q
        if window is not None:
            seen = seen & (k > q - window)
        if doc_ids_BS is not None:
            seen = seen & (doc_ids_BS[b, q] == doc_ids_BS[b, k])
        return seen

    return mask_mod


def _flex() -> Any:
    """Return FlexAttention."""
    # imported only where used: the import is slow
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@cache
def _compiled_flex() -> Any:
    """Return FlexAttention, compiled separately; it returns None if compilation fails.

    Uncompiled, FlexAttention would materialise all [T, T] scores.
    """
    return compiler.compiled(_flex(), otherwise=_nothing)


@cache
def _block_mask_maker(*, compiled: bool) -> Callable[..., Any]:
    """Return `create_block_mask`, compiled on request.

    Compiled, it needs no memory for a [T, T] mask, and returns None if compilation fails.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    return (
        compiler.compiled(create_block_mask, otherwise=_nothing) if compiled else create_block_mask
    )


def _nothing(*_: object, **__: object) -> None:
    """Return None, in place of a function that could not be compiled."""


@dataclass(frozen=True)
class Gathered:
    """Attention from this rank's tokens to those of all ranks that share the sequence.

    Keys and values are all-gathered before attention instead of passed around a ring (Llama 3,
    arXiv 2407.21783, section 3.3.2): with grouped heads they are small, and every attention kernel
    works unchanged.
    """

    gather: Callable[[Tensor], Tensor]
    attention_fn: AttentionFn

    def __call__(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        """Compute attention; see `AttentionFn`."""
        # Stacked to [2, B, G, T, K], so that a layer waits for one all-gather instead of two.
        k_BGSK, v_BGSK = self.gather(torch.stack((k_BGTK, v_BGTK)))
        return self.attention_fn(q_BHTK, k_BGSK, v_BGSK)
