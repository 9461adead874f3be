"""Logits and losses of routers, which the library's own `forward` computes after the body.

Shapes: B sequences, T tokens, D width of the hidden states, E experts, N = B * T.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def logit_rule(library: Any, body: Any) -> tuple[float, float, float | None]:
    """Return the factors before and after the head, and the cap of the logits; measure them.

    The library's own `forward` runs with a body and a head that return known values. Raises
    AssertionError if no factor and no cap explain its logits.
    """
    head = library.get_output_embeddings()
    hidden_11D = torch.linspace(1, 2, head.in_features, dtype=torch.float64).view(1, 1, -1)
    # Powers of two, so that a quotient is exact; and one that any cap caps.
    given_4 = torch.tensor([2.0**-40, 1.0, 16.0, 2.0**40], dtype=torch.float64)
    seen: list[Tensor] = []

    def answer(into: Tensor) -> Tensor:
        seen.append(into)
        return F.pad(given_4, (0, head.out_features - 4)).view(1, 1, -1)

    head.forward, body.forward = answer, lambda *_, **__: _Answer(hidden_11D)
    try:
        tokens = torch.zeros(1, 1, dtype=torch.long)
        logits_4 = library(input_ids=tokens, use_cache=False).logits.flatten()[:4].double()
    finally:
        del head.forward, body.forward
    before = float(seen[0].flatten()[0] / hidden_11D.flatten()[0])
    after = float(logits_4[0] / given_4[0])
    cap = float(logits_4[3]) if logits_4[3] < after * given_4[3] / 2 else None
    expected = after * given_4 if cap is None else cap * torch.tanh(after * given_4 / cap)
    torch.testing.assert_close(seen[0].double(), before * hidden_11D, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(logits_4, expected, rtol=1e-6, atol=0.0)
    return before, after, cap


def has_router_loss(library: Any) -> bool:
    """Return True if the class of a model adds an auxiliary loss of its routers."""
    return hasattr(sys.modules[type(library).__module__], "load_balancing_loss_func")


def router_loss(library: Any, logits: Sequence[Tensor], counted_BT: Tensor) -> Tensor:
    """Return the library's auxiliary loss of each sequence times its counted tokens, summed, [].

    `logits` [N, E] are those of each layer. The library computes the loss of all tokens of a batch,
    a product of two means: of each sequence, as dtt's own, it depends neither on the size of
    micro-batches nor on the number of ranks.
    """
    by_layer = [one.reshape(*counted_BT.shape, -1) for one in logits]
    total = torch.zeros((), device=logits[0].device)
    for i, counted_T in enumerate(counted_BT):
        model: Any = _RoutersAlone(library, tuple(one[i] for one in by_layer))
        tokens_1T = torch.zeros_like(counted_T, dtype=torch.long)[None]
        count = counted_T.sum()
        # Without counted tokens, which all are padding then, it would divide by 0.
        mask_1T = (counted_T | (count == 0))[None]
        # It adds the loss times its coefficient to that of targets, which is 0 here.
        found = type(library).forward(
            model,
            input_ids=tokens_1T,
            labels=tokens_1T,
            attention_mask=mask_1T,
            output_router_logits=True,
        )
        total = total + found.loss * count
    return total


class _Answer:
    """The output of a body that has last hidden states and logits of routers, and nothing else."""

    def __init__(self, hidden: Tensor, logits: tuple[Tensor, ...] | None = None) -> None:
        """Keep what the body has computed."""
        self.last_hidden_state, self.router_logits = hidden, logits

    def __getitem__(self, _: object) -> Tensor:
        """Return the last hidden states: older classes ask for item 0."""
        return self.last_hidden_state

    def __getattr__(self, _: str) -> None:
        """Return None for the cache and the like."""


class _RoutersAlone:
    """Stands in for a model of the library where its `forward` needs logits of routers only."""

    def __init__(self, library: Any, logits: tuple[Tensor, ...]) -> None:
        """Replace body, head and loss of targets; all else is that of `library`."""
        embedding, head = library.get_input_embeddings(), library.get_output_embeddings()
        self._library = library
        hidden_11D = logits[0].new_zeros(1, 1, head.in_features)
        found = _Answer(hidden_11D, logits)
        for name, child in library.named_children():
            if child is head:
                setattr(self, name, nn.Identity())
            elif embedding in set(child.modules()):
                setattr(self, name, lambda *_, **__: found)

    def loss_function(self, *_: Any, **__: Any) -> Tensor:
        """Return 0, as there are no targets."""
        return torch.zeros((), device=self._library.get_output_embeddings().weight.device)

    def __getattr__(self, name: str) -> Any:
        """Return what the library's model has."""
        return getattr(self._library, name)
