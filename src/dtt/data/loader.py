"""From the order of the data to batches on the device, ahead of the training loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from dtt.data.order import Order, UInt64Array
from dtt.data.windows import Windows


@dataclass(frozen=True)
class Batch:
    """One optimizer step's data, as one rank sees it."""

    windows: UInt64Array
    """Windows of the whole global batch, over all ranks: what the ledger records."""
    micro_batches: list[tuple[Tensor, Tensor]]
    """This rank's `(tokens, targets)` pairs, each [micro_batch, seq_len]."""


@dataclass(frozen=True)
class Share:
    """Which rows of every global batch are this rank's, and how they are cut."""

    rank: int
    size: int
    micro_batch: int
    device: torch.device

    def to_device(self, source: Windows, windows: UInt64Array) -> list[tuple[Tensor, Tensor]]:
        """Read this rank's rows (every size-th) of `windows`, cut into micro-batches."""
        mine = windows[self.rank :: self.size]
        return [
            self._pair(source, mine[start : start + self.micro_batch])
            for start in range(0, len(mine), self.micro_batch)
        ]

    def _pair(self, source: Windows, windows: UInt64Array) -> tuple[Tensor, Tensor]:
        ids = torch.from_numpy(source.read(windows))
        if self.device.type == "cuda":
            ids = ids.pin_memory().to(self.device, non_blocking=True)
        return ids[:, :-1], ids[:, 1:]


def training_batches(
    source: Windows, order: Order, share: Share, sequences: int, first_step: int
) -> Iterator[Batch]:
    """Batches of steps first_step, first_step + 1, … (steps count from 0), for ever.

    Step s takes positions s * sequences … of the order, whatever the number of ranks.
    """

    def make(step: int) -> Batch:
        windows = order.windows_at(step * sequences, sequences)
        return Batch(windows, share.to_device(source, windows))

    def begin() -> None:
        if share.device.type == "cuda":
            torch.cuda.set_device(share.device)  # each thread has its own current device

    return _ahead(make, first_step, begin)


def _ahead(
    make: Callable[[int], Batch], first: int, begin: Callable[[], None], depth: int = 2
) -> Iterator[Batch]:
    """`make(first)`, `make(first + 1)`, … in a thread, each begun `depth` calls before its turn."""
    with ThreadPoolExecutor(1, thread_name_prefix="loader", initializer=begin) as pool:
        ready: deque[Future[Batch]] = deque()
        for step in count(first):
            ready.append(pool.submit(make, step))
            if len(ready) > depth:
                yield ready.popleft().result()
