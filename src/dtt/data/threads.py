"""Decode ahead and write behind, each on a thread of its own, beside the one that encodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


def ahead(items: Iterator[T], reader: Executor) -> Iterator[T]:
    """`items`, each made by `reader` while the one before is used; none of them is None."""
    coming = reader.submit(next, items, None)
    while (item := coming.result()) is not None:
        coming = reader.submit(next, items, None)
        yield item


class Behind:
    """Does things in their order while the caller goes on.

    After an error nothing more is done, and a later call raises it. A context manager: leaving it
    waits until all is done, or on an error drops what has not begun.
    """

    def __init__(self, depth: int) -> None:
        """So many things may wait beside the one that is being done; with more the caller waits."""
        self._depth = depth
        self._thread = ThreadPoolExecutor(1)
        self._waiting: deque[Future[None]] = deque()
        self._failed = False

    def do(self, action: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call `action`, later."""
        self._finish(self._depth)
        self._waiting.append(self._thread.submit(self._try, partial(action, *args, **kwargs)))

    def _try(self, action: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            action()
        except BaseException:
            self._failed = True
            raise

    def _finish(self, left: int) -> None:
        while len(self._waiting) > left:
            self._waiting.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._finish(0)
        finally:
            self._thread.shutdown(cancel_futures=True)
