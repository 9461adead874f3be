"""The decoder-only transformer: one class for every family, its variation resolved when built.

Shapes: B sequences, T tokens, D dim, V vocabulary.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtt.model.architecture import Architecture
from dtt.model.cache import KVCache
from dtt.model.layers import Block, make_norm
from dtt.model.linear import Embedding, Linear
from dtt.model.loss import linear_cross_entropy
from dtt.model.masks import document_mask, document_positions
from dtt.model.rope import rotations

Role = Literal["matrix", "embed", "head", "vector"]


class Decoder(nn.Module):
    """Token ids to logits, or to a loss.

    The names of the modules are a contract: `embed`, `pos_embed` (learned positions only),
    `layers.N.{attn_norm, attn.{q,k,v,o}, mlp_norm, mlp.{gate,up,down}}`, `norm`, `head` (None when
    tied: the embedding serves). There are no buffers.
    """

    def __init__(self, arch: Architecture) -> None:
        """Allocate the parameters, unset: `dtt.model.init` or a checkpoint gives them values."""
        super().__init__()
        self.arch = arch
        self.embed = Embedding(arch.vocab_size, arch.dim)
        self.pos_embed = (
            Embedding(arch.max_seq_len, arch.dim) if arch.position == "learned" else None
        )
        self.layers = nn.ModuleList(Block(arch) for _ in range(arch.n_layers))
        self.norm = make_norm(arch)
        self.head = None if arch.tie_embeddings else Linear(arch.dim, arch.vocab_size, bias=False)

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        cache: KVCache | None = None,
        documents_BT: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, T, V]; with targets, the fp32 *sum* over tokens of the cross-entropy in nats.

        Targets of -100 are ignored. With a cache, the tokens follow those it holds, it grows, and
        only the last token's logits [B, 1, V] are computed. With documents, which number that of
        each token, tokens attend within their own, and positions begin anew at its start; not
        together with a cache.
        """
        mask_B1TT = None
        if documents_BT is None:
            start = cache.length if cache is not None else 0
            positions = torch.arange(start, start + tokens_BT.shape[1], device=tokens_BT.device)
        else:
            mask_B1TT = document_mask(documents_BT)
            positions = document_positions(documents_BT)
        x_BTD = self.embed(tokens_BT)
        angles = None
        if self.pos_embed is not None:
            x_BTD = x_BTD + self.pos_embed(positions)
        else:
            by_head = positions if documents_BT is None else positions[:, None]
            angles = rotations(by_head, self.arch.head_dim, self.arch.rope_theta)
        x_BTD = F.dropout(x_BTD, self.arch.dropout, self.training)
        for i, layer in enumerate(self.layers):
            layer_cache = cache.layers[i] if cache is not None else None
            x_BTD = layer(x_BTD, angles, layer_cache, mask_B1TT)
        x_BTD = self.norm(x_BTD if cache is None else x_BTD[:, -1:])
        head_VD = self.embed.weight if self.head is None else self.head.weight
        if targets_BT is None:
            return F.linear(x_BTD, head_VD)
        return linear_cross_entropy(x_BTD.flatten(0, 1), head_VD, targets_BT.flatten())


def roles(model: nn.Module) -> dict[str, Role]:
    """What each parameter of a Decoder is, by name: optimizers and scaling rules depend on it.

    A tied head appears once, as `embed`.
    """
    return {name: _role(name, parameter) for name, parameter in model.named_parameters()}


def _role(name: str, parameter: nn.Parameter) -> Role:
    match name.split(".")[0], parameter.ndim:
        case "embed" | "pos_embed", 2:
            return "embed"
        case "head", 2:
            return "head"
        case "layers", 2:
            return "matrix"
        case _, 1:
            return "vector"
    raise ValueError(f"{name} {tuple(parameter.shape)} has no role")
