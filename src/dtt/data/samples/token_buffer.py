"""Token ids of all shards as one array, into which each shard is memory-mapped on first read."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from itertools import islice
from threading import Lock

import numpy as np

from dtt.base.errors import DamagedError, InputError
from dtt.data.memory_map import HUGE_PAGE, Bytes, clear, map_into, reserve
from dtt.data.samples.sample_layout import ShardPieces
from dtt.data.samples.token_shards import Shard
from dtt.data.token_file import Tokens

MAPPED_SHARDS = 16_384
"""Maximum number of shards mapped at a time.

Each takes one or two memory maps; Linux allows 65,530 per process by default (vm.max_map_count)."""


class ShardIds:
    """Reader for pieces of shards.

    All shards share one array. With one array per shard, the Python and numpy metadata of ten
    thousand arrays does not fit into the CPU caches, and fetching it for a piece takes as long as
    fetching the ids.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        """Reserve address space for all shards without opening a file.

        Raises InputError if the address space limit of the process is too small.
        """
        self._shards = shards
        width = np.array([np.dtype(s.dtype).itemsize for s in shards], dtype=np.int64)
        header = np.array([s.offset for s in shards], dtype=np.int64)
        self._size = header + width * np.array([s.tokens for s in shards], dtype=np.int64)
        # Huge pages need aligned maps, and save misses of the address translation. Small shards
        # would waste most of one.
        page = HUGE_PAGE if self._size.sum() > HUGE_PAGE * len(shards) else mmap.PAGESIZE
        room = -(-self._size // page) * page
        self._begin = np.cumsum(room) - room
        try:
            # Address space only: no memory and no file is used before the first read.
            self._bytes = reserve(int(room.sum()))
        except OSError as error:
            raise InputError(
                "the token files are larger than this process can map",
                where=shards[0].path.parent,
                why=f"{room.sum() / 1e9:.1f} GB of address space: {error.strerror}",
                next="ulimit -v unlimited",
            ) from None
        dtypes = sorted({s.dtype for s in shards})
        self._views = [self._bytes.view(dtype) for dtype in dtypes]
        self._view = np.array([dtypes.index(s.dtype) for s in shards])  # each shard's in `_views`
        self._first = (self._begin + header) // width  # like `_begin`, but in ids
        self._is_mapped = np.zeros(len(shards), dtype=np.bool_)
        self._mapped: dict[int, None] = {}
        """Mapped shards as an ordered set, the one mapped longest ago first."""
        self._lock = Lock()

    def read(self, pieces: ShardPieces, rows: Tokens) -> None:
        """Copy each piece to its place in `rows` [samples, tokens], which must be contiguous.

        Raises InputError for a missing file, DamagedError for one that is too short or too long.
        """
        for first in range(0, len(pieces.shard), MAPPED_SHARDS):
            # The reader thread and an evaluation share the buffer; unmapping under a read would end
            # the process.
            with self._lock:
                self._read(ShardPieces(*(x[first : first + MAPPED_SHARDS] for x in pieces)), rows)

    def _read(self, pieces: ShardPieces, rows: Tokens) -> None:
        some_missing = len(self._mapped) < len(self._shards)
        if some_missing and not self._is_mapped[pieces.shard].all():
            self._map(set(pieces.shard.tolist()))
        here = pieces._replace(start=self._first[pieces.shard] + pieces.start)
        # The usual case: no boolean selection of pieces.
        if len(self._views) == 1:
            _copy(self._views[0], here, rows)
            return
        for number, ids in enumerate(self._views):
            these = self._view[here.shard] == number
            _copy(ids, ShardPieces(*(x[these] for x in here)), rows)

    def _map(self, needed: set[int]) -> None:
        """Map all shards in `needed`; first unmap others if MAPPED_SHARDS would be exceeded."""
        missing = sorted(needed - self._mapped.keys())
        too_many = max(0, len(self._mapped) + len(missing) - MAPPED_SHARDS)
        # Oldest first. Shards that this read needs stay.
        for shard in [*islice((s for s in self._mapped if s not in needed), too_many)]:
            self._is_mapped[shard] = False
            del self._mapped[shard]
            clear(self._place(shard))
        for shard in missing:
            self._map_one(shard)
            self._is_mapped[shard] = True
            self._mapped[shard] = None

    def _map_one(self, number: int) -> None:
        shard = self._shards[number]
        try:
            size = map_into(self._place(number), shard.path)
        except FileNotFoundError:
            raise InputError("a token file is missing", where=shard.path) from None
        # A file that shrank since would end the process with SIGBUS when its pages are read.
        if size != self._size[number]:
            raise DamagedError(
                "a token file is shorter or longer than it should be",
                where=shard.path,
                why=f"{size} bytes for {shard.tokens} tokens of {shard.dtype}",
                next="recreate it, or restore it from a copy",
            )

    def _place(self, shard: int) -> Bytes:
        begin = int(self._begin[shard])
        return self._bytes[begin : begin + int(self._size[shard])]


def _copy(ids: Tokens, pieces: ShardPieces, rows: Tokens) -> None:
    """Copy pieces to their places in `rows`; their `start` indexes `ids`, not a shard."""
    _, start, place, length = pieces
    # Touch the first id of every piece: this gather has many cache misses in flight at once, the
    # copies below only one at a time. Empty pieces are left out: one may start at the end of its
    # file, where nothing is mapped.
    ids[start[length > 0]]
    width = rows.shape[1]
    whole = length == width
    if whole.any():  # rows that consist of one piece: numpy gathers them without a Python loop
        # Equivalent to sliding_window_view, without the overhead of its argument checks.
        shape, strides = (len(ids) - width + 1, width), ids.strides * 2
        windows: Tokens = np.ndarray(shape, ids.dtype, ids, strides=strides)
        rows[place[whole] // width] = windows[start[whole]]
    flat = rows.reshape(-1)
    rest = (x[~whole].tolist() for x in (start, place, length))
    for first, to, count in zip(*rest, strict=True):
        flat[to : to + count] = ids[first : first + count]
