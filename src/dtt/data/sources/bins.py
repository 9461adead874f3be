"""Best-fit packing of documents into samples, computed once and cached beside the token files.

    .packing/<key>/first    int64[bins + 1]: index of each bin's first piece; the last entry is
                            the number of pieces
                   start    int64[pieces]: first token of each piece, counted over all shards as
                            one concatenated stream
                   length   int32[pieces]: number of tokens in each piece

A piece is a document, or part of one that is longer than a bin. The folder is renamed into place
when it is complete. If the folder of the token files is not writable, the packing is stored in the
user's cache folder instead ($XDG_CACHE_HOME or ~/.cache).
"""

from __future__ import annotations

import os
import shutil
import socket
from contextlib import ExitStack
from pathlib import Path

import filelock
import numpy as np

from dtt.artifacts import fingerprint
from dtt.data.mapped import map_file
from dtt.data.packing import pack
from dtt.data.source import Samples
from dtt.data.sources.files import Shard, TokenFiles
from dtt.data.sources.layout import Ints, Pieces
from dtt.errors import DamagedError
from dtt.runtime.files import fsync_folder
from dtt.runtime.log import log

COLUMNS = {"first": "<i8", "start": "<i8", "length": "<i4"}


def bins(files: TokenFiles, ends: Ints, capacity: int) -> Bins:
    """Return the documents of all shards packed into bins of `capacity` tokens.

    `ends` [shards] is the end of each shard in the token stream. Each shard is packed separately.
    The first process to call this packs the documents while the others wait on a file lock.
    """
    key = fingerprint(["best-fit", capacity, [(s.tokens, s.version) for s in files.shards]])[:16]
    beside = files.path if files.path.is_dir() else files.path.parent
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    places = [beside / ".packing" / key, cache / "dtt" / "packing" / key]
    for place in places:
        if place.is_dir():
            return Bins(place, ends, capacity)
    place = places[0] if _can_hold(places[0].parent) else places[1]
    place.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(place.with_name(f"{key}.lock")):
        if not place.is_dir():
            _pack(files, capacity, place)
    return Bins(place, ends, capacity)


def _can_hold(folder: Path) -> bool:
    try:
        folder.mkdir(exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _pack(files: TokenFiles, capacity: int, place: Path) -> None:
    """Pack one shard after the other, and log the fill rate of the bins."""
    # On some file systems, locks work within one node only. Each node then writes its own copy, and
    # the first rename wins.
    aside = place.with_name(f".{place.name}.{socket.gethostname()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    base = made = pieces = 0
    with ExitStack() as stack:
        first, start, length = (stack.enter_context((aside / c).open("wb")) for c in COLUMNS)
        for shard in files.shards:
            packed = pack(_bounds(shard), capacity)
            first.write((packed.first[:-1] + pieces).astype("<i8").tobytes())
            start.write((packed.start + base).astype("<i8").tobytes())
            length.write(packed.length.astype("<i4").tobytes())
            base, made = base + shard.tokens, made + len(packed.first) - 1
            pieces += len(packed.start)
        first.write(pieces.to_bytes(8, "little"))
        for file in (first, start, length):
            file.flush()
            os.fsync(file.fileno())
    try:
        aside.rename(place)
    except OSError:
        if not place.is_dir():
            raise
        shutil.rmtree(aside)
    fsync_folder(place.parent)
    if made:
        full = 100 * base / (made * capacity)
        told = "packed %d tokens of %s into %d sequences, %.2f %% full"
        log.info(told, base, files.path, made, full)


def _bounds(shard: Shard) -> Ints:
    """Return the first token of each document, then the number of tokens.

    Raises DamagedError if the documents are not contiguous or do not cover the shard.
    """
    bounds = shard.documents().bounds()
    if bounds[0] != 0 or bounds[-1] != shard.tokens or (np.diff(bounds) < 0).any():
        raise DamagedError(
            "the documents of a token file do not follow one another",
            where=shard.path,
            why="its index does not belong to it",
            next="make or copy both again",
        )
    return bounds


class Bins:
    """Packed bins read from disk. Implements dtt.data.sources.layout.Layout."""

    whole_documents = True

    def __init__(self, folder: Path, ends: Ints, capacity: int) -> None:
        """Map the bins in `folder`; `ends` [shards] is the end of each shard in the stream."""
        self._first, self._start, self._length = (
            map_file(folder / column).view(dtype) for column, dtype in COLUMNS.items()
        )
        self._ends, self._capacity = ends, capacity

    def __len__(self) -> int:
        """Return the number of bins."""
        return len(self._first) - 1

    def pieces(self, samples: Samples) -> Pieces:
        """See Layout."""
        first = self._first[samples]
        counts = self._first[samples + np.uint64(1)] - first
        before = np.cumsum(counts) - counts  # pieces in the rows above
        row = np.repeat(np.arange(len(samples)), counts)
        piece = np.arange(len(row)) + (first - before)[row]
        start, length = self._start[piece], self._length[piece].astype(np.int64)
        place = np.cumsum(length) - length
        place += row * self._capacity - place[before][row]
        shard = self._ends.searchsorted(start, side="right")
        shard_starts = np.concatenate([[0], self._ends])
        return Pieces(shard, start - shard_starts[shard], place, length)

    def targets(self, samples: Samples) -> int:
        """See Layout."""
        return int(self.pieces(samples).length.sum()) - len(samples)
