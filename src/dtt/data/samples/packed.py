"""Best-fit packing of documents into samples, computed once and cached next to the token files.

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
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import filelock
import numpy as np

from dtt.artifacts.manifest import fingerprint
from dtt.base.errors import DamagedError
from dtt.base.files import fsync_file, fsync_folder
from dtt.base.log import log
from dtt.data.memory_map import map_file
from dtt.data.samples.packing import Packed, pack
from dtt.data.samples.protocol import Counts, Samples
from dtt.data.samples.sample_layout import Ints, ShardPieces
from dtt.data.samples.token_shards import Shard, TokenFiles

COLUMNS = {"first": "<i8", "start": "<i8", "length": "<i4"}


def bins(files: TokenFiles, ends: Ints, capacity: int) -> Bins:
    """Return the documents of all shards packed into bins of `capacity` tokens.

    `ends` [shards] is the end of each shard in the token stream. Each shard is packed separately.
    The first process to call this packs the documents while the others wait on a file lock.
    """
    # Versions of shards are in the key: other files with the same sizes get another packing.
    key = fingerprint(["best-fit", capacity, [(s.tokens, s.version) for s in files.shards]])[:16]
    place = cached(files.path, key, lambda aside: _pack(files, capacity, aside))
    return Bins(place, ends, capacity)


def cached(path: Path, key: str, write: Callable[[Path], None]) -> Path:
    """Return the folder of a packing of the token files at `path`; `write` it if there is none.

    `write` is called with a temporary folder, in one process of the node.
    """
    beside = path if path.is_dir() else path.parent
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # Beside the tokens first, where all nodes find it; else in the home of the user.
    places = [beside / ".packing" / key, cache / "dtt" / "packing" / key]
    for place in places:
        if place.is_dir():
            return place
    place = places[0] if _can_hold(places[0].parent) else places[1]
    place.parent.mkdir(parents=True, exist_ok=True)
    # One process of a node packs, while the others wait instead of packing too.
    with filelock.FileLock(place.with_name(f"{key}.lock")):
        # Again under the lock: another process may have finished meanwhile.
        if not place.is_dir():
            _write(place, write)
    return place


def _write(place: Path, write: Callable[[Path], None]) -> None:
    # On some file systems, locks work within one node only. Each node then writes its own copy, and
    # the first rename wins.
    aside = place.with_name(f".{place.name}.{socket.gethostname()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    write(aside)
    # Flushed before the rename, or a power failure could leave a complete name with empty files.
    for path in aside.iterdir():
        fsync_file(path)
    try:
        aside.rename(place)
    except OSError:
        # Another node won. Its packing is equal, as it depends on the key alone.
        if not place.is_dir():
            raise
        shutil.rmtree(aside)
    fsync_folder(place.parent)


def _can_hold(folder: Path) -> bool:
    try:
        folder.mkdir(exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _pack(files: TokenFiles, capacity: int, aside: Path) -> None:
    """Pack one shard after the other into files in `aside`, and log the fill rate of the bins."""
    base = made = pieces = 0
    with ExitStack() as stack:
        first, start, length = (stack.enter_context((aside / c).open("wb")) for c in COLUMNS)
        for shard in files.shards:
            packed = pack(document_bounds(shard), capacity)
            first.write((packed.first[:-1] + pieces).astype("<i8").tobytes())
            start.write((packed.start + base).astype("<i8").tobytes())
            length.write(packed.length.astype("<i4").tobytes())
            base, made = base + shard.tokens, made + len(packed.first) - 1
            pieces += len(packed.start)
        first.write(pieces.to_bytes(8, "little"))
    if made:
        full = 100 * base / (made * capacity)
        message = "packed %d tokens of %s into %d sequences, %.2f %% full"
        log.info(message, base, files.path, made, full)


def write_columns(folder: Path, packed: Packed) -> None:
    """Write a packing into the files that `Bins` maps."""
    for (name, dtype), column in zip(COLUMNS.items(), packed, strict=True):
        column.astype(dtype).tofile(folder / name)


def document_bounds(shard: Shard) -> Ints:
    """Return the first token of each document, then the number of tokens.

    Raises DamagedError if the documents are not contiguous or do not cover the shard.
    """
    bounds = shard.documents().bounds()
    if bounds[0] != 0 or bounds[-1] != shard.tokens or (np.diff(bounds) < 0).any():
        raise DamagedError(
            "the documents of a token file are not contiguous",
            where=shard.path,
            why="its index does not match it",
            next="recreate both, or restore them from a copy",
        )
    return bounds


class Bins:
    """Packed bins read from disk. Implements dtt.data.samples.sample_layout.SampleLayout."""

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

    def pieces(self, samples: Samples) -> ShardPieces:
        """See SampleLayout."""
        first = self._first[samples]
        counts = self._first[samples + np.uint64(1)] - first
        # Array arithmetic instead of a loop: a batch has thousands of pieces.
        before = np.cumsum(counts) - counts  # pieces in the rows above
        row = np.repeat(np.arange(len(samples)), counts)
        piece = np.arange(len(row)) + (first - before)[row]
        start, length = self._start[piece], self._length[piece].astype(np.int64)
        place = np.cumsum(length) - length
        place += row * self._capacity - place[before][row]
        shard = self._ends.searchsorted(start, side="right")
        # A piece belongs to the first shard that ends behind its start.
        shard_starts = np.concatenate([[0], self._ends])
        return ShardPieces(shard, start - shard_starts[shard], place, length)

    def counts(self, samples: Samples) -> Counts:
        """See SampleLayout."""
        tokens = int(self.pieces(samples).length.sum())
        # Each sample is one token longer than its targets.
        targets = tokens - len(samples)
        return Counts(targets, targets, tokens)
