"""Prefetching of corpus files into the page cache of the operating system."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain

import pyarrow as pa

from dtt.data.corpus.units import Corpus, Span, Unit, text_chunks

REQUEST_BYTES = 2**17
"""Bytes per posix_fadvise call: Linux reads at most the device's read-ahead, 128 KiB by default."""


def prefetch(corpus: Corpus, unit: Unit) -> None:
    """Request all of `unit` from the disk without waiting, so that I/O overlaps with encoding.

    Only the footers of Parquet files are read here, to locate the text column. Nothing is requested
    for damaged files, for small files (opening them takes as long as reading them), and on systems
    without posix_fadvise(2), such as macOS; these are read normally later.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    for span in (span for span in unit.spans if span.text_bytes >= REQUEST_BYTES):
        with suppress(OSError, pa.ArrowException), corpus.path(span.file).open("rb") as file:
            for start, stop in _ranges(corpus, span):
                for offset in range(start, stop, REQUEST_BYTES):
                    length = min(REQUEST_BYTES, stop - offset)
                    os.posix_fadvise(file.fileno(), offset, length, os.POSIX_FADV_WILLNEED)


def _ranges(corpus: Corpus, span: Span) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of a span's text in its file.

    For Parquet, there is one range per chunk of the columns that are read.
    """
    if corpus.manifest.file_format != "parquet":
        yield span.start, span.stop
        return
    column, groups = corpus.manifest.text_column, slice(span.start, span.stop)
    for chunk in chain.from_iterable(text_chunks(corpus.path(span.file), column, groups)):
        start = chunk.data_page_offset
        if chunk.has_dictionary_page:
            start = min(start, chunk.dictionary_page_offset)
        yield start, start + chunk.total_compressed_size
