"""Attention in generation: keys and values come from a cache, and those of new tokens go there.

Shapes: B sequences, T new tokens, S positions of the cache, H query heads, G key/value heads, K
head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dtt.model.kv_cache import KVCache
from dtt.model.sdpa import WITH_A_MASK, AttentionFn, kernels, sdpa


@dataclass(frozen=True)
class Prefill:
    """Attention over a prompt that also writes its keys and values to the cache."""

    cache: KVCache
    layer: int
    attention_fn: AttentionFn

    def __call__(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        """Compute attention; see `AttentionFn`."""
        # The cache was empty, so the prompt attends to its own keys and values alone, and plain
        # causal attention needs no mask.
        self.cache.write(self.layer, k_BGTK, v_BGTK)
        return self.attention_fn(q_BHTK, k_BGTK, v_BGTK)


@dataclass(frozen=True)
class DecodeStep:
    """Attention from the new tokens of each sequence to the cached tokens and to themselves."""

    cache: KVCache
    layer: int
    scale: float
    recent: slice
    """Range of cache positions that at least one new token attends to."""
    mask_B1TS: Tensor | None
    """Mask of those positions for each new token; None if every token attends to all of them."""

    def __call__(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        """Compute attention; see `AttentionFn`."""
        k_BGSK, v_BGSK = self.cache.write(self.layer, k_BGTK, v_BGTK)
        k_BGSK, v_BGSK = k_BGSK[:, :, self.recent], v_BGSK[:, :, self.recent]
        # Empty on a CPU, where PyTorch's own choice also handles masks.
        allowed = kernels(q_BHTK.device, "auto", training=False)
        if allowed and self.mask_B1TS is not None:
            allowed = WITH_A_MASK
        return sdpa(q_BHTK, k_BGSK, v_BGSK, allowed, scale=self.scale, attn_mask=self.mask_B1TS)


def recent(cache: KVCache, window: int | None, count: int) -> tuple[slice, Tensor | None]:
    """Return the range of cache positions that `count` new tokens attend to, and a mask or None.

    A new token attends to itself too. One token of each sequence needs a mask only if the sequences
    have different lengths.
    """
    # One slice for all rows: from the oldest key that any row needs to the end of the longest row.
    # Rows that need less mask the rest.
    starts = [0 if window is None else max(0, length + 1 - window) for length in cache.lengths]
    places = slice(min(starts), max(cache.lengths) + count)
    if count == 1 and len(set(cache.lengths)) == 1:
        return places, None
    place_S = torch.arange(places.start, places.stop, device=cache.device)
    position_BT1 = cache.positions(count)[..., None]
    seen_BTS = place_S <= position_BT1
    if window is not None:
        seen_BTS &= place_S > position_BT1 - window
    return places, seen_BTS[:, None]
