"""Context parallelism on one rank, which computes the chunks of two."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from dtt.parallel import context
from dtt.parallel.context import ContextParallel, SequenceShard
from dtt.train import trained_model


class BothRanks(SequenceShard):
    """The chunks of both ranks that share a sequence, one rank after the other: 0, 3, 1 and 2."""

    def chunks(self, length: int) -> Sequence[range]:  # type: ignore[override]
        """Return the positions of all four chunks."""
        ranks = (SequenceShard(rank, self.size, self.group) for rank in range(2))
        return [chunk for rank in ranks for chunk in rank.chunks(length)]


@contextlib.contextmanager
def both_ranks() -> Iterator[None]:
    """Wrap models as two ranks that share each sequence do."""
    right = trained_model.apply

    def wrapped(model: Any, *given: Any, **named: Any) -> nn.Module:
        layout: Any = SimpleNamespace(group=lambda _: None, index=lambda _: 0, size=lambda *_: 2)
        module = right(model, *given, **named)
        parallel = ContextParallel(module, layout)
        parallel.shard = BothRanks(0, 2, parallel.shard.group)
        return parallel

    def gather(halves: Tensor, dim: int, _: Any) -> Tensor:
        # [..., 2, 2 chunks, D]: what an all-gather would bring, in the order of the ranks.
        return halves.reshape(*halves.shape[:dim], 4, -1, halves.shape[-1])

    with patch.object(trained_model, "apply", wrapped), patch.object(context, "gather", gather):
        yield
