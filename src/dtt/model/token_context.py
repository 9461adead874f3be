"""The place of tokens: their positions and documents, and attention that keeps to them.

Shapes: B sequences, T tokens, D width of the hidden states, H query heads, G heads of keys and
values, K their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from dtt.config.train import AttentionKernel
from dtt.model.architecture import Architecture
from dtt.model.attention_backend import attention_within
from dtt.model.sdpa import AttentionFn, kernels


class Context:
    """The place of each token: its position, its document, and attention that keeps to them."""

    def __init__(
        self,
        tokens_BT: Tensor,
        doc_ids_BT: Tensor | None = None,
        requested: AttentionKernel = "auto",
        *,
        read: Literal["all", "last"] | Tensor = "all",
    ) -> None:
        """Describe a batch; `doc_ids_BT` holds the document of each token, of packed documents.

        `read` are the tokens whose logits are wanted, or the index of one for each row, [B].
        """
        index_1T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)[None]
        self.positions = index_1T if doc_ids_BT is None else document_positions(doc_ids_BT)
        """The position of each token in its document, from 0: [B, T], or [1, T] for all rows."""
        self.documents = doc_ids_BT
        """The document of each token, [B, T]; None if each row is one document."""
        self._tokens_BT, self._requested, self._read = tokens_BT, requested, read
        self._attention: dict[tuple[float, int | None], AttentionFn] = {}

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Return causal attention within documents: queries [B, H, T, K] → [B, H, T, K].

        Keys and values are [B, G, T, K], of which H / G query heads share one. `scale` multiplies
        q kᵀ, and is 1 / sqrt(K) by default. Each token attends to the last `window` tokens, itself
        included; None: to all before it.
        """
        return self._within(q.shape[-1] ** -0.5 if scale is None else scale, window)(q, k, v)

    def attention_fns(self, arch: Architecture) -> Sequence[AttentionFn]:
        """Return the attention function of each layer of a `Decoder`."""
        return [self._within(arch.attn_scale, window) for window in arch.windows]

    def _within(self, scale: float, window: int | None) -> AttentionFn:
        """Return attention within documents and a window, the same function each time."""
        how = scale, window
        if how not in self._attention:
            # Made once for all layers: a mask of documents depends on the batch.
            allowed = kernels(self._tokens_BT.device, self._requested)
            self._attention[how] = attention_within(*how, self._tokens_BT, self.documents, allowed)
        return self._attention[how]

    def read_by_head(self, hidden_BTD: Tensor) -> Tensor:
        """Return the hidden states of the tokens whose logits are wanted; all layers are done."""
        # Sampling needs one row of logits. For a prompt of T tokens, norm and head over all of them
        # would cost T times as much, and T * V floats of memory.
        if isinstance(self._read, Tensor):
            rows_B = torch.arange(len(hidden_BTD), device=hidden_BTD.device)
            return hidden_BTD[rows_B, self._read][:, None]
        return hidden_BTD if self._read == "all" else hidden_BTD[:, -1:]


class GivenContext(Context):
    """The place of tokens that are not whole sequences: parts of them, or trees of answers."""

    def __init__(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        attention_fns: Sequence[AttentionFn],
        read: Literal["all", "last"] | Tensor = "all",
    ) -> None:
        """Describe tokens at these positions, with the attention function of each layer."""
        super().__init__(tokens_BT, read=read)
        self.positions, self._given = positions_BT, attention_fns

    def attention_fns(self, arch: Architecture) -> Sequence[AttentionFn]:
        """Return those that were given."""
        return self._given


def document_positions(doc_ids_BT: Tensor) -> Tensor:
    """Return the position of each token in its document, from 0: [B, T]."""
    index_T = torch.arange(doc_ids_BT.shape[1], device=doc_ids_BT.device)
    # The first token of a row starts a document, also one that continues from a window before.
    starts_BT = torch.ones_like(doc_ids_BT, dtype=torch.bool)
    starts_BT[:, 1:] = doc_ids_BT[:, 1:] != doc_ids_BT[:, :-1]
    # The running maximum of the start indices is the start of the current document. A loop over
    # documents would copy their lengths to the host, which stalls a GPU.
    return index_T - torch.where(starts_BT, index_T, 0).cummax(dim=1).values
