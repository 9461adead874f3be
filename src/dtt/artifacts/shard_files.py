"""Paths and sizes of the files of a token shard."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dtt.artifacts.manifests import TokenShard
from dtt.base.errors import InputError


def shard_stem(folder: Path, shard: TokenShard) -> Path:
    """Return the path of a shard's files without the suffix, in `folder` or on this node's disk.

    Raises InputError, with the command that fetches them, if they are on another node's disk.
    """
    stem = folder / shard.stem
    if shard.path is None or stem.with_name(f"{stem.name}.idx").exists():
        return stem
    local = Path(shard.path)
    # Only what this node has written itself: the manifest of a stranger names any path.
    here = shard.host == socket.gethostname() and local.name == stem.name
    if here and local.with_name(f"{local.name}.idx").exists():
        return local
    raise InputError(
        "a token file is not on this node",
        where=f"{shard.host}:{shard.path}.bin",
        why=f"`dtt tokenize` left it on the disk of {shard.host}",
        next=f"rsync -a {shlex.quote(f'{shard.host}:{shard.path}.*')} {shlex.quote(f'{folder}/')}",
    )


ID_BYTES = {"uint16": 2, "int32": 4}
"""Bytes of a token id by the dtype of token files."""


class ShardFile(NamedTuple):
    """A file of a shard, as the manifest records it."""

    path: Path
    bytes: int
    sha256: str


def files_of(stem: Path, shard: TokenShard, dtype: str) -> Iterator[ShardFile]:
    """Yield the files of a shard whose ids have `dtype`; `stem` is their path without suffix."""
    counts = shard.counts
    for suffix, size, sha256 in (
        (".bin", counts.tokens * ID_BYTES[dtype], shard.bin_sha256),
        (".idx", index_bytes(counts.documents, counts.documents + 1), shard.idx_sha256),
        (".mask", counts.tokens, shard.mask_sha256),
    ):
        if sha256 is not None:
            yield ShardFile(stem.with_name(stem.name + suffix), size, sha256)


def index_bytes(sequences: int, entries: int) -> int:
    """Return the size of an index file in bytes; dtt.data.token_file documents the format."""
    return 34 + 12 * sequences + 8 * entries
