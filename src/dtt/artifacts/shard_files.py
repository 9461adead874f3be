"""Paths and sizes of the files of a token shard."""

from __future__ import annotations

from pathlib import Path

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
    if local.with_name(f"{local.name}.idx").exists():
        return local
    raise InputError(
        "a token file is not on this node",
        where=f"{shard.host}:{shard.path}.bin",
        why=f"`dtt tokenize` left it on the disk of {shard.host}",
        next=f"rsync -a '{shard.host}:{shard.path}.*' {folder}/",
    )


def index_bytes(sequences: int, entries: int) -> int:
    """Return the size of an index file in bytes; dtt.data.token_file documents the format."""
    return 34 + 12 * sequences + 8 * entries
