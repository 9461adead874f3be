"""Documents that share a sequence and must not see each other.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def document_positions(documents_BT: Tensor) -> Tensor:
    """[B, T]: the place of each token in its document, from 0."""
    index_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return index_T - torch.where(begins_BT, index_T, 0).cummax(dim=1).values


def visible(documents_BT: Tensor | None, window: int | None) -> Callable[..., Tensor]:
    """FlexAttention's `mask_mod`: whether query `q` of sequence `b` may attend to key `k`.

    It may to itself and to those before it, as far back as the window and its document go. Each
    document's number stands at its tokens, which follow one another.
    """

    def mask_mod(b: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = k <= q
        if window is not None:
            seen = seen & (k > q - window)
        if documents_BT is not None:
            seen = seen & (documents_BT[b, q] == documents_BT[b, k])
        return seen

    return mask_mod
