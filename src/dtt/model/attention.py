"""Causal self-attention with grouped-query heads (GQA).

Shapes: B sequences, T tokens, D dim, H query heads, G key/value heads, K head_dim.
"""

from __future__ import annotations

from torch import Tensor, nn

from dtt.model.architecture import Architecture
from dtt.model.linear import Linear
from dtt.model.norm import make_norm
from dtt.model.rope import rotate
from dtt.model.sdpa import AttentionFn

Rotations = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Causal attention softmax(scale * q kᵀ) v; H query heads share G key/value heads."""

    def __init__(self, arch: Architecture) -> None:
        """Create the projections D → H*K (queries), D → G*K (keys, values) and H*K → D (output)."""
        super().__init__()
        self.head_dim = arch.head_dim
        q_width, kv_width = arch.n_heads * arch.head_dim, arch.n_kv_heads * arch.head_dim
        self.q = Linear(arch.dim, q_width, bias=arch.bias != "none")
        self.k = Linear(arch.dim, kv_width, bias=arch.bias != "none")
        self.v = Linear(arch.dim, kv_width, bias=arch.bias != "none")
        self.q_norm, self.k_norm = _qk_norms(arch)
        self.norm_all_heads = arch.qk_norm == "all_heads"
        self.o = Linear(q_width, arch.dim, bias=arch.bias == "all")

    def forward(
        self,
        x_BTD: Tensor,
        rotations: Rotations | None,
        attention_fn: AttentionFn,
    ) -> Tensor:
        """Apply attention: [B, T, D] → [B, T, D]; `attention_fn` applies scale, mask and kernel."""
        q, k, v = self.q(x_BTD), self.k(x_BTD), self.v(x_BTD)
        if self.norm_all_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        # [B, T, H*K] becomes [B, H, T, K], the layout of SDPA, as a view: nothing is copied.
        q_BHTK, k_BGTK, v_BGTK = (
            projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for projected in (q, k, v)
        )
        if not self.norm_all_heads:
            q_BHTK, k_BGTK = self.q_norm(q_BHTK), self.k_norm(k_BGTK)
        if rotations is not None:
            q_BHTK, k_BGTK = rotate(q_BHTK, *rotations), rotate(k_BGTK, *rotations)
        out_BHTK = attention_fn(q_BHTK.type_as(v_BGTK), k_BGTK.type_as(v_BGTK), v_BGTK)
        out_BTD: Tensor = self.o(out_BHTK.transpose(1, 2).flatten(2))
        return out_BTD


def _qk_norms(arch: Architecture) -> tuple[nn.Module, nn.Module]:
    """Build the norms of queries and keys."""
    match arch.qk_norm:
        case "none":
            return nn.Identity(), nn.Identity()
        case "head":
            return make_norm(arch, arch.head_dim), make_norm(arch, arch.head_dim)
        case "all_heads":
            q_width, kv_width = arch.n_heads * arch.head_dim, arch.n_kv_heads * arch.head_dim
            return make_norm(arch, q_width), make_norm(arch, kv_width)
