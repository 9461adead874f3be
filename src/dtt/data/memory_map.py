"""Memory-mapped files as arrays that hold no file descriptor.

Python's `mmap`, and numpy's `memmap` on top of it, keeps a duplicate of the descriptor for the
lifetime of the map, so ten thousand shards exceed a process's limit of open files. The mmap system
call itself needs the descriptor only during the call.
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
"""Size of a huge page in bytes.

Memory at a multiple of this address can be mapped with huge pages, which cause fewer TLB misses.
"""

Bytes = npt.NDArray[np.uint8]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_file(path: Path) -> Bytes:
    """Return all bytes of a file as a read-only array.

    The file is unmapped when no array refers to its bytes any more. Raises the errors of `open`,
    and OSError if the file cannot be mapped.
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
    """Reserve `size` bytes of address space for files; the array is aligned to HUGE_PAGE.

    Only parts that `map_into` has mapped may be read: any other access ends the process with
    SIGSEGV. Raises OSError if the address space of the process is limited (`ulimit -v`).
    """
    room = size + HUGE_PAGE
    address = _mmap(None, room, NO_ACCESS, ANYTHING, -1)
    begin = -address % HUGE_PAGE
    return np.asarray(_Map(address, room))[begin : begin + size]


def map_into(place: Bytes, path: Path) -> int:
    """Map a file, for random access, onto `place`, a slice of an array from `reserve`.

    `place` must start at a page boundary. Returns the size of the file; if it differs from the size
    of `place`, nothing is mapped. Raises the same errors as `map_file`.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        if size == len(place):
            address = _mmap(place.ctypes.data, size, mmap.PROT_READ, mmap.MAP_SHARED | FIXED, fd)
            # Random access: read single pages from the disk, without the 128 kB read-ahead.
            _libc.madvise(address, size, MADV_RANDOM)
        return size
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(fd)


def clear(place: Bytes) -> None:
    """Undo `map_into`; the address space stays reserved."""
    _mmap(place.ctypes.data, len(place), NO_ACCESS, ANYTHING | FIXED, -1)


def _mmap(address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    found: int = _libc.mmap(address, size, protection, flags, fd, 0)
    if found == FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found


class _Map:
    """A mapped region that numpy arrays refer to; unmapped with the last reference."""

    def __init__(self, address: int, size: int) -> None:
        self._place = address, size
        self.__array_interface__ = {
            "version": 3, "typestr": "|u1", "shape": (size,), "data": (address, True),
        }  # fmt: skip

    def __del__(self) -> None:
        _libc.munmap(*self._place)
