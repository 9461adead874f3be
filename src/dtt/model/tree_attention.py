"""Attention over trees of tokens: sequences that share a beginning, which is computed once.

A tree is a prefix and branches. All trees are packed into one sequence without padding, each prefix
before its branches. A token attends to the prefix of its tree and to the earlier tokens of its own
branch: to key k from query q if k <= q < end[k], where end[k] is the end of the tree for a token of
a prefix, and else the end of its branch.

Shapes: T packed tokens, H query heads, G key/value heads, K head_dim, t tokens of a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dtt.model.architecture import Architecture
from dtt.model.attention_backend import flex_with
from dtt.model.sdpa import AttentionFn, sdpa


@dataclass
class PackedTrees:
    """Trees packed into one sequence, on the host."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """Position of each token in its sequence: branches continue from their prefix."""
    ends: list[int] = field(default_factory=list)
    """Index after the last token that attends to each token."""
    trees: list[range] = field(default_factory=list)
    """Indices of the tokens of each tree."""

    def add(self, prefix: Sequence[int], branches: Sequence[Sequence[int]]) -> list[list[int]]:
        """Append a tree; return the indices of the tokens of the sequence of each branch."""
        root = self._append(prefix, 0)
        parts = [self._append(branch, len(root)) for branch in branches]
        whole = range(root.start, len(self.tokens))
        # Known only now: tokens of the prefix are visible to all branches.
        self.ends[root.start : root.stop] = [whole.stop] * len(root)
        if whole:
            self.trees.append(whole)
        return [[*root, *part] for part in parts]

    def pad(self, multiple: int) -> None:
        """Append tokens that belong to no tree, up to a multiple of `multiple` tokens, at least 1.

        Their position is 0, so that they never exceed the context of the model.
        """
        start = len(self.tokens)
        length = -(-max(start, 1) // multiple) * multiple
        self.add([0] * (length - start), ())
        self.positions[start:] = [0] * (length - start)

    def is_sequence(self, tree: range) -> bool:
        """Return True if a tree has no branches."""
        return all(end == tree.stop for end in self.ends[tree.start : tree.stop])

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

    On a GPU it is FlexAttention, compiled once per T; on a CPU, SDPA for one tree at a time.
    """
    longest = max(trees.positions) + 1
    # A window that no position exceeds is none, so that such layers share one function with the
    # others.
    limits = [None if w is None or w >= longest else w for w in arch.windows]
    ends_T, positions_T = (torch.tensor(x, device=device) for x in (trees.ends, trees.positions))
    by_window: dict[int | None, AttentionFn] = {}
    for window in set(limits):
        rule = _mask_mod(ends_T, positions_T, window)
        if device.type == "cuda":
            shape = (1, len(ends_T), len(ends_T))
            by_window[window] = flex_with(rule, arch.attn_scale, shape, device)
        else:
            # Made once per batch for all layers and heads.
            plain = [window is None and trees.is_sequence(tree) for tree in trees.trees]
            masks = [
                None if causal else _mask(rule, tree)
                for causal, tree in zip(plain, trees.trees, strict=True)
            ]
            by_window[window] = TreeAttention(arch.attn_scale, trees.trees, masks)
    return [by_window[window] for window in limits]


def _mask_mod(ends_T: Tensor, positions_T: Tensor, window: int | None) -> Callable[..., Tensor]:
    """Return the rule of this module as FlexAttention's `mask_mod`."""

    def mask_mod(_b: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (k <= q) & (q < ends_T[k])
        if window is not None:
            seen = seen & (positions_T[k] > positions_T[q] - window)
        return seen

    return mask_mod


def _mask(rule: Callable[..., Tensor], tree: range) -> Tensor:
    """Return the mask [t, t] of a tree, True where a query sees a key."""
    own_t = torch.tensor(tree)
    # The rule ignores sequence and head, so any tensor stands for them.
    return rule(own_t, own_t, own_t[:, None], own_t)


@dataclass(frozen=True)
class TreeAttention:
    """Attention over packed trees on a CPU, one tree at a time, without gradients."""

    scale: float
    trees: Sequence[range]
    masks: Sequence[Tensor | None]
    """Which keys a query sees, of each tree; None if that is all before it."""

    def __call__(self, q_1HTK: Tensor, k_1GTK: Tensor, v_1GTK: Tensor) -> Tensor:
        """Compute attention; see `AttentionFn`."""
        # [T, H, K] in memory: the output projection then reads the heads of a token without a copy.
        out_1THK = torch.empty_like(q_1HTK.transpose(1, 2), memory_format=torch.contiguous_format)
        out_1HTK = out_1THK.transpose(1, 2)
        for tree, mask_tt in zip(self.trees, self.masks, strict=True):
            own = slice(tree.start, tree.stop)
            q, k, v = (x[:, :, own] for x in (q_1HTK, k_1GTK, v_1GTK))
            out_1HTK[:, :, own] = sdpa(
                q, k, v, (), scale=self.scale, attn_mask=mask_tt, is_causal=mask_tt is None
            )
        return out_1HTK
