"""KV cache for inference, in memory allocated once. It does not support gradients.

Shapes: B sequences, T new tokens, S capacity in tokens, G key/value heads, K head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from dtt.model.architecture import Architecture


class KVCache:
    """KV cache of all layers, for up to `capacity` tokens of each of `batch` sequences.

    Sequences may have different lengths: the token at position p is stored at index p. Layers with
    a sliding window keep all tokens too; they read only the recent ones.
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
        shape = (2, arch.n_layers, batch, arch.n_kv_heads, capacity, arch.head_dim)
        self.memory = torch.zeros(shape, device=device, dtype=dtype)
        """Keys and values, [2, n_layers, B, G, S, K]."""
        self.lengths = [0] * batch
        """Number of cached tokens of each sequence."""
        self._lengths_B: tuple[list[int], Tensor] | None = None
        """The lengths that are on the device, and their tensor."""

    @property
    def device(self) -> torch.device:
        """Device of the cache."""
        return self.memory.device

    def positions(self, count: int) -> Tensor:
        """Return the positions of the next `count` tokens of each sequence, [B, count]."""
        return self._on_device()[:, None] + torch.arange(count, device=self.device)

    def row(self, index: int) -> KVCache:
        """Return a cache of one sequence that shares this memory but has its own length."""
        # A shallow copy: the slice below is a view, so writes reach the shared memory.
        one = copy(self)
        one.memory = self.memory[:, :, index : index + 1]
        one.lengths = [self.lengths[index]]
        return one

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all sequences except those with the indices `rows`."""
        # Indexing with a list copies the remaining rows. It happens once per finished sequence, and
        # frees the memory of that sequence.
        self.memory = self.memory[:, :, rows]
        self.lengths = [self.lengths[row] for row in rows]

    def reserve(self, capacity: int) -> None:
        """Enlarge the memory to `capacity` tokens of each sequence; the cached tokens stay."""
        memory = self.memory.new_zeros((*self.memory.shape[:4], capacity, self.memory.shape[5]))
        memory[..., : self.memory.shape[4], :] = self.memory
        self.memory = memory

    def write(self, layer: int, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Append T tokens; return the keys and values of that layer, [B, G, S, K] each.

        Sequences of different lengths take one token at a time. Call `advance` after the last
        layer.
        """
        # Views into the cache: assignments below write to it.
        k_BGSK, v_BGSK = self.memory[:, layer]
        if len(set(self.lengths)) == 1:
            positions = slice(self.lengths[0], self.lengths[0] + k_BGTK.shape[2])
            k_BGSK[:, :, positions], v_BGSK[:, :, positions] = k_BGTK, v_BGTK
        else:
            # Every row has its own end, so one slice is not enough. Indexing pairs row i with its
            # length. Lists would be copied to the device four times a layer, and each copy waits
            # for all kernels before it.
            rows_B = torch.arange(len(self.lengths), device=self.device)
            k_BGSK[rows_B, :, self._on_device()] = k_BGTK.squeeze(2)
            v_BGSK[rows_B, :, self._on_device()] = v_BGTK.squeeze(2)
        return k_BGSK, v_BGSK

    def advance(self, count: int) -> None:
        """Record that `count` tokens of each sequence have been written in every layer."""
        lengths_B = self._on_device() + count
        self.lengths = [length + count for length in self.lengths]
        self._lengths_B = list(self.lengths), lengths_B

    def _on_device(self) -> Tensor:
        """Return the lengths as a tensor; copied from the host only if `advance` did not set it."""
        if self._lengths_B is None or self._lengths_B[0] != self.lengths:
            copied = torch.tensor(self.lengths, device=self.device)
            self._lengths_B = list(self.lengths), copied
        return self._lengths_B[1]
