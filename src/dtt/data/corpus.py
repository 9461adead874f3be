"""A corpus, cut into units of work before anyone knows how many ranks there are.

The units are a pure function of the corpus and `unit_bytes`. Each is a few spans of files: row
groups of Parquet, byte ranges of plain line files, whole files of what must be read from its start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dtt.artifacts import CorpusManifest, checked_file
from dtt.data.formats import is_compressed
from dtt.errors import DamagedError, InputError
from dtt.runtime.comm import Comm, Serial

COMPRESSION_RATIO = 4
"""Bytes of text per byte of a compressed file, to estimate sizes."""
DEFAULT_UNITS = 64
MIN_UNIT_BYTES, MAX_UNIT_BYTES = 10**6, 256 * 10**6


@dataclass(frozen=True)
class Span:
    """Part of a file: row groups `[start, stop)` of Parquet, else bytes.

    A byte range owns the lines that start in it; the last line may reach beyond `stop`.
    """

    file: int
    """Index into the manifest's files."""
    start: int
    stop: int
    text_bytes: int
    """About how much text it holds."""


@dataclass(frozen=True)
class Unit:
    """What one rank works through on its own, and what becomes one shard."""

    index: int
    spans: tuple[Span, ...]

    @property
    def text_bytes(self) -> int:
        """About how much text it holds."""
        return sum(span.text_bytes for span in self.spans)


class Corpus:
    """The documents that `download` left in a folder."""

    def __init__(
        self, folder: Path, manifest: CorpusManifest | None = None, comm: Comm | None = None
    ) -> None:
        """Look whether the files of the manifest are still those that it names.

        `manifest` is the folder's own if absent. The ranks of `comm` share the files, as each
        takes a few accesses to the disk, or a file server; without it one process looks at all.

        Raises InputError for a missing file, DamagedError for one whose size has changed or that
        is a link out of the folder.
        """
        self.folder = folder
        self.manifest = manifest or CorpusManifest.read(folder)
        self._below = frozenset(self.manifest.names())
        comm = comm or Serial()
        files = range(len(self.manifest.files))
        shares = comm.gather([self._look(file) for file in files[comm.rank :: comm.size]])
        self._row_groups = [shares[file % comm.size][file // comm.size] for file in files]

    def _look(self, file: int) -> list[int]:
        """Check a file; returns about how many bytes of text each row group of Parquet holds."""
        path = self.path(file)
        if self.manifest.files[file].path in self._below:
            checked_file(self.manifest.files[file].path, self.folder / CorpusManifest.filename)
        again = f"dtt download -d {self.manifest.source.id}"
        if not path.is_file():
            raise InputError("a file of the corpus is missing", where=path, next=again)
        expected, found = self.manifest.files[file].bytes, path.stat().st_size
        if found != expected:
            raise DamagedError(
                "a file of the corpus has changed",
                where=path,
                why=f"it had {expected} bytes, now {found}",
                next=again,
            )
        return self._text_bytes(path) if self.manifest.file_format == "parquet" else []

    def _text_bytes(self, path: Path) -> list[int]:
        try:
            groups = text_chunks(path, str(self.manifest.text_column))
        except (OSError, pa.ArrowException) as error:
            if getattr(error, "errno", None) is not None:
                raise  # the disk failed: the next look may give other units
            return [0]  # it is damaged: the reader of documents says how
        return [sum(chunk.total_uncompressed_size for chunk in chunks) for chunks in groups]

    def path(self, file: int) -> Path:
        """Where the `file`-th file lies."""
        return self.folder / self.manifest.files[file].path

    def unit_bytes(self) -> int:
        """The default size of a unit: 1/64 of the text, within bounds."""
        total = sum(span.text_bytes for span in self._pieces(MAX_UNIT_BYTES))
        return min(max(total // DEFAULT_UNITS, MIN_UNIT_BYTES), MAX_UNIT_BYTES)

    def units(self, unit_bytes: int) -> list[Unit]:
        """Cut the corpus into units of at most `unit_bytes`, or of one piece that is larger."""
        units: list[Unit] = []
        spans: list[Span] = []
        room = unit_bytes
        for piece in self._pieces(unit_bytes):
            if spans and piece.text_bytes > room:
                units.append(Unit(len(units), tuple(spans)))
                spans, room = [], unit_bytes
            room -= piece.text_bytes
            if spans and (spans[-1].file, spans[-1].stop) == (piece.file, piece.start):
                last = spans.pop()
                piece = Span(piece.file, last.start, piece.stop, last.text_bytes + piece.text_bytes)
            spans.append(piece)
        return [*units, Unit(len(units), tuple(spans))] if spans else units

    def _pieces(self, unit_bytes: int) -> Iterator[Span]:
        for file, record in enumerate(self.manifest.files):
            if self.manifest.file_format == "parquet":
                for group, text_bytes in enumerate(self._row_groups[file]):
                    yield Span(file, group, group + 1, text_bytes)
            elif is_compressed(self.path(file)):
                yield Span(file, 0, record.bytes, COMPRESSION_RATIO * record.bytes)
            elif self.manifest.file_format == "csv" or self.manifest.txt_documents == "file":
                yield Span(file, 0, record.bytes, record.bytes)
            else:
                for start in range(0, max(record.bytes, 1), unit_bytes):
                    stop = min(start + unit_bytes, record.bytes)
                    yield Span(file, start, stop, stop - start)


def text_chunks(
    path: Path, column: str, groups: slice = slice(None)
) -> list[list[pq.ColumnChunkMetaData]]:
    """The chunks of a column in each of the row groups of a Parquet file, as its footer has them.

    Raises OSError or ArrowException if that cannot be read.
    """
    footer = pq.read_metadata(path)
    return [
        [
            chunk
            for chunk in map(group.column, range(group.num_columns))
            if chunk.path_in_schema == column
        ]
        for group in map(footer.row_group, range(footer.num_row_groups)[groups])
    ]
