"""What is asked for ahead of time comes into the system's file cache."""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.documents import read_unit
from dtt.data.corpus.page_cache import prefetch
from dtt.data.corpus.units import Unit

PAGE = mmap.PAGESIZE


pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="cannot be asked there")


def forget(path: Path) -> bool:
    """Put a file out of the cache; False where the file system keeps its files in memory."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return not cached(path)


def cached(path: Path) -> set[int]:
    """The pages of a file that are in the cache."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as view:
        flags = (ctypes.c_ubyte * -(-len(view) // PAGE))()
        start = ctypes.c_char.from_buffer(view)
        failed = ctypes.CDLL(None).mincore(ctypes.byref(start), ctypes.c_size_t(len(view)), flags)
        del start  # lets go of the view
        assert not failed
    return {page for page, flag in enumerate(flags) if flag & 1}


def wait_for(path: Path, pages: set[int]) -> set[int]:
    """What is cached once all of `pages` are; after a while, without them."""
    deadline = time.monotonic() + 10
    while not pages <= (found := cached(path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert pages <= found
    return found


def test_only_the_bytes_of_a_unit_are_prefetched(corpora: Any) -> None:
    lines = b"".join(b'{"text": "%0100d"}\n' % number for number in range(50_000))
    corpus = corpora.make({"a.jsonl": lines})
    units = corpus.units(2**20)
    [span] = units[2].spans
    forgotten = forget(path := corpus.path(0))
    prefetch(corpus, units[2])
    wanted = set(range(span.start // PAGE, span.stop // PAGE))
    found = wait_for(path, wanted)
    assert len(found) < len(wanted) + 64 or not forgotten


def test_only_the_text_column_of_parquet_is_prefetched(corpora: Any) -> None:
    texts = [os.urandom(1000).hex() for _ in range(2000)]
    file = io.BytesIO()
    pq.write_table(pa.table({"other": texts[::-1], "text": texts}), file, row_group_size=500)
    corpus = corpora.make({"a.parquet": file.getvalue()}, text_column="text")
    forgotten = forget(path := corpus.path(0))
    prefetch(corpus, Unit(0, corpus.units(1)[1].spans))
    chunk = pq.read_metadata(path).row_group(1).column(1)
    start = chunk.dictionary_page_offset
    found = wait_for(path, set(range(start // PAGE, (start + chunk.total_compressed_size) // PAGE)))
    assert len(found) < path.stat().st_size / PAGE / 2 or not forgotten


def test_a_missing_or_damaged_file_is_left_to_its_reader(corpora: Any) -> None:
    content = io.BytesIO()
    pq.write_table(pa.table({"text": ["a" * 2**18]}), content)
    corpus = corpora.make({"a.parquet": content.getvalue()})
    [unit] = corpus.units(10**6)
    corpus.path(0).write_bytes(b"PAR1")
    prefetch(corpus, unit)
    bad = BadDocuments()
    assert list(read_unit(corpus, unit, bad)) == []
    assert bad.count == 1
    corpus.path(0).unlink()
    prefetch(corpus, unit)
    with pytest.raises(FileNotFoundError):
        list(read_unit(corpus, unit, bad))
