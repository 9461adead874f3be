"""Asynchronous all-to-all of slices of matrices, overlapped with computation."""

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
"""Tensors [N, R, C], each a stack of N matrices, or of parts of matrices, of one shape."""
StackSlice = tuple[int, tuple[int | slice, ...]]
"""Source or destination of a part of a message: position of a stack, and an index within it."""


class WaitTimer:
    """A timer of how long this rank has waited for messages."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def wait(self, work: dist.Work, device: torch.device) -> None:
        """Wait for `work`; on a GPU the stream waits, and the host continues."""
        if device.type != "cuda":
            start = time.perf_counter()
            work.wait()
            self._seconds += time.perf_counter() - start
            return
        self.seconds()  # releases finished events, so that they do not accumulate
        before, after = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        # Timestamps on the stream. A host clock around `wait` would measure only the launch.
        before.record()
        work.wait()
        after.record()
        self._events.append((before, after))

    def seconds(self) -> float:
        """Return the total so far.

        On a GPU it counts the waits that the device has finished: the host does not synchronise.
        """
        while self._events and self._events[0][1].query():  # type: ignore[no-untyped-call]
            before, after = self._events.popleft()
            self._seconds += before.elapsed_time(after) / 1e3
        return self._seconds


class Transfer(NamedTuple):
    """An all-to-all in flight."""

    stacks: Stacks
    """The stacks that the received data fills."""
    targets: Sequence[Tensor] = ()
    """Views of `stacks` that the received data fills, in the order in which it is received."""
    received: Tensor | None = None
    sent: Tensor | None = None
    """The send buffer, referenced until the transfer has finished reading it."""
    work: dist.Work | None = None

    def wait(self, timer: WaitTimer) -> Stacks:
        """Wait for the collective and return the filled stacks."""
        if self.work is not None:
            assert self.received is not None
            timer.wait(self.work, self.received.device)
            _copy(self.targets, _split(self.received, self.targets))
        return self.stacks


class AllToAll(NamedTuple):
    """One rank's side of an all-to-all: the slices it sends, and where it puts what it receives."""

    send: list[list[StackSlice]]
    """Slices to send, by destination in the group. Empty for one rank, which keeps its stacks."""
    receive: list[list[StackSlice]]
    """Destinations in the new stacks, by source in the group."""
    shapes: list[tuple[int, int, int]]
    """Shapes of the new stacks."""
    dtype: torch.dtype = torch.float32
    """Dtype of the new stacks and of the messages."""
    device: torch.device = torch.device("cpu")
    group: dist.ProcessGroup | None = None
    """The ranks that take part; None: all."""
    local: bool = False
    """True if no rank needs data of another: slices are copied locally."""

    def start(self, stacks: Stacks) -> Transfer:
        """Start sending the slices of `stacks` that other ranks need.

        A collective: all ranks of the group call it, in the same order.
        """
        if not self.send:
            return Transfer(stacks)
        empty = partial(torch.empty, dtype=self.dtype, device=self.device)
        new = [empty(shape) for shape in self.shapes]
        outgoing, incoming = _views(stacks, self.send), _views(new, self.receive)
        # Views: packing below is one fused copy per direction instead of one per slice.
        sources, targets = list(chain(*outgoing)), list(chain(*incoming))
        # One rank holds all of every matrix (DDP): gathering is a copy within the process.
        if self.local:
            _copy(targets, sources)
            return Transfer(new)
        # Sizes follow from the plan, which all ranks share, so no rank has to send them first.
        counts, expected = ([sum(map(Tensor.numel, m)) for m in g] for g in (outgoing, incoming))
        sent = empty(sum(counts))
        _copy(_split(sent, sources), sources)
        received = empty(sum(expected))
        # One message per pair of ranks and bucket, not one per matrix: small messages are bound by
        # latency.
        work = dist.all_to_all_single(
            received, sent, expected, counts, group=self.group, async_op=True
        )
        return Transfer(new, targets, received, sent, work)


NO_COMMUNICATION = AllToAll([], [], [])
"""For a single rank."""


def stagger(tasks: Iterable[Iterator[None]]) -> None:
    """Run tasks in turns, each up to its next `yield`, the most recently started first.

    One new task starts in each turn. Messages that a task sends before it yields are in flight
    while the other tasks compute.
    """
    ended = object()

    def turn(running: list[Iterator[None]]) -> list[Iterator[None]]:
        """Advance each task to its next `yield`; return the tasks that have not finished."""
        return [task for task in running if next(task, ended) is not ended]

    running: list[Iterator[None]] = []
    for task in tasks:
        # The newest first: it launches its messages before older tasks compute, so they overlap.
        # All ranks have the same tasks, so the order of collectives is the same everywhere.
        running = turn([task, *running])
    while running:
        running = turn(running)


def _views(stacks: Stacks, messages: list[list[StackSlice]]) -> list[list[Tensor]]:
    return [[stacks[stack][indices] for stack, indices in message] for message in messages]


def _split(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return consecutive views of `buffer` with the shapes of `like`."""
    parts = torch.split(buffer, [view.numel() for view in like])
    return [part.view(view.shape) for part, view in zip(parts, like, strict=True)]


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))
