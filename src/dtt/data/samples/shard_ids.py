"""Token ids of shards, which are memory-mapped while they are in use."""

from __future__ import annotations

from functools import lru_cache

from dtt.base.errors import DamagedError, InputError
from dtt.data.memory_map import map_file
from dtt.data.samples.token_shards import Documents, Shard
from dtt.data.token_file import Tokens

# Shared by all sources: each map holds a file descriptor, and a process has 1,024 of them by
# default (ulimit -n). Mapping a shard again costs about 30 µs, in the thread of the loader.
MAPPED_SHARDS = 512
MAPPED_INDEXES = 256


@lru_cache(MAPPED_SHARDS)
def ids_of(shard: Shard) -> Tokens:
    """Return the ids of a shard, memory-mapped.

    A shard that the cache drops stays mapped as long as a thread reads from it. Raises InputError
    for a missing file, DamagedError for one that is too short or too long.
    """
    try:
        content = map_file(shard.path, random=True)
    except FileNotFoundError:
        raise InputError("a token file is missing", where=shard.path) from None
    # A file that shrank since would end the process with SIGBUS when its pages are read.
    if len(content) != shard.offset + shard.tokens * shard.id_bytes:
        raise DamagedError(
            "a token file is shorter or longer than it should be",
            where=shard.path,
            why=f"{len(content)} bytes for {shard.tokens} tokens of {shard.dtype}",
        )
    return content[shard.offset :].view(shard.dtype)


@lru_cache(MAPPED_INDEXES)
def documents_of(shard: Shard) -> Documents:
    """Return the document boundaries of a shard."""
    return shard.documents()
