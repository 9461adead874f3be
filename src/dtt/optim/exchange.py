"""Pieces of tensors from each process to each other, in one message, while they compute."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Stacks = list[Tensor]
"""Matrices, or parts of them: [N, R, C] each."""


class Piece(NamedTuple):
    """Where in stacks numbers are that are sent, or go that are received."""

    stack: int
    place: tuple[int | slice, ...]
    """Index in it."""


class Waiting:
    """How long this process has waited for messages."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def wait(self, work: dist.Work, device: torch.device) -> None:
        """Wait for `work`; on a GPU its stream does, and the host goes on."""
        if device.type != "cuda":
            start = time.perf_counter()
            work.wait()
            self._seconds += time.perf_counter() - start
            return
        self.seconds()  # so that events do not pile up
        before, after = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        before.record()
        work.wait()
        after.record()
        self._events.append((before, after))

    def seconds(self) -> float:
        """In all, as far as the device has come: the host does not wait for it."""
        while self._events and self._events[0][1].query():  # type: ignore[no-untyped-call]
            before, after = self._events.popleft()
            self._seconds += before.elapsed_time(after) / 1e3
        return self._seconds


class Transfer(NamedTuple):
    """Messages on their way."""

    stacks: Stacks
    """What they fill."""
    holes: Sequence[Tensor] = ()
    """Where in it, in the order in which it comes."""
    received: Tensor | None = None
    sent: Tensor | None = None
    """Kept until it has been read."""
    work: dist.Work | None = None

    @property
    def away(self) -> bool:
        """Whether there is anything to wait for."""
        return self.work is not None

    def wait(self, waiting: Waiting) -> Stacks:
        """The stacks, filled."""
        if self.work is not None:
            assert self.received is not None
            waiting.wait(self.work, self.received.device)
            _copy(self.holes, _cut(self.received, self.holes))
        return self.stacks


class Exchange(NamedTuple):
    """Who sends whom what of its stacks, and where that goes: one message for each pair."""

    send: list[list[Piece]]
    """To each rank; none at all: there is but one process, which goes on with what it has."""
    receive: list[list[Piece]]
    """From each rank, where in the new stacks."""
    shapes: list[tuple[int, int, int]]
    """Of the new stacks."""
    dtype: torch.dtype = torch.float32
    """Of the new stacks, and of what is sent."""
    device: torch.device = torch.device("cpu")
    at_home: bool = False
    """Whether no process needs anything of another."""

    def start(self, stacks: Stacks) -> Transfer:
        """Send what others need of `stacks`. All processes do so, in the same order."""
        if not self.send:
            return Transfer(stacks)
        empty = partial(torch.empty, dtype=self.dtype, device=self.device)
        new = [empty(shape) for shape in self.shapes]
        outgoing, incoming = _views(stacks, self.send), _views(new, self.receive)
        pieces, holes = list(chain(*outgoing)), list(chain(*incoming))
        if self.at_home:
            _copy(holes, pieces)
            return Transfer(new)
        counts, expected = ([sum(map(Tensor.numel, m)) for m in g] for g in (outgoing, incoming))
        sent = empty(sum(counts))
        _copy(_cut(sent, pieces), pieces)
        received = empty(sum(expected))
        work = dist.all_to_all_single(received, sent, expected, counts, async_op=True)
        return Transfer(new, holes, received, sent, work)


ALONE = Exchange([], [], [])


def stagger(tasks: Iterable[Iterator[None]]) -> None:
    """Run tasks, each to its next `yield` in turn, the latest first: what one sends before it
    travels while the others compute. Each begins a turn after the one before it."""
    running: list[Iterator[None]] = []
    for task in tasks:
        running = _turn([task, *running])
    while running:
        running = _turn(running)


def _turn(tasks: Iterable[Iterator[None]]) -> list[Iterator[None]]:
    """Those that have not ended after it."""
    return [task for task in tasks if next(task, _ENDED) is not _ENDED]


_ENDED = object()


def _views(stacks: Stacks, messages: list[list[Piece]]) -> list[list[Tensor]]:
    return [[stacks[stack][place] for stack, place in message] for message in messages]


def _cut(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of `buffer`, one after the other, of the shapes of `like`."""
    parts = torch.split(buffer, [view.numel() for view in like])
    return [part.view(view.shape) for part, view in zip(parts, like, strict=True)]


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))
