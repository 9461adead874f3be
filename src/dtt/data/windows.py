"""A split of a token folder as fixed-length windows over one long stream of documents.

Window i is tokens i*T … i*T + T of the stream (T + 1 tokens: T inputs and their targets), so
neighbours share one token and every token but the first is a target exactly once, up to the end of
the last whole window. Windows cross documents and shards. The manifest alone tells where each shard
starts: no file is opened before it is read.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dtt.artifacts import TokenShard, TokensManifest
from dtt.data.tokenfile import TokenFile, Tokens
from dtt.errors import DamagedError

OPEN_FILES = 128


class Windows:
    """The windows of one split."""

    def __init__(self, folder: Path, manifest: TokensManifest, split: str, seq_len: int) -> None:
        """`manifest` is that of `folder`; `split` is `train` or `validation`."""
        self._folder = folder
        self._shards = [s for s in manifest.shards if s.split == split]
        self._starts = np.cumsum([0, *(s.counts.tokens for s in self._shards)], dtype=np.int64)
        self._seq_len = seq_len
        self.tokens = int(self._starts[-1])
        self._open = lru_cache(maxsize=OPEN_FILES)(self._open_shard)

    def __len__(self) -> int:
        """Number of windows."""
        return max(0, (self.tokens - 1) // self._seq_len)

    def read(self, windows: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Ids of some windows: [len(windows), seq_len + 1]."""
        batch = np.empty((len(windows), self._seq_len + 1), dtype=np.int64)
        for row, window in zip(batch, windows.tolist(), strict=True):
            self._copy(window * self._seq_len, row)
        return batch

    def _copy(self, start: int, out: npt.NDArray[np.int64]) -> None:
        """Fill `out` with the stream from position `start`."""
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        filled = 0
        while filled < len(out):
            offset = start + filled - int(self._starts[shard])
            piece = self._open(shard)[offset : offset + len(out) - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            shard += 1

    def _open_shard(self, shard: int) -> Tokens:
        return open_shard(self._folder, self._shards[shard]).tokens


def open_shard(folder: Path, record: TokenShard) -> TokenFile:
    """A shard of a token folder; InputError, DamagedError if it is not what the manifest names."""
    file = TokenFile(folder / record.stem)
    if file.total != record.counts.tokens:
        raise DamagedError(
            "a token file is not the one the manifest names",
            where=f"{folder / record.stem}.bin",
            why=f"{file.total} tokens, the manifest says {record.counts.tokens}",
            next="make it again: dtt tokenize --overwrite",
        )
    return file
