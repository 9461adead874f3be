"""Have the system bring text into its file cache before it is read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain

import pyarrow as pa

from dtt.data.corpus import Corpus, Span, Unit, text_chunks

REQUEST_BYTES = 2**17
"""Linux brings no more at a request than the read-ahead of the device, by default this much."""


def prefetch(corpus: Corpus, unit: Unit) -> None:
    """Ask for all of `unit` without waiting for it: the disk works while the processor does.

    Only the footers of Parquet are read, as they say where the text lies.
    Left to who reads it is what cannot be asked for (a file that is damaged, or a system without
    posix_fadvise(2), as macOS), and small files, as to open them takes as long as to read them.
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
    """Where the text of a span lies in its file: of Parquet, the text column of each row group."""
    if corpus.manifest.file_format != "parquet":
        yield span.start, span.stop
        return
    column, groups = str(corpus.manifest.text_column), slice(span.start, span.stop)
    for chunk in chain.from_iterable(text_chunks(corpus.path(span.file), column, groups)):
        start = chunk.data_page_offset
        if chunk.has_dictionary_page:
            start = min(start, chunk.dictionary_page_offset)
        yield start, start + chunk.total_compressed_size
