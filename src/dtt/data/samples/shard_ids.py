"""Token ids of shards, which are memory-mapped while they are in use."""

from __future__ import annotations

import resource
from functools import lru_cache

from dtt.base.errors import DamagedError, InputError
from dtt.data.memory_map import map_file
from dtt.data.samples.token_shards import DocumentBounds, Shard
from dtt.data.token_file import Tokens

# Each map holds a file descriptor. All of them stay below 1,024, whatever the limit is: C libraries
# that call select() write past its table for a higher one. The caches are shared by all sources. A
# shard beyond them is mapped again for each piece of a sample, which takes 20 to 40 µs instead of
# 2: a tenth of the speed, but still 26 million tokens per CPU second.
_LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # -1 if there is none
MAPPED_SHARDS = 256 if _LIMIT < 0 else min(256, _LIMIT // 4)
MAPPED_INDEXES = MAPPED_SHARDS // 4


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
def documents_of(shard: Shard) -> DocumentBounds:
    """Return the document boundaries of a shard."""
    return shard.documents()
