"""Limits of the work and the memory of a render: chat templates come from others.

Work is counted, not timed, so that a row is refused on every machine or on none. One step takes
about a microsecond.
"""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from threading import Lock

from jinja2 import TemplateError

MAX_STEPS = 1_000_000
"""Maximum number of steps in one render: iterations, calls, and the size of what it computes."""
MAX_CHARS = 1 << 24
"""Maximum size of a render."""
MAX_MEMORY = 1 << 31
"""Maximum bytes of memory that a render takes in addition to what the process has.

It is address space, of which each thread that starts meanwhile reserves 128 MB for its heap: with
512 MB, a few of them ended a render without a fault of its template."""
CALL = 8
"""RenderSteps of a call of a macro."""
CHARS, ITEMS = 9, 4
"""Powers of two: characters of a text, and items of a list, that take a step."""

PAGE = resource.getpagesize()


class TooCostly(TemplateError):
    """A render takes too much work, so that the template would not end in useful time."""


class RenderSteps:
    """The number of steps of a render so far."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        """Start at zero."""
        self.count = 0

    def spend(self, steps: int) -> None:
        """Count steps; raise TooCostly beyond the limit."""
        self.count += steps
        if self.count > MAX_STEPS:
            raise TooCostly(f"the template takes more than {MAX_STEPS:,} steps")

    def read(self, value: object, *, deep: bool) -> None:
        """Count the steps that it takes to read a value; with `deep`, with everything inside.

        A list that contains another twice, thirty times in a row, is a billion items in a few
        kilobytes. So the count ends at the limit.
        """
        kind = type(value)
        if kind is str:
            self.spend(len(value) >> CHARS)  # type: ignore[arg-type]
        elif kind in SIZED:
            pending = [value]
            while pending:
                one = pending.pop()
                kind = type(one)
                if kind is str:
                    self.spend(len(one) >> CHARS)  # type: ignore[arg-type]
                elif kind in SIZED:
                    self.spend(1 + (len(one) >> ITEMS))  # type: ignore[arg-type]
                    if deep and kind is not range:
                        inner = one.values() if kind is dict else one  # type: ignore[attr-defined]
                        pending += inner  # type: ignore[arg-type]


SIZED = frozenset((list, tuple, dict, range))


class _MemoryLimit:
    """A context in which the memory of the process has a limit.

    It is what the process has now and MAX_MEMORY; beyond it follows MemoryError. No count of steps
    sees `'a' * 3000000000`, or a list that is written as text, before the memory is taken. The
    limit holds for all threads, so one thread at a time has it. Costs 5 microseconds.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._before = (0, 0)
        self._statm = (0, -1)
        """Process id and file descriptor of /proc/self/statm, which takes longer to open than many
        renders take."""

    def __enter__(self) -> None:
        self._lock.acquire()
        soft, hard = self._before = resource.getrlimit(resource.RLIMIT_AS)
        limits = [one for one in (soft, hard) if one != resource.RLIM_INFINITY]
        if self._statm[0] != os.getpid():
            with suppress(OSError):  # not Linux
                self._statm = os.getpid(), os.open("/proc/self/statm", os.O_RDONLY)
        if self._statm[0] == os.getpid():
            limits.append(int(os.pread(self._statm[1], 64, 0).split()[0]) * PAGE + MAX_MEMORY)
            resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_AS, self._before)
        self._lock.release()


memory_limit = _MemoryLimit()
