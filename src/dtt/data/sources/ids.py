"""The ids of all shards as one array, in which a shard is mapped when it is first read."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from itertools import islice
from threading import Lock

import numpy as np

from dtt.data.mapped import HUGE_PAGE, Bytes, clear, map_into, reserve
from dtt.data.sources.files import Shard
from dtt.data.sources.layout import Ints, Pieces
from dtt.data.tokenfile import Tokens
from dtt.errors import DamagedError, InputError

MAPPED_SHARDS = 16_384
"""At a time; each is a memory map or two, of which Linux allows a process 65,530."""


class ShardIds:
    """The ids of shards, read by the piece.

    One array for all: what Python and numpy keep of ten thousand arrays does not stay in the
    processor's caches, and to fetch it for a piece takes as long as to fetch the ids.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        """Opens no file. InputError when a process may not have as many addresses."""
        self._shards = shards
        width = np.array([np.dtype(s.dtype).itemsize for s in shards], dtype=np.int64)
        header = np.array([s.offset for s in shards], dtype=np.int64)
        self._size = header + width * np.array([s.tokens for s in shards], dtype=np.int64)
        page = HUGE_PAGE if self._size.sum() > HUGE_PAGE * len(shards) else mmap.PAGESIZE
        room = -(-self._size // page) * page
        self._begin = np.cumsum(room) - room
        try:
            self._bytes = reserve(int(room.sum()))
        except OSError as error:
            raise InputError(
                "the token files are larger than what this process may map",
                where=shards[0].path.parent,
                why=f"{room.sum() / 1e9:.1f} GB of addresses: {error.strerror}",
                next="ulimit -v unlimited",
            ) from None
        dtypes = sorted({s.dtype for s in shards})
        self._views = [self._bytes.view(dtype) for dtype in dtypes]
        self._view = np.array([dtypes.index(s.dtype) for s in shards])  # of each shard
        self._first = (self._begin + header) // width  # in ids, as `_begin` in bytes
        self._is_mapped = np.zeros(len(shards), dtype=np.bool_)
        self._mapped: dict[int, None] = {}
        """In the order in which they were."""
        self._lock = Lock()

    def read(self, pieces: Pieces, rows: Ints) -> None:
        """Put each piece into its place in `rows` [samples, tokens], which lie one after another.

        InputError for a file that is missing, DamagedError for one that is too short or too long.
        """
        for first in range(0, len(pieces.shard), MAPPED_SHARDS):
            with self._lock:
                self._read(Pieces(*(x[first : first + MAPPED_SHARDS] for x in pieces)), rows)

    def _read(self, pieces: Pieces, rows: Ints) -> None:
        some_missing = len(self._mapped) < len(self._shards)
        if some_missing and not self._is_mapped[pieces.shard].all():
            self._map(set(pieces.shard.tolist()))
        here = pieces._replace(start=self._first[pieces.shard] + pieces.start)
        if len(self._views) == 1:
            _copy(self._views[0], here, rows)
            return
        for number, ids in enumerate(self._views):
            these = self._view[here.shard] == number
            _copy(ids, Pieces(*(x[these] for x in here)), rows)

    def _map(self, needed: set[int]) -> None:
        """Map all of `needed`, and as many others as may stay."""
        missing = sorted(needed - self._mapped.keys())
        too_many = max(0, len(self._mapped) + len(missing) - MAPPED_SHARDS)
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
        if size != self._size[number]:
            raise DamagedError(
                "a token file is shorter or longer than it should be",
                where=shard.path,
                why=f"{size} bytes for {shard.tokens} tokens of {shard.dtype}",
                next="make or copy it again",
            )

    def _place(self, shard: int) -> Bytes:
        begin = int(self._begin[shard])
        return self._bytes[begin : begin + int(self._size[shard])]


def _copy(ids: Tokens, pieces: Pieces, rows: Ints) -> None:
    """Put pieces, which start at places of `ids` instead of shards, into their places in `rows`."""
    _, start, place, length = pieces
    # Touch where each begins: the processor fetches many at a time, later one by one.
    # A piece of nothing may begin where its file ends, and nothing is mapped there.
    ids[start[length > 0]]
    width = rows.shape[1]
    whole = length == width
    if whole.any():  # rows that are one piece each, which numpy gathers by itself
        # What sliding_window_view gives, without the time that it takes to check it.
        shape, strides = (len(ids) - width + 1, width), ids.strides * 2
        windows: Tokens = np.ndarray(shape, ids.dtype, ids, strides=strides)
        rows[place[whole] // width] = windows[start[whole]]
    flat = rows.reshape(-1)
    rest = (x[~whole].tolist() for x in (start, place, length))
    for first, to, count in zip(*rest, strict=True):
        flat[to : to + count] = ids[first : first + count]
