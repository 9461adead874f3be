"""KV cache for inference, in memory allocated once, and attention that reads and fills it.

It does not support gradients. Shapes: B sequences, T new tokens, S capacity in tokens, P places
that are read, H query heads, G key/value heads, K head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dtt.model.architecture import Architecture
from dtt.model.sdpa import WITH_A_MASK, AttentionFn, kernels, sdpa

GPU_BLOCK = 128
"""Places of the cache that attention on a GPU reads at once: the end of what it reads is rounded
up to a multiple of it, so that 128 tokens share one CUDA graph. Smaller: more graphs, each about as
long to capture as two tokens take. Larger: more masked places are read."""


def asynchronous(device: torch.device) -> bool:
    """Return True if the host may continue while the device computes."""
    return device.type == "cuda"


class KVCache:
    """KV cache of all layers, for up to `capacity` tokens of each of `batch` sequences.

    Sequences may have different lengths: the token at position p is stored at index p, and what is
    stored from the length of a sequence on is masked until it is overwritten. Layers with a sliding
    window keep all tokens too; they read only the recent ones. A ring would save memory, but its
    places would move, and with them the masks and the parts that two prompts share.
    """

    def __init__(
        self,
        arch: Architecture,
        batch: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Allocate 2 * n_layers * batch * n_kv_heads * capacity * head_dim elements."""
        self.block = GPU_BLOCK if asynchronous(device) else 1
        capacity = self._whole_blocks(capacity)
        shape = (2, arch.n_layers, batch, arch.n_kv_heads, capacity, arch.head_dim)
        self.memory = torch.zeros(shape, device=device, dtype=dtype)
        """Keys and values, [2, n_layers, B, G, S, K]."""
        self._context = arch.max_seq_len
        self.lengths = [0] * batch
        """Number of cached tokens of each sequence, as the host knows it."""
        self.lengths_B = torch.zeros(batch, device=device, dtype=torch.int64)
        """The same on the device, which decoding increments there: no step waits for the host."""

    @property
    def capacity(self) -> int:
        """Number of tokens of a sequence for which there is memory."""
        return self.memory.shape[4]

    @property
    def last(self) -> int:
        """The last position that a token may have."""
        return min(self.capacity, self._context) - 1

    @property
    def device(self) -> torch.device:
        """Device of the cache."""
        return self.memory.device

    def new_places(self, count: int) -> slice | None:
        """Return the places of the next `count` tokens, or None if only the device has them.

        That is so on a GPU, and where sequences have different lengths.
        """
        if self.block > 1 or len(set(self.lengths)) > 1:
            return None
        return slice(self.lengths[0], self.lengths[0] + count)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer, [B, G, S, K] each: views, to write to."""
        return self.memory[0, index], self.memory[1, index]

    def positions(self, count: int) -> Tensor:
        """Return the positions of the next `count` tokens of each sequence, [B, count]."""
        return self.lengths_B[:, None] + torch.arange(count, device=self.device)

    def rows(self, rows: slice) -> KVCache:
        """Return a cache of some of the sequences, which shares this memory and these lengths.

        Changes of its `lengths` on the host must be copied back.
        """
        # A shallow copy: the slices below are views, so writes reach the shared memory.
        some = copy(self)
        some.memory = self.memory[:, :, rows]
        some.lengths, some.lengths_B = self.lengths[rows], self.lengths_B[rows]
        return some

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Set the number of cached tokens of each sequence, on host and device."""
        self.lengths = list(lengths)
        self.lengths_B.copy_(torch.tensor(self.lengths))

    def advance(self) -> None:
        """Record on the host that a token of each sequence has been written in every layer.

        A decoding step records it on the device itself.
        """
        self.lengths = [min(length + 1, self.last) for length in self.lengths]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all sequences except those with the indices `rows`, which ascend."""
        # In place, layer by layer: a second cache would need as much memory again.
        kept = torch.tensor(rows, device=self.device)
        for layer_BGSK in self.memory.flatten(0, 1):
            layer_BGSK[: len(rows)] = layer_BGSK[kept]
        self.lengths_B[: len(rows)] = self.lengths_B[kept]
        self.memory, self.lengths_B = self.memory[:, :, : len(rows)], self.lengths_B[: len(rows)]
        self.lengths = [self.lengths[row] for row in rows]

    def reserve(self, capacity: int) -> None:
        """Enlarge the memory to `capacity` tokens of each sequence; the cached tokens stay."""
        capacity = self._whole_blocks(capacity)
        memory = self.memory.new_zeros((*self.memory.shape[:4], capacity, self.memory.shape[5]))
        memory[..., : self.capacity, :] = self.memory
        self.memory = memory

    def _whole_blocks(self, capacity: int) -> int:
        return -(-capacity // self.block) * self.block

    def places(self, window: int | None, count: int) -> slice:
        """Return the range of places that `count` new tokens of the sequences attend to.

        One for all sequences: from the oldest key that any of them needs to the end of the longest.
        """
        start = 0 if window is None else max(0, min(self.lengths) + 1 - window)
        stop = self._whole_blocks(max(self.lengths) + count)
        return slice(start // self.block * self.block, min(stop, self.capacity))


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
