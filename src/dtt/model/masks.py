"""Documents that share a sequence and must not see each other.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def document_mask(documents_BT: Tensor) -> Tensor:
    """[B, 1, T, T]: whether a token (third axis) may attend to another (fourth).

    It may to itself and to those before it in its document. `documents_BT` numbers each token's
    document; those of one document follow one another.
    """
    same_B1TT = documents_BT[:, None, :, None] == documents_BT[:, None, None, :]
    return same_B1TT.tril()


def document_positions(documents_BT: Tensor) -> Tensor:
    """[B, T]: the place of each token in its document, from 0."""
    index_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return index_T - torch.where(begins_BT, index_T, 0).cummax(dim=1).values
