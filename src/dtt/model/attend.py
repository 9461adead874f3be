"""Who attends to whom, and which kernel computes it: one `Attend` for each layer and forward pass.

Shapes: B sequences, T tokens, S tokens in a cache or on all processes that share a sequence,
H query heads, G key/value heads, K head_dim.

Plain causal attention is SDPA's. Documents and windows are skipped, not masked out, by tiles on a
CPU and by FlexAttention on a GPU: no mask has [T, T] numbers. These also attend from a part of the
sequence to all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dtt.config.train import AttentionKernel
from dtt.model.architecture import Architecture
from dtt.model.cache import KVCache
from dtt.model.sdpa import WITH_A_MASK, Kernels, grouped_heads, kernels, running_kernel, sdpa
from dtt.model.tiles import tiled_attention
from dtt.runtime.compilation import compiler

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [B, H, T, K], keys and values [B, G, T, K] to [B, H, T, K]."""

Backend = Literal["SDPA", "SDPA in tiles", "FlexAttention"]
EAGER_MASK = 128
"""Tokens up to which a block mask, at most one block then, is made without compilation."""


def choose(
    device: torch.device, seq_len: int, documents: bool, window: int | None, whole: bool = True
) -> Backend:
    """What computes attention over `seq_len` tokens, in documents of their own or a window.

    `whole`: no other process has some of the tokens.
    """
    if whole and not documents and (window is None or window >= seq_len):
        return "SDPA"
    return "FlexAttention" if device.type == "cuda" else "SDPA in tiles"


def describe(
    arch: Architecture,
    device: torch.device,
    seq_len: int,
    documents: bool,
    whole: bool = True,
    *,
    asked: AttentionKernel = "auto",
    dtype: torch.dtype = torch.float32,
) -> str:
    """Return the choice for each layer in a line, for the start of a run.

    EnvironmentUnfit if `asked` cannot compute plain causal attention of these sizes in `dtype`.
    """
    layers = Counter(
        f"SDPA ({running_kernel(arch, device, seq_len, asked, dtype)})"
        if choose(device, seq_len, documents, window, whole) == "SDPA"
        else _describe(window, device, seq_len, documents, whole)
        for window in arch.windows
    )
    if len(layers) == 1:
        return f"attention: {next(iter(layers))}"
    parts = (f"{what} ({n} of {arch.n_layers} layers)" for what, n in layers.items())
    return f"attention: {', '.join(parts)}"


def _describe(
    window: int | None, device: torch.device, seq_len: int, documents: bool, whole: bool
) -> str:
    backend = choose(device, seq_len, documents, window, whole)
    limits = ["documents"] * documents
    if window is not None and window < seq_len:
        limits.append(f"a window of {window}")
    return f"{backend} within {' and '.join(limits)}" if limits else backend


def attends(
    arch: Architecture,
    tokens_BT: Tensor,
    documents_BT: Tensor | None,
    cache: KVCache | None,
    asked: AttentionKernel = "auto",
) -> list[Attend]:
    """What each layer attends with, in this forward pass; layers with one window share it.

    With a cache that holds tokens, there is one new token. One that holds none takes a prompt.
    """
    if cache is not None and any(cache.lengths):
        if tokens_BT.shape[1] > 1:
            raise ValueError("a cache takes the whole prompt first, then one token at a time")
        masks = {w: _recent(cache, w) for w in set(arch.windows)}
        return [Step(cache, i, arch.attn_scale, *masks[w]) for i, w in enumerate(arch.windows)]
    allowed = kernels(tokens_BT.device, asked, training=cache is None)
    made = {
        w: _attend(arch.attn_scale, tokens_BT, documents_BT, w, allowed=allowed)
        for w in set(arch.windows)
    }
    if cache is not None:
        return [Prompt(cache, i, made[w]) for i, w in enumerate(arch.windows)]
    return [made[w] for w in arch.windows]


def attends_from_chunks(
    arch: Architecture,
    tokens_BS: Tensor,
    documents_BS: Tensor | None,
    chunks: Sequence[range],
    gather: Callable[[Tensor], Tensor],
) -> list[Attend]:
    """What each layer attends with where other processes have other tokens of the same sequences.

    This one has `chunks` of one length, given by their places among the S tokens. `gather` puts
    together what all processes have of a tensor [..., T, K]: [..., S, K], in the tokens' order.
    """
    made = {
        w: Gathered(gather, _attend(arch.attn_scale, tokens_BS, documents_BS, w, chunks))
        for w in set(arch.windows)
    }
    return [made[w] for w in arch.windows]


def _attend(
    scale: float,
    tokens_BS: Tensor,
    documents_BS: Tensor | None,
    window: int | None,
    chunks: Sequence[range] | None = None,
    allowed: Kernels = (),
) -> Attend:
    seq_len, device = tokens_BS.shape[1], tokens_BS.device
    match choose(device, seq_len, documents_BS is not None, window, whole=chunks is None):
        case "SDPA":
            return Causal(scale, allowed)
        case "SDPA in tiles":
            starts = (0,) if chunks is None else tuple(chunk.start for chunk in chunks)
            return Tiled(scale, documents_BS, window, starts)
        case "FlexAttention":
            return flex(scale, tokens_BS, documents_BS, window, chunks)


@dataclass(frozen=True)
class Causal:
    """Every token attends to itself and to all before it."""

    scale: float
    allowed: Kernels = ()

    def __call__(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        """As `Attend`."""
        return sdpa(q_BHTK, k_BGTK, v_BGTK, self.allowed, scale=self.scale, is_causal=True)


@dataclass(frozen=True)
class Tiled:
    """On a CPU: to the last `window` tokens of its document."""

    scale: float
    documents_BS: Tensor | None
    window: int | None
    starts: tuple[int, ...] = (0,)

    def __call__(self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor) -> Tensor:
        """As `Attend`; with more keys than queries, these are chunks that begin at `starts`."""
        limits = self.documents_BS, self.window, self.scale, self.starts
        return tiled_attention(q_BHTK, k_BGSK, v_BGSK, *limits)


@dataclass(frozen=True)
class Flex:
    """The same on a GPU, with FlexAttention (Dong et al., 2024).

    Where that cannot be compiled: with SDPA and a dense mask.
    """

    scale: float
    rule: Callable[..., Tensor]
    """FlexAttention's `mask_mod`."""
    shape: tuple[int, int, int]
    """Sequences that have a mask of their own (1: all have the same), queries, keys."""
    device: torch.device
    block_mask: Any
    """None where it could not be compiled."""

    def __call__(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        """As `Attend`."""
        if compiler.failure:
            return self.dense(q_BHTK, k_BGTK, v_BGTK)
        kernel = _flex_kernel(part_of_a_graph=torch.compiler.is_compiling())
        width = q_BHTK.shape[-1]
        if width < 16:  # narrower heads the kernels do not take
            q_BHTK, k_BGTK, v_BGTK = (F.pad(x, (0, 16 - width)) for x in (q_BHTK, k_BGTK, v_BGTK))
        out_BHTK: Any = kernel(
            q_BHTK,
            k_BGTK,
            v_BGTK,
            block_mask=self.block_mask,
            scale=self.scale,
            enable_gqa=grouped_heads(q_BHTK, k_BGTK),
        )
        if out_BHTK is None:  # it has just failed to compile
            out_BHTK = self.dense(q_BHTK, k_BGTK, v_BGTK)
        narrowed: Tensor = out_BHTK[..., :width]
        return narrowed

    def dense(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        """As `Attend`, with a mask of [T, S] bits: slower, and no less exact.

        FlexAttention without compilation would hold the scores of all heads in fp32 instead.
        """
        return sdpa(q_BHTK, k_BGTK, v_BGTK, WITH_A_MASK, scale=self.scale, attn_mask=self.mask)

    @cached_property
    def mask(self) -> Tensor:
        """[B or 1, 1, T, S]: the rule for every pair of a query and a key."""
        rows, queries, keys = (torch.arange(n, device=self.device) for n in self.shape)
        seen = self.rule(rows[:, None, None], rows[0], queries[:, None], keys)
        return seen.expand(self.shape)[:, None]


def flex(
    scale: float,
    tokens_BS: Tensor,
    documents_BS: Tensor | None,
    window: int | None,
    chunks: Sequence[range] | None = None,
) -> Flex:
    """Find the blocks of queries and keys that meet at all; the kernels pass over the others.

    `chunks`: the places of the queries among the S tokens, if they are not all of these.
    """
    rows, length = tokens_BS.shape
    places_T = None
    if chunks is not None:
        ranges = (torch.arange(c.start, c.stop, device=tokens_BS.device) for c in chunks)
        places_T = torch.cat(list(ranges))
    rule = visible(documents_BS, window, places_T)
    queries = length if places_T is None else len(places_T)
    block_mask = None
    if not compiler.failure:
        made_for = None if documents_BS is None else rows
        create = _block_mask_maker(compiled=length > EAGER_MASK)
        block_mask = create(rule, made_for, None, queries, length, device=tokens_BS.device)
    shape = (1 if documents_BS is None else rows, queries, length)
    return Flex(scale, rule, shape, tokens_BS.device, block_mask)


def visible(
    documents_BS: Tensor | None, window: int | None, places_T: Tensor | None = None
) -> Callable[..., Tensor]:
    """FlexAttention's `mask_mod`: whether query `q` of sequence `b` may attend to key `k`.

    It may to itself and to those before it, as far back as the window and its document go. Each
    document's number stands at its tokens, which follow one another. Query `q` is that of the token
    at `places_T[q]`, or at q.
    """

    def mask_mod(b: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if places_T is not None:
            q = places_T[q]
        seen = k <= q
        if window is not None:
            seen = seen & (k > q - window)
        if documents_BS is not None:
            seen = seen & (documents_BS[b, q] == documents_BS[b, k])
        return seen

    return mask_mod


@cache
def _flex_kernel(*, part_of_a_graph: bool) -> Callable[..., Any]:
    """FlexAttention, for the graph that is being compiled, or else compiled by itself: then None
    comes out where that fails. Plain, it would compute all [T, T] products."""
    from torch.nn.attention.flex_attention import flex_attention  # imported only where used

    kernel: Any = flex_attention
    return kernel if part_of_a_graph else compiler.compiled(kernel, otherwise=_nothing)


@cache
def _block_mask_maker(*, compiled: bool) -> Callable[..., Any]:
    """`create_block_mask`; compiled, it holds no [T, T] bits, and gives None where that fails."""
    from torch.nn.attention.flex_attention import create_block_mask

    return (
        compiler.compiled(create_block_mask, otherwise=_nothing) if compiled else create_block_mask
    )


def _nothing(*_: object, **__: object) -> None:
    """Stand in for what could not be compiled."""


@dataclass(frozen=True)
class Gathered:
    """From this process's tokens to those of all that share the sequence.

    Keys and values are gathered first, not sent around in a ring (Llama 3, arXiv 2407.21783,
    section 3.3.2): with grouped heads they are small, and no kernel has to know of it.
    """

    gather: Callable[[Tensor], Tensor]
    attend: Attend

    def __call__(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        """As `Attend`."""
        k_BGSK, v_BGSK = self.gather(torch.stack((k_BGTK, v_BGTK)))
        return self.attend(q_BHTK, k_BGSK, v_BGSK)


@dataclass(frozen=True)
class Prompt:
    """Keeps the keys and values of a prompt while it attends."""

    cache: KVCache
    layer: int
    attend: Attend

    def __call__(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        """As `Attend`."""
        self.cache.write(self.layer, k_BGTK, v_BGTK)
        return self.attend(q_BHTK, k_BGTK, v_BGTK)


@dataclass(frozen=True)
class Step:
    """One new token of each sequence attends to those in the cache."""

    cache: KVCache
    layer: int
    scale: float
    recent: slice
    """Places of the cache that any sequence looks at."""
    mask_B11S: Tensor | None
    """Which of those each sequence looks at; None: all do at all."""

    def __call__(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        """As `Attend`, with T = 1."""
        k_BGSK, v_BGSK = self.cache.write(self.layer, k_BGTK, v_BGTK)
        k_BGSK, v_BGSK = k_BGSK[:, :, self.recent], v_BGSK[:, :, self.recent]
        allowed = kernels(q_BHTK.device, "auto", training=False)
        if allowed and self.mask_B11S is not None:
            allowed = WITH_A_MASK
        return sdpa(q_BHTK, k_BGSK, v_BGSK, allowed, scale=self.scale, attn_mask=self.mask_B11S)


def _recent(cache: KVCache, window: int | None) -> tuple[slice, Tensor | None]:
    """The places that a new token of each sequence may look at, its own included."""
    ends = [length + 1 for length in cache.lengths]
    starts = [0 if window is None else max(0, end - window) for end in ends]
    places = slice(min(starts), max(ends))
    if len(set(ends)) == 1:
        return places, None
    place_S = torch.arange(places.start, places.stop, device=cache.device)
    start_B1, end_B1 = torch.tensor([starts, ends], device=cache.device)[..., None]
    return places, ((start_B1 <= place_S) & (place_S < end_B1))[:, None, None]
