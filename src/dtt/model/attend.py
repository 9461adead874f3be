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
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dtt.model.architecture import Architecture
from dtt.model.cache import KVCache
from dtt.model.tiles import tiled_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [B, H, T, K], keys and values [B, G, T, K] to [B, H, T, K]."""

Backend = Literal["SDPA", "SDPA in tiles", "FlexAttention"]


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
    arch: Architecture, device: torch.device, seq_len: int, documents: bool, whole: bool = True
) -> str:
    """The choice for each layer in a line, for the start of a run."""
    layers = Counter(
        _describe(window, device, seq_len, documents, whole) for window in arch.windows
    )
    if len(layers) == 1:
        return f"attention: {next(iter(layers))}"
    parts = (f"{what} ({n} of {arch.n_layers} layers)" for what, n in layers.items())
    return f"attention: {', '.join(parts)}"


def _describe(
    window: int | None, device: torch.device, seq_len: int, documents: bool, whole: bool
) -> str:
    backend = choose(device, seq_len, documents, window, whole)
    if backend == "SDPA":
        return "SDPA with FlashAttention 3" if flash_3(device) else "SDPA"
    limits = ["documents"] * documents
    if window is not None and window < seq_len:
        limits.append(f"a window of {window}")
    return f"{backend} within {' and '.join(limits)}" if limits else backend


@cache
def flash_3(device: torch.device) -> bool:
    """Whether SDPA's kernel is FlashAttention 3, to which this switches where there is one.

    That takes a Hopper GPU and the package flash-attn-3 (module `flash_attn_interface`).
    """
    if device.type != "cuda" or find_spec("flash_attn_interface") is None:
        return False
    if torch.cuda.get_device_capability(device)[0] != 9:
        return False
    from torch.nn.attention import activate_flash_attention_impl

    activate_flash_attention_impl("FA3")
    return True


def attends(
    arch: Architecture, tokens_BT: Tensor, documents_BT: Tensor | None, cache: KVCache | None
) -> list[Attend]:
    """What each layer attends with, in this forward pass; layers with one window share it.

    With a cache that holds tokens, there is one new token. One that holds none takes a prompt.
    """
    if cache is not None and any(cache.lengths):
        if tokens_BT.shape[1] > 1:
            raise ValueError("a cache takes the whole prompt first, then one token at a time")
        masks = {w: _recent(cache, w) for w in set(arch.windows)}
        return [Step(cache, i, arch.attn_scale, *masks[w]) for i, w in enumerate(arch.windows)]
    made = {w: _attend(arch.attn_scale, tokens_BT, documents_BT, w) for w in set(arch.windows)}
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
) -> Attend:
    seq_len, device = tokens_BS.shape[1], tokens_BS.device
    match choose(device, seq_len, documents_BS is not None, window, whole=chunks is None):
        case "SDPA":
            return Causal(scale)
        case "SDPA in tiles":
            starts = (0,) if chunks is None else tuple(chunk.start for chunk in chunks)
            return Tiled(scale, documents_BS, window, starts)
        case "FlexAttention":
            return flex(scale, tokens_BS, documents_BS, window, chunks)


@dataclass(frozen=True)
class Causal:
    """Every token attends to itself and to all before it."""

    scale: float

    def __call__(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        """As `Attend`."""
        return _sdpa(q_BHTK, k_BGTK, v_BGTK, scale=self.scale, is_causal=True)


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
    """The same on a GPU, with FlexAttention (Dong et al., 2024)."""

    scale: float
    block_mask: Any
    kernel: Callable[..., Tensor]

    def __call__(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        """As `Attend`."""
        width = q_BHTK.shape[-1]
        if width < 16:  # narrower heads the kernels do not take
            q_BHTK, k_BGTK, v_BGTK = (F.pad(x, (0, 16 - width)) for x in (q_BHTK, k_BGTK, v_BGTK))
        out_BHTK = self.kernel(
            q_BHTK,
            k_BGTK,
            v_BGTK,
            block_mask=self.block_mask,
            scale=self.scale,
            enable_gqa=_grouped(q_BHTK, k_BGTK),
        )
        return out_BHTK[..., :width]


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
    kernel, create_block_mask = _flex_attention()
    rows, length = tokens_BS.shape
    places_T = None
    if chunks is not None:
        ranges = (torch.arange(c.start, c.stop, device=tokens_BS.device) for c in chunks)
        places_T = torch.cat(list(ranges))
    block_mask = create_block_mask(
        visible(documents_BS, window, places_T),
        None if documents_BS is None else rows,
        None,
        length if places_T is None else len(places_T),
        length,
        device=tokens_BS.device,
    )
    return Flex(scale, block_mask, kernel)


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
def _flex_attention() -> tuple[Callable[..., Tensor], Callable[..., Any]]:
    """Both compiled: plain, they would compute all [T, T] products. Imported only where used."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    kernel: Any = torch.compile(flex_attention)
    return kernel, torch.compile(create_block_mask)


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
        return _sdpa(q_BHTK, k_BGSK, v_BGSK, scale=self.scale, attn_mask=self.mask_B11S)


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


def _sdpa(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=_grouped(q, k), **how)


def _grouped(q_BHTK: Tensor, k_BGTK: Tensor) -> bool:
    return q_BHTK.shape[1] != k_BGTK.shape[1]
