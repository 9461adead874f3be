"""Attention in generation: keys and values come from a cache, and those of new tokens go there.

Shapes: B sequences, T new tokens, S positions of the cache, P of them that are read, H query heads,
G key/value heads, K head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dtt.model.kv_cache import KVCache
from dtt.model.sdpa import WITH_A_MASK, AttentionFn, kernels, sdpa


@dataclass(frozen=True)
class Prefill:
    """Attention over whole prompts that also writes their keys and values to the cache."""

    keys_BGSK: Tensor
    values_BGSK: Tensor
    attention_fn: AttentionFn

    def __call__(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        """Compute attention; see `AttentionFn`."""
        # The cache was empty, so prompts attend to their own keys and values alone.
        count = k_BGTK.shape[2]
        self.keys_BGSK[:, :, :count], self.values_BGSK[:, :, :count] = k_BGTK, v_BGTK
        return self.attention_fn(q_BHTK, k_BGTK, v_BGTK)


@dataclass(frozen=True)
class CachedAttention:
    """Attention from the new tokens of each sequence to the cached tokens and to themselves."""

    keys_BGSK: Tensor
    values_BGSK: Tensor
    scale: float
    at: tuple[Any, ...]
    """Index of the new tokens in the cache: slices, or tensors of rows and positions, which put T
    before G. Slices, where the host knows them, take 5 % less time for a single text on a CPU."""
    places: slice
    """The P places that are read."""
    mask_B1TP: Tensor | None
    """What is added to the scores: 0, or -inf where a token does not attend to a place; None if
    every token attends to all of them."""

    def __call__(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        """Compute attention; see `AttentionFn`."""
        new = k_BGTK, v_BGTK
        if torch.is_tensor(self.at[0]):
            new = k_BGTK.transpose(1, 2), v_BGTK.transpose(1, 2)
        self.keys_BGSK[self.at], self.values_BGSK[self.at] = new
        k_BGPK, v_BGPK = self.keys_BGSK[:, :, self.places], self.values_BGSK[:, :, self.places]
        # Empty on a CPU, where PyTorch's own choice also handles masks.
        allowed = kernels(q_BHTK.device, "auto", training=False)
        if allowed and self.mask_B1TP is not None:
            allowed = WITH_A_MASK
        shape = q_BHTK.shape
        if shape[2] == 1:
            # Query heads that share keys are taken for several queries of one head: kernels with a
            # mask would otherwise need a copy of all keys and values for each query head.
            q_BHTK = q_BHTK.reshape(shape[0], k_BGTK.shape[1], -1, shape[3])
        how = {"scale": self.scale, "attn_mask": self.mask_B1TP}
        return sdpa(q_BHTK, k_BGPK, v_BGPK, allowed, **how).reshape(shape)


def cached_mask(
    cache: KVCache, window: int | None, places: slice, positions_BT: Tensor
) -> Tensor | None:
    """Return the mask [B, 1, T, P] of new tokens at these positions, or None if none is needed.

    It is in the dtype of the cache, so that it is converted once for all layers.
    """
    count = positions_BT.shape[1]
    if count == 1 and cache.new_places(1) is not None:
        return None
    place_P = torch.arange(places.start, places.stop, device=cache.device)
    distance_BTP = positions_BT[..., None] - place_P
    hidden_BTP = distance_BTP < 0
    if window is not None:
        hidden_BTP |= distance_BTP >= window
    mask_BTP = torch.zeros_like(hidden_BTP, dtype=cache.memory.dtype)
    return mask_BTP.masked_fill_(hidden_BTP, -torch.inf)[:, None]
