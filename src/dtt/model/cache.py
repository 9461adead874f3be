"""Keys and values of the tokens seen so far, in memory allocated once. For use without gradients.

Shapes: B sequences, H key/value heads, T new tokens, S tokens seen, K head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dtt.model.architecture import Architecture


class LayerCache:
    """The cache of one layer."""

    def __init__(self, keys_BHSK: Tensor, values_BHSK: Tensor) -> None:
        """Take the memory for keys and values, [B, H, capacity, K] each."""
        self._keys, self._values = keys_BHSK, values_BHSK
        self.length = 0

    def append(self, k_BHTK: Tensor, v_BHTK: Tensor) -> tuple[Tensor, Tensor]:
        """Add T tokens; return the keys and values of all tokens so far, [B, H, S, K] each.

        Either the cache is empty, or T is 1: the causal mask of other cases is not built.
        """
        start, end = self.length, self.length + k_BHTK.shape[2]
        if start > 0 and end - start > 1:
            raise ValueError("a cache takes the whole prompt first, then one token at a time")
        self._keys[:, :, start:end] = k_BHTK
        self._values[:, :, start:end] = v_BHTK
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]


class KVCache:
    """The caches of all layers, for up to `capacity` tokens of `batch` sequences."""

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
        keys, values = torch.zeros(shape, device=device, dtype=dtype)
        self.layers = [LayerCache(k, v) for k, v in zip(keys, values, strict=True)]
        self.capacity = capacity

    @property
    def length(self) -> int:
        """Tokens seen so far."""
        return self.layers[0].length
