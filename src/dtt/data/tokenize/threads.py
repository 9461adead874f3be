"""Helpers to read ahead and to write behind in threads, while the main thread encodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, Self, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


def ahead(items: Iterator[T], reader: Executor) -> Iterator[T]:
    """Yield `items`; `reader` computes each while the caller uses the previous one.

    No item may be None.
    """
    # None marks the end, because StopIteration cannot pass through a future.
    coming = reader.submit(next, items, None)
    while (item := coming.result()) is not None:
        coming = reader.submit(next, items, None)
        yield item


class BackgroundWriter:
    """A background thread that executes actions in order.

    After an error no further action is executed, and a later call of `do` raises the error. Leaving
    the context manager waits for all actions; on an exception, actions that have not started are
    dropped.
    """

    def __init__(self, depth: int) -> None:
        """Allow `depth` unfinished actions; with more, `do` blocks until the oldest is done."""
        self._depth = depth
        self._thread = ThreadPoolExecutor(1)
        self._waiting: deque[Future[None]] = deque()
        self._failed = False

    def do(self, action: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call `action` later, in the background thread."""
        # Bounds memory: a slow disk makes the encoder wait instead of collecting batches.
        self._finish(self._depth)
        self._waiting.append(self._thread.submit(self._try, partial(action, *args, **kwargs)))

    def _try(self, action: Callable[[], None]) -> None:
        # Actions after a failed one would write to a broken file.
        if self._failed:
            return
        try:
            action()
        # Also KeyboardInterrupt: the next action must not run.
        except BaseException:
            self._failed = True
            raise

    def _finish(self, left: int) -> None:
        while len(self._waiting) > left:
            self._waiting.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is None:
                self._finish(0)
        finally:
            # Waits for the action in progress, drops the others.
            self._thread.shutdown(cancel_futures=True)
