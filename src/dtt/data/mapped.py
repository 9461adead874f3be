"""Files as arrays, without a descriptor held for each.

Python's own `mmap` (and numpy's `memmap` on it) keeps a duplicate of the descriptor for as long as
the map lives, so ten thousand shards exhaust what a process may open. The system call itself needs
the descriptor only while it maps.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

MADV_RANDOM = 1  # the same on Linux, macOS and the BSDs; absent from `mmap` on some of them
NO_ACCESS, FIXED = 0, 0x10  # PROT_NONE and MAP_FIXED, the same on all of them
ANYTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
FAILED = ctypes.c_void_p(-1).value
HUGE_PAGE = 2**21
"""What lies at a multiple of it can be mapped by pages of this size, which are looked up faster."""

Bytes = npt.NDArray[np.uint8]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_file(path: Path) -> Bytes:
    """All bytes of a file, read-only; unmapped when no array refers to them any more.

    Raises what `open` raises, and OSError when the file cannot be mapped.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        if size == 0:
            return np.empty(0, dtype=np.uint8)
        return np.asarray(_Map(_mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd), size))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(fd)


def reserve(size: int) -> Bytes:
    """Addresses for files, which no file has yet; their array begins at a multiple of HUGE_PAGE.

    Only what `map_into` has mapped may be read: anything else ends the process. OSError when a
    process may not have as many addresses (`ulimit -v`).
    """
    room = size + HUGE_PAGE
    address = _mmap(None, room, NO_ACCESS, ANYTHING, -1)
    begin = -address % HUGE_PAGE
    return np.asarray(_Map(address, room))[begin : begin + size]


def map_into(place: Bytes, path: Path) -> int:
    """Map a file that is read in scattered places into its place in what `reserve` gave.

    The place begins at a page. Returns the size of the file: if it is not that of the place,
    nothing is mapped. Raises as `map_file`.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        if size == len(place):
            address = _mmap(place.ctypes.data, size, mmap.PROT_READ, mmap.MAP_SHARED | FIXED, fd)
            # From the disk by the page, not by the 128 kB.
            _libc.madvise(address, size, MADV_RANDOM)
        return size
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(fd)


def clear(place: Bytes) -> None:
    """Undo `map_into`; the addresses stay reserved."""
    _mmap(place.ctypes.data, len(place), NO_ACCESS, ANYTHING | FIXED, -1)


def _mmap(address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    found: int = _libc.mmap(address, size, protection, flags, fd, 0)
    if found == FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found


class _Map:
    """Mapped bytes, for numpy to refer to; unmapped with the last reference."""

    def __init__(self, address: int, size: int) -> None:
        self._place = address, size
        self.__array_interface__ = {
            "version": 3, "typestr": "|u1", "shape": (size,), "data": (address, True),
        }  # fmt: skip

    def __del__(self) -> None:
        _libc.munmap(*self._place)
