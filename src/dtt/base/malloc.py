"""glibc malloc settings that keep freed memory in the process for reuse."""

from __future__ import annotations

import ctypes
from contextlib import suppress

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Option numbers from glibc's malloc.h."""


def keep_freed_memory() -> None:
    """Make glibc's malloc use the heap for large blocks, and never return the heap to the system.

    By default each large tensor gets its own mmap, whose pages the kernel clears on first touch and
    unmaps when the tensor is freed, again and again. Other C libraries are left unchanged.
    """
    with suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)
