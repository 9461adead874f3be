"""Keys and values of the tokens seen so far, in memory allocated once. For use without gradients.

Shapes: B sequences, T new tokens, S room for tokens, G key/value heads, K head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from dtt.model.architecture import Architecture


class KVCache:
    """Of all layers, for up to `capacity` tokens of each of `batch` sequences.

    Sequences may have different lengths: the token at position p is at place p. All of them stay
    there, also in layers with a window, which do not look at the older ones.
    """

    def __init__(
        self,
        arch: Architecture,
        batch: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Allocate 2 * n_layers * batch * n_kv_heads * capacity * head_dim numbers."""
        shape = (2, arch.n_layers, batch, arch.n_kv_heads, capacity, arch.head_dim)
        self.memory = torch.zeros(shape, device=device, dtype=dtype)
        """Keys and values, [2, n_layers, B, G, S, K]."""
        self.lengths = [0] * batch
        """Tokens seen so far, of each sequence."""

    @property
    def device(self) -> torch.device:
        """Where the memory is."""
        return self.memory.device

    def positions(self, count: int) -> Tensor:
        """[B, count]: where the next tokens of each sequence stand."""
        ahead = torch.arange(count, device=self.device)
        return torch.tensor(self.lengths, device=self.device)[:, None] + ahead

    def row(self, index: int) -> KVCache:
        """One sequence: a cache in the same memory, with a length of its own."""
        one = copy(self)
        one.memory = self.memory[:, :, index : index + 1]
        one.lengths = [self.lengths[index]]
        return one

    def keep(self, rows: Sequence[int]) -> None:
        """Forget all sequences but these."""
        self.memory = self.memory[:, :, rows]
        self.lengths = [self.lengths[row] for row in rows]

    def write(self, layer: int, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Put T tokens behind those seen; return the memory of that layer, [B, G, S, K] each.

        Sequences of different lengths get one token at a time. `advance` follows the last layer.
        """
        k_BGSK, v_BGSK = self.memory[:, layer]
        if len(set(self.lengths)) == 1:
            places = slice(self.lengths[0], self.lengths[0] + k_BGTK.shape[2])
            k_BGSK[:, :, places], v_BGSK[:, :, places] = k_BGTK, v_BGTK
        else:
            rows = range(len(self.lengths))
            k_BGSK[rows, :, self.lengths] = k_BGTK.squeeze(2)
            v_BGSK[rows, :, self.lengths] = v_BGTK.squeeze(2)
        return k_BGSK, v_BGSK

    def advance(self, count: int) -> None:
        """So many tokens of each sequence have been written in every layer."""
        self.lengths = [length + count for length in self.lengths]
