"""Causal self-attention with grouped heads.

Shapes: B sequences, T tokens, D dim, H query heads, G key/value heads, K head_dim.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dtt.model.architecture import Architecture
from dtt.model.cache import LayerCache
from dtt.model.linear import Linear
from dtt.model.rope import rotate

Rotations = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """softmax(q kᵀ / sqrt(K)) v over the past, H query heads sharing G key/value heads."""

    def __init__(self, arch: Architecture) -> None:
        """D → H*K queries, G*K keys and values; H*K → D."""
        super().__init__()
        self.head_dim = arch.head_dim
        self.grouped = arch.n_kv_heads != arch.n_heads
        self.q = Linear(arch.dim, arch.n_heads * arch.head_dim, bias=arch.bias)
        self.k = Linear(arch.dim, arch.n_kv_heads * arch.head_dim, bias=arch.bias)
        self.v = Linear(arch.dim, arch.n_kv_heads * arch.head_dim, bias=arch.bias)
        self.o = Linear(arch.n_heads * arch.head_dim, arch.dim, bias=arch.bias)

    def forward(
        self,
        x_BTD: Tensor,
        rotations: Rotations | None,
        cache: LayerCache | None = None,
        mask_B1TT: Tensor | None = None,
    ) -> Tensor:
        """[B, T, D] → [B, T, D]; with a cache, attend to what it holds as well.

        Without a mask, attention is causal; with one, it is to those tokens that the mask allows.
        """
        q_BHTK, k_BGTK, v_BGTK = (
            projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projected in (self.q(x_BTD), self.k(x_BTD), self.v(x_BTD))
        )
        if rotations is not None:
            q_BHTK, k_BGTK = rotate(q_BHTK, *rotations), rotate(k_BGTK, *rotations)
        causal = mask_B1TT is None and (cache is None or cache.length == 0)
        if cache is not None:
            k_BGTK, v_BGTK = cache.append(k_BGTK, v_BGTK)
        out_BHTK = F.scaled_dot_product_attention(
            q_BHTK,
            k_BGTK,
            v_BGTK,
            attn_mask=mask_B1TT,
            is_causal=causal,
            enable_gqa=self.grouped,
        )
        out_BTD: Tensor = self.o(out_BHTK.transpose(1, 2).flatten(2))
        return out_BTD
