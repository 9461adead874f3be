"""Norms, MLPs and the block that joins them with attention.

Shapes: B sequences, T tokens, D dim, F ffn_dim.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dtt.model.architecture import Architecture
from dtt.model.attention import Attention, Rotations
from dtt.model.cache import LayerCache
from dtt.model.linear import Linear


def make_norm(arch: Architecture) -> nn.Module:
    """The norm over the D axis that the architecture names."""
    match arch.norm:
        case "layernorm":
            return nn.LayerNorm(arch.dim, eps=arch.norm_eps)
        case "rmsnorm":
            return nn.RMSNorm(arch.dim, eps=arch.norm_eps)


def make_mlp(arch: Architecture) -> nn.Module:
    """The feed-forward layer that the architecture names."""
    match arch.mlp:
        case "gelu":
            return GeluMLP(arch)
        case "swiglu":
            return SwiGluMLP(arch)


class GeluMLP(nn.Module):
    """down(gelu(up(x))) with the tanh form of GELU, as in GPT-2."""

    def __init__(self, arch: Architecture) -> None:
        """D → F → D."""
        super().__init__()
        self.up = Linear(arch.dim, arch.ffn_dim, bias=arch.bias)
        self.down = Linear(arch.ffn_dim, arch.dim, bias=arch.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] → [B, T, D]."""
        out_BTD: Tensor = self.down(F.gelu(self.up(x_BTD), approximate="tanh"))
        return out_BTD


class SwiGluMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer, 2020)."""

    def __init__(self, arch: Architecture) -> None:
        """D → F twice, F → D."""
        super().__init__()
        self.gate = Linear(arch.dim, arch.ffn_dim, bias=arch.bias)
        self.up = Linear(arch.dim, arch.ffn_dim, bias=arch.bias)
        self.down = Linear(arch.ffn_dim, arch.dim, bias=arch.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] → [B, T, D]."""
        out_BTD: Tensor = self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        return out_BTD


class Block(nn.Module):
    """x + attn(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, arch: Architecture) -> None:
        """One layer of the decoder."""
        super().__init__()
        self.attn_norm = make_norm(arch)
        self.attn = Attention(arch)
        self.mlp_norm = make_norm(arch)
        self.mlp = make_mlp(arch)
        self.dropout = arch.dropout

    def forward(
        self,
        x_BTD: Tensor,
        rotations: Rotations | None,
        cache: LayerCache | None = None,
        mask_B1TT: Tensor | None = None,
    ) -> Tensor:
        """[B, T, D] → [B, T, D]; the rest as `Attention` takes it."""
        attn_BTD = self.attn(self.attn_norm(x_BTD), rotations, cache, mask_B1TT)
        x_BTD = x_BTD + F.dropout(attn_BTD, self.dropout, self.training)
        mlp_BTD = self.mlp(self.mlp_norm(x_BTD))
        return x_BTD + F.dropout(mlp_BTD, self.dropout, self.training)
