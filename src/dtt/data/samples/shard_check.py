"""Verification of token files by their sha256, in the background while training reads them."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import zlib
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from dtt.base.errors import DamagedError
from dtt.data.samples.token_shards import Shard

PIECE = 4 * 2**20
"""Bytes that are read at once, which bounds the memory and the page cache that a check takes."""
AT_ONCE = 2**20
"""Bytes that are hashed before training reads on. This takes a few milliseconds, and a run that is
too short for the background thread still notices damage."""
NICENESS = 19


class ShardCheck:
    """A check of the files of every shard when it is first read; each rank checks its share.

    A flipped bit gives another valid token id, so nothing but the hash shows it. Hashing all files
    before the start would delay it by minutes per TB. Files that have not changed since
    `dtt tokenize` hashed them are not read again, nor are files without a sha256.
    """

    def __init__(self, rank: int, size: int) -> None:
        """Check the share of one of `size` ranks that all learn about the same samples."""
        self._rank, self._size = rank, size
        self._seen: set[Path] = set()
        self._queue: deque[Shard] = deque()
        self._lock = threading.Lock()
        self._running = False
        self._at_once = AT_ONCE
        self._damage: DamagedError | None = None

    def reads(self, shards: Iterable[Shard]) -> None:
        """Check those shards soon that are new; raise DamagedError if a file was found damaged."""
        for shard in shards:
            # By path: two sources may read the same folder.
            if shard.path in self._seen:
                continue
            self._seen.add(shard.path)
            # By the name, not in order of appearance: evaluation and the loader are concurrent.
            if zlib.crc32(os.fsencode(shard.path)) % self._size != self._rank:
                continue
            # Opening a file on a file server takes as long as hashing some 64 kB.
            self._at_once -= 2**16 + shard.tokens * shard.id_bytes
            if self._at_once >= 0:
                self._verify(shard)
                continue
            with self._lock:
                self._queue.append(shard)
                if not self._running:
                    self._running = True
                    # A daemon: the end of training does not wait for it.
                    threading.Thread(target=self._work, name="shard check", daemon=True).start()
        if self._damage is not None:
            raise self._damage

    def _work(self) -> None:
        if sys.platform == "linux":  # where threads have a priority of their own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while True:
            with self._lock:
                if not self._queue or self._damage is not None:
                    self._running = False
                    return
                shard = self._queue.popleft()
            self._verify(shard)

    def _verify(self, shard: Shard) -> None:
        try:
            for path, sha256 in shard.to_verify():
                if _sha256(path) != sha256:
                    self._damage = _damaged(path, "its sha256 differs from that in the manifest")
                    return
        except FileNotFoundError:
            pass  # the loader reports a file that is missing where it is read
        except OSError as error:
            self._damage = _damaged(Path(error.filename or shard.path), str(error.strerror))


def _sha256(path: Path) -> str:
    """Return the sha256 of a file, which is read once and is not kept in the page cache."""
    digest, piece = hashlib.sha256(), memoryview(bytearray(PIECE))
    with path.open("rb", buffering=0) as file:
        start = 0
        while read := file.readinto(piece):
            digest.update(piece[:read])
            # A sequential read of terabytes would displace what training reads again. The kernel
            # keeps pages that are mapped, as those in use by the loader are.
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), start, read, os.POSIX_FADV_DONTNEED)
            start += read
    return digest.hexdigest()


def _damaged(path: Path, why: str) -> DamagedError:
    return DamagedError(
        "a token file is damaged",
        where=path,
        why=why,
        next="copy the file again from where it is intact, or `dtt tokenize` encodes it again; "
        "then continue from a checkpoint of before it was read, or start again",
    )
