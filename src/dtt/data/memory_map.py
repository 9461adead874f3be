"""Files as read-only, memory-mapped arrays."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


def map_file(path: Path, *, random: bool = False) -> Bytes:
    """Return all bytes of a file as a read-only array; `random` switches read-ahead off.

    The file is unmapped when no array refers to its bytes any more. The map holds a file
    descriptor, so keep few of them. Raises the errors of `open`, and OSError if the file cannot be
    mapped.
    """
    with path.open("rb") as file:
        # `mmap` refuses empty files.
        if os.fstat(file.fileno()).st_size == 0:
            return np.empty(0, dtype=np.uint8)
        try:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
    # Windows of a shuffled source are a few kB each; the kernel would read 128 kB around each.
    if random and hasattr(mmap, "MADV_RANDOM"):
        content.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(content, dtype=np.uint8)
