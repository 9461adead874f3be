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
FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_file(path: Path, *, scattered: bool = False) -> npt.NDArray[np.uint8]:
    """All bytes of a file, read-only; unmapped when no array refers to them any more.

    A file that is read in `scattered` places is fetched from the disk by the page, not by the 128
    kB. Raises what `open` raises, and OSError when the file cannot be mapped.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        if size == 0:
            return np.empty(0, dtype=np.uint8)
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    finally:
        os.close(fd)
    if address == FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    if scattered:
        _libc.madvise(address, size, MADV_RANDOM)
    return np.asarray(_Map(address, size))


class _Map:
    """Mapped bytes, for numpy to refer to; unmapped with the last reference."""

    def __init__(self, address: int, size: int) -> None:
        self._place = address, size
        self.__array_interface__ = {
            "version": 3, "typestr": "|u1", "shape": (size,), "data": (address, True),
        }  # fmt: skip

    def __del__(self) -> None:
        _libc.munmap(*self._place)
