"""Causal self-attention with grouped-query heads (GQA).

Shapes: B sequences, T tokens, D dim, H query heads, G key/value heads, K head_dim.
"""

from __future__ import annotations

from torch import Tensor, nn

from dtt.model.architecture import Architecture
from dtt.model.attention_backend import AttentionFn
from dtt.model.linear import Linear
from dtt.model.norm import make_norm
from dtt.model.rope import rotate

Rotations = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Causal attention softmax(scale * q kᵀ) v; H query heads share G key/value heads."""

    def __init__(self, arch: Architecture) -> None:
        """Create the projections D → H*K (queries), D → G*K (keys, values) and H*K → D (output)."""
        super().__init__()
        self.head_dim = arch.head_dim
        self.q = Linear(arch.dim, arch.n_heads * arch.head_dim, bias=arch.bias)
        self.k = Linear(arch.dim, arch.n_kv_heads * arch.head_dim, bias=arch.bias)
        self.v = Linear(arch.dim, arch.n_kv_heads * arch.head_dim, bias=arch.bias)
        self.q_norm = make_norm(arch, arch.head_dim) if arch.qk_norm else nn.Identity()
        self.k_norm = make_norm(arch, arch.head_dim) if arch.qk_norm else nn.Identity()
        self.o = Linear(arch.n_heads * arch.head_dim, arch.dim, bias=arch.bias)

    def forward(
        self,
        x_BTD: Tensor,
        rotations: Rotations | None,
        attention_fn: AttentionFn,
    ) -> Tensor:
        """Apply attention: [B, T, D] → [B, T, D]; `attention_fn` applies scale, mask and kernel."""
        # [B, T, H*K] becomes [B, H, T, K], the layout of SDPA, as a view: nothing is copied.
        q_BHTK, k_BGTK, v_BGTK = (
            projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projected in (self.q(x_BTD), self.k(x_BTD), self.v(x_BTD))
        )
        q_BHTK, k_BGTK = self.q_norm(q_BHTK), self.k_norm(k_BGTK)
        if rotations is not None:
            q_BHTK, k_BGTK = rotate(q_BHTK, *rotations), rotate(k_BGTK, *rotations)
        out_BHTK = attention_fn(q_BHTK.type_as(v_BGTK), k_BGTK.type_as(v_BGTK), v_BGTK)
        out_BTD: Tensor = self.o(out_BHTK.transpose(1, 2).flatten(2))
        return out_BTD
