"""Attention over trees of tokens: sequences that share beginnings, which are computed once.

The nodes of all trees are packed in preorder into one sequence without padding. A token attends to
its ancestors and to the earlier tokens of its own node: to key k from query q if k <= q < end[k],
where end[k] is the end of the subtree of k's node.

Shapes: T packed tokens, H query heads, G key/value heads, K head_dim, t and s tokens of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from dtt.model.architecture import Architecture
from dtt.model.attention_backend import flex_with
from dtt.model.block_sparse import tiled_attention
from dtt.model.sdpa import AttentionFn, sdpa

TILE = 512
"""Tokens up to which a tree is one tile on a CPU. A tile also computes the masked scores between
branches; more tiles copy the keys and values of ancestors more often."""


@dataclass(frozen=True)
class TokenTree:
    """Tokens, followed by branches that do not attend to each other."""

    tokens: Sequence[int]
    branches: Sequence[TokenTree] = ()

    @property
    def size(self) -> int:
        """Number of tokens, with those of all branches."""
        return len(self.tokens) + sum(branch.size for branch in self.branches)


class TreeTile(NamedTuple):
    """Queries that are computed together: all of `own`, with the keys of `ancestors` and `own`."""

    ancestors: tuple[range, ...]
    own: range
    linear: bool
    """True if `own` has no branches."""


@dataclass
class PackedTrees:
    """Trees packed into one sequence, on the host."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """Position of each token in its sequence: branches continue from their parent."""
    ends: list[int] = field(default_factory=list)
    """Index after the last token of the subtree of each token's node."""
    tiles: list[TreeTile] = field(default_factory=list)

    def add(self, tree: TokenTree, ancestors: tuple[range, ...] = ()) -> None:
        """Append a tree whose ancestors are packed already."""
        start = len(self.tokens)
        if tree.size <= TILE or not tree.branches:
            self._append(tree, sum(map(len, ancestors)))
            own = range(start, len(self.tokens))
            if own:
                self.tiles.append(TreeTile(ancestors, own, linear=not tree.branches))
            return
        # A large tree: its root is a tile without a mask, and each branch a tree of its own with
        # one more ancestor. A question with many options is computed option by option.
        own = self._append(TokenTree(tree.tokens), sum(map(len, ancestors)))
        if own:
            self.tiles.append(TreeTile(ancestors, own, linear=True))
            ancestors = (*ancestors, own)
        for branch in tree.branches:
            self.add(branch, ancestors)
        # Known only now, after all branches: tokens of the root are visible to the whole subtree.
        self.ends[own.start : own.stop] = [len(self.tokens)] * len(own)

    def pad(self, multiple: int) -> None:
        """Append tokens that belong to no tree, up to a multiple of `multiple` tokens, at least 1.

        Their position is 0, so that they never exceed the context of the model.
        """
        start = len(self.tokens)
        length = -(-max(start, 1) // multiple) * multiple
        if length > start:
            self.add(TokenTree([0] * (length - start)))
            self.positions[start:] = [0] * (length - start)

    def _append(self, tree: TokenTree, position: int) -> range:
        """Append the tokens of a tree; return the range of those of its root."""
        own = range(len(self.tokens), len(self.tokens) + len(tree.tokens))
        self.tokens += tree.tokens
        self.positions += range(position, position + len(own))
        self.ends += [own.stop] * len(own)
        for branch in tree.branches:
            self._append(branch, position + len(own))
        self.ends[own.start : own.stop] = [len(self.tokens)] * len(own)
        return own


def make_tree_attention_fns(
    arch: Architecture, trees: PackedTrees, device: torch.device
) -> list[AttentionFn]:
    """Return the attention function of each layer for packed trees [1, T].

    On a GPU it is FlexAttention, compiled once per T; on a CPU, SDPA for one tile at a time.
    """
    longest = max(trees.positions) + 1
    # A window that no position exceeds is none, so that such layers share one function with the
    # others.
    limits = [None if w is None or w >= longest else w for w in arch.windows]
    ends_T, positions_T = (torch.tensor(x, device=device) for x in (trees.ends, trees.positions))
    by_window: dict[int | None, AttentionFn] = {}
    for window in set(limits):
        if device.type == "cuda":
            rule = _mask_mod(ends_T, positions_T, window)
            shape = (1, len(ends_T), len(ends_T))
            by_window[window] = flex_with(rule, arch.attn_scale, shape, device)
        else:
            # Made once per batch for all layers and heads.
            masks = [_mask(tile, ends_T, positions_T, window) for tile in trees.tiles]
            by_window[window] = TreeAttention(arch.attn_scale, trees.tiles, masks, window)
    return [by_window[window] for window in limits]


def _mask_mod(ends_T: Tensor, positions_T: Tensor, window: int | None) -> Callable[..., Tensor]:
    """Return the rule of this module as FlexAttention's `mask_mod`."""

    def mask_mod(_b: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (k <= q) & (q < ends_T[k])
        if window is not None:
            seen = seen & (positions_T[k] > positions_T[q] - window)
        return seen

    return mask_mod


def _mask(tile: TreeTile, ends_T: Tensor, positions_T: Tensor, window: int | None) -> Tensor | None:
    """Return the mask [t, s] of a tile, True where a query sees a key; None if it needs none."""
    # Plain causal attention: the kernel skips the masked half itself.
    if tile.linear and not tile.ancestors:
        return None
    q_t1 = torch.tensor(tile.own)[:, None]
    k_s = torch.tensor(list(chain(*tile.ancestors, tile.own)))
    # The rule ignores sequence and head, so any tensor stands for them.
    return _mask_mod(ends_T, positions_T, window)(q_t1, q_t1, q_t1, k_s)


@dataclass(frozen=True)
class TreeAttention:
    """Attention over packed trees on a CPU, one tile at a time, without gradients."""

    scale: float
    tiles: Sequence[TreeTile]
    masks: Sequence[Tensor | None]
    window: int | None

    def __call__(self, q_1HTK: Tensor, k_1GTK: Tensor, v_1GTK: Tensor) -> Tensor:
        """Compute attention; see `AttentionFn`."""
        # [T, H, K] in memory: the output projection then reads the heads of a token without a copy.
        out_1THK = torch.empty_like(q_1HTK.transpose(1, 2), memory_format=torch.contiguous_format)
        out_1HTK = out_1THK.transpose(1, 2)
        for tile, mask_ts in zip(self.tiles, self.masks, strict=True):
            own = slice(tile.own.start, tile.own.stop)
            q, k, v = (x[:, :, own] for x in (q_1HTK, k_1GTK, v_1GTK))
            if tile.ancestors:
                places = [slice(r.start, r.stop) for r in (*tile.ancestors, tile.own)]
                k, v = (torch.cat([x[:, :, p] for p in places], 2) for x in (k_1GTK, v_1GTK))
            if mask_ts is not None:
                out = sdpa(q, k, v, (), scale=self.scale, attn_mask=mask_ts)
            elif self.window is None:
                out = sdpa(q, k, v, (), scale=self.scale, is_causal=True)
            else:
                out = tiled_attention(q, k, v, None, self.window, self.scale)
            out_1HTK[:, :, own] = out
        return out_1HTK
