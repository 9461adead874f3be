"""Attention over trees of tokens: sequences that share a beginning, which is computed once.

A tree is a prefix and branches. All trees are packed into one sequence without padding, each prefix
before its branches. A token attends to the prefix of its tree and to the earlier tokens of its own
branch: to key k from query q if k <= q < end[k], where end[k] is the end of the tree for a token of
a prefix, and else the end of its branch.

Shapes: T packed tokens, H query heads, G key/value heads, K head_dim, t queries and s keys of a
tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from dtt.model.architecture import Architecture
from dtt.model.attention_backend import by_window, flex_with
from dtt.model.sdpa import AttentionFn, sdpa


@dataclass
class PackedTrees:
    """Trees packed into one sequence, on the host."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """Position of each token in its sequence: branches continue from their prefix."""
    ends: list[int] = field(default_factory=list)
    """Index after the last token that attends to each token."""
    tiles: list[tuple[int, range]] = field(default_factory=list)
    """Queries that are computed together on a CPU, after the first key of their tree: the prefix,
    and then all branches. Each branch by itself would spare the masked scores between them, which
    take up to 8 % of a forward pass (700 tokens and 10 branches of 100, width 768)."""

    def add(self, prefix: Sequence[int], branches: Sequence[Sequence[int]]) -> list[list[int]]:
        """Append a tree; return the indices of the tokens of the sequence of each branch."""
        root = self._append(prefix, 0)
        parts = [self._append(branch, len(root)) for branch in branches]
        whole = range(root.start, len(self.tokens))
        # Known only now: tokens of the prefix are visible to all branches.
        self.ends[root.start : root.stop] = [whole.stop] * len(root)
        tiles = (root, range(root.stop, whole.stop))
        self.tiles += [(root.start, queries) for queries in tiles if queries]
        return [[*root, *part] for part in parts]

    def pad(self, multiple: int) -> None:
        """Append tokens that belong to no tree, up to a multiple of `multiple` tokens, at least 1.

        Their position is 0, so that they never exceed the context of the model.
        """
        start = len(self.tokens)
        length = -(-max(start, 1) // multiple) * multiple
        self.add([0] * (length - start), ())
        self.positions[start:] = [0] * (length - start)

    def _append(self, tokens: Sequence[int], position: int) -> range:
        """Append tokens from a position on; return the range of their indices."""
        own = range(len(self.tokens), len(self.tokens) + len(tokens))
        self.tokens += tokens
        self.positions += range(position, position + len(own))
        self.ends += [own.stop] * len(own)
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

    def attend(window: int | None) -> AttentionFn:
        if device.type == "cuda":
            rule = _mask_mod(ends_T, positions_T, window)
            shape = (1, len(ends_T), len(ends_T))
            return flex_with(rule, arch.attn_scale, shape, device)
        # Made once per batch for all layers and heads.
        masks = [_mask(*tile, ends_T, positions_T, window) for tile in trees.tiles]
        return partial(tree_attention, tiles=trees.tiles, masks=masks, scale=arch.attn_scale)

    return by_window(limits, attend)


def _mask_mod(ends_T: Tensor, positions_T: Tensor, window: int | None) -> Callable[..., Tensor]:
    """Return the rule of this module as FlexAttention's `mask_mod`."""

    def mask_mod(_b: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (k <= q) & (q < ends_T[k])
        if window is not None:
            seen = seen & (positions_T[k] > positions_T[q] - window)
        return seen

    return mask_mod


def _mask(
    first: int, queries: range, ends_T: Tensor, positions_T: Tensor, window: int | None
) -> Tensor | None:
    """Return the mask [t, s] of a tile, True where a query sees a key; None if it is causal."""
    # That of a prefix, which is the longest part: the kernel skips the masked half itself.
    linear = bool((ends_T[first : queries.stop] >= queries.stop).all())
    if window is None and queries.start == first and linear:
        return None
    q_t1 = torch.arange(queries.start, queries.stop)[:, None]
    k_s = torch.arange(first, queries.stop)
    # The rule ignores sequence and head, so any tensor stands for them.
    return _mask_mod(ends_T, positions_T, window)(q_t1, q_t1, q_t1, k_s)


def tree_attention(
    q_1HTK: Tensor,
    k_1GTK: Tensor,
    v_1GTK: Tensor,
    tiles: Sequence[tuple[int, range]],
    masks: Sequence[Tensor | None],
    scale: float,
) -> Tensor:
    """Return attention over packed trees on a CPU, one tile at a time, without gradients."""
    # [T, H, K] in memory: the output projection then reads the heads of a token without a copy.
    out_1THK = torch.empty_like(q_1HTK.transpose(1, 2), memory_format=torch.contiguous_format)
    out_1HTK = out_1THK.transpose(1, 2)
    for (first, queries), mask_ts in zip(tiles, masks, strict=True):
        own, keys = slice(queries.start, queries.stop), slice(first, queries.stop)
        q, k, v = q_1HTK[:, :, own], k_1GTK[:, :, keys], v_1GTK[:, :, keys]
        how = {"scale": scale, "attn_mask": mask_ts, "is_causal": mask_ts is None}
        out_1HTK[:, :, own] = sdpa(q, k, v, (), **how)
    return out_1HTK
