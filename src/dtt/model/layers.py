"""The transformer block: causal self-attention with grouped-query heads (GQA), MLP and norms.

Shapes: B sequences, T tokens, D dim, F ffn_dim, H query heads, G key/value heads, K head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtt.mesh.dtypes import wide
from dtt.model.architecture import Architecture
from dtt.model.experts import Mixed, MixtureMLP
from dtt.model.linear import Linear
from dtt.model.rope import rotate
from dtt.model.sdpa import AttentionFn

Rotations = tuple[Tensor, Tensor]


def make_norm(arch: Architecture, width: int) -> nn.Module:
    """Build the norm of the architecture, over a last axis of size `width`."""
    match arch.norm:
        case "layernorm":
            return nn.LayerNorm(width, eps=arch.norm_eps)
        case "rmsnorm":
            return RMSNorm(width, arch.norm_eps)
        case "rmsnorm_plus_one":
            return RMSNorm(width, arch.norm_eps, offset=1.0)


class RMSNorm(nn.RMSNorm):
    """RMSNorm x / rms(x) * (offset + weight), computed in fp32.

    Under autocast the input is bf16, in which the mean of squares would lose precision.
    """

    def __init__(self, width: int, eps: float, offset: float = 0.0) -> None:
        """Create the weight; `eps` is added to the mean square."""
        super().__init__(width, eps)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., width] → [..., width], in the dtype of `x`."""
        # Added in fp32: a bf16 weight of less than 1/256 would vanish in 1 + weight.
        weight = wide(self.weight) + self.offset
        return F.rms_norm(wide(x), self.normalized_shape, weight, self.eps).type_as(x)


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
        self.norm_all_heads = arch.qk_norm == "all_heads"
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if arch.qk_norm != "none":
            self.q_norm = make_norm(arch, q_width if self.norm_all_heads else arch.head_dim)
            self.k_norm = make_norm(arch, kv_width if self.norm_all_heads else arch.head_dim)
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


def make_mlp(arch: Architecture, layer: int) -> nn.Module:
    """Build the MLP of a layer."""
    if (mixture := arch.mixture_of(layer)) is not None:
        return MixtureMLP(arch, mixture)
    match arch.mlp:
        case "gelu":
            return GeluMLP(arch)
        case "swiglu":
            return GatedMLP(arch, F.silu)
        case "geglu":
            # The tanh form, not erf: Gemma's config.json names it (`gelu_pytorch_tanh`), and so
            # does GPT-2's (`gelu_new`). The two differ by up to 5e-4.
            return GatedMLP(arch, partial(F.gelu, approximate="tanh"))


class GeluMLP(nn.Module):
    """MLP down(gelu(up(x))) with the tanh approximation of GELU, as in GPT-2."""

    def __init__(self, arch: Architecture) -> None:
        """Create the projections D → F and F → D."""
        super().__init__()
        self.up = Linear(arch.dim, arch.ffn_dim, bias=arch.bias == "all")
        self.down = Linear(arch.ffn_dim, arch.dim, bias=arch.bias == "all")

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Apply the MLP: [B, T, D] → [B, T, D]."""
        out_BTD: Tensor = self.down(F.gelu(self.up(x_BTD), approximate="tanh"))
        return out_BTD


class GatedMLP(nn.Module):
    """Gated MLP down(activation(gate(x)) * up(x)) (Shazeer, 2020): SwiGLU, GeGLU."""

    def __init__(self, arch: Architecture, activation: Callable[[Tensor], Tensor]) -> None:
        """Create the projections D → F (gate and up) and F → D."""
        super().__init__()
        self.activation = activation
        self.gate = Linear(arch.dim, arch.ffn_dim, bias=arch.bias == "all")
        self.up = Linear(arch.dim, arch.ffn_dim, bias=arch.bias == "all")
        self.down = Linear(arch.ffn_dim, arch.dim, bias=arch.bias == "all")

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Apply the MLP: [B, T, D] → [B, T, D]."""
        out_BTD: Tensor = self.down(self.activation(self.gate(x_BTD)) * self.up(x_BTD))
        return out_BTD


class Block(nn.Module):
    """Transformer block: x + attn(x), then x + mlp(x), with norms as `norm_placement` says.

    Norms before attention and MLP apply to their input, norms after them to their output, before it
    is added. Both outputs are multiplied by `residual_scale`.
    """

    def __init__(self, arch: Architecture, layer: int = 0) -> None:
        """Create a layer of the decoder, number `layer`."""
        super().__init__()
        before, after = arch.norm_placement != "post", arch.norm_placement != "pre"
        self.attn_norm = make_norm(arch, arch.dim) if before else nn.Identity()
        self.attn = Attention(arch)
        self.attn_post_norm = make_norm(arch, arch.dim) if after else nn.Identity()
        self.mlp_norm = make_norm(arch, arch.dim) if before else nn.Identity()
        self.mlp = make_mlp(arch, layer)
        self.mlp_post_norm = make_norm(arch, arch.dim) if after else nn.Identity()
        self.dropout = arch.dropout
        self.scale = arch.residual_scale

    def forward(
        self,
        x_BTD: Tensor,
        rotations: Rotations | None,
        attention_fn: AttentionFn,
        counted_BT: Tensor | None = None,
    ) -> Mixed:
        """Apply the block: [B, T, D] → [B, T, D]; other arguments are those of its parts.

        Auxiliary losses are sums over the tokens of the stream, of which this rank has some under
        tensor parallelism. An ordinary MLP has none, and no load.
        """
        x_BTD, inner_BTD = self.attend(x_BTD, rotations, attention_fn)
        if isinstance(self.mlp, MixtureMLP):
            mixed: Mixed = self.mlp(inner_BTD, counted_BT)
        else:
            mixed = Mixed(self.mlp(inner_BTD), {}, None)
        out_BTD = self.add(x_BTD, self.mlp_post_norm(mixed.out))
        # Not by `mixed._replace`: torch 2.11 cannot compile that.
        return Mixed(out_BTD, mixed.aux, mixed.load)

    def attend(
        self, x_BTD: Tensor, rotations: Rotations | None, attention_fn: AttentionFn
    ) -> tuple[Tensor, Tensor]:
        """Return the stream after attention, and the input of the MLP: [B, T, D] each."""
        attn_BTD = self.attn(self.attn_norm(x_BTD), rotations, attention_fn)
        x_BTD = self.add(x_BTD, self.attn_post_norm(attn_BTD))
        return x_BTD, self.mlp_norm(x_BTD)

    def add(self, x_BTD: Tensor, update_BTD: Tensor) -> Tensor:
        """Return x + residual_scale * dropout(update)."""
        dropped_BTD = F.dropout(update_BTD, self.dropout, self.training)
        # One pass over the stream. `x + scale * update` would write the product to memory first.
        return torch.add(x_BTD, dropped_BTD, alpha=self.scale)


class Absent(nn.Module):
    """The place of a layer that is in another stage of a pipeline."""


def held_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Return the blocks of a model (`model.layers`) that this rank has, by index."""
    layers = enumerate(model.get_submodule("layers").children())
    return {i: layer for i, layer in layers if not isinstance(layer, Absent)}
