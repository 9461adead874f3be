"""Memory that has been freed is kept for what comes next."""

from __future__ import annotations

import ctypes
from contextlib import suppress

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Of glibc's malloc.h."""


def keep() -> None:
    """Have glibc's malloc give large blocks from the heap, and the heap never back to the system.

    By default each large tensor gets pages of its own, which the system clears when they are first
    touched and takes back when they are freed, again and again. Other C libraries are left alone.
    """
    with suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)
