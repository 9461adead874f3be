"""Division of a corpus into units of work, independent of the number of ranks.

The units are a pure function of the corpus and `unit_bytes`. Each unit is a list of file spans: row
groups of Parquet files, byte ranges of uncompressed line-based files, and entire files where
reading must start at the beginning (compressed files, CSV, one document per file).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from dtt.artifacts.corpus import CorpusManifest
from dtt.base.errors import DamagedError, InputError
from dtt.base.safe_names import checked_file
from dtt.config.clean import CleanConfig
from dtt.data.corpus.bad_documents import raise_if_refused
from dtt.data.corpus.formats import FORMATS
from dtt.data.corpus.parquet import text_chunks
from dtt.data.corpus.selection import open_selection
from dtt.data.corpus.streams import Span, is_compressed
from dtt.mesh.comm import Comm, Serial

COMPRESSION_RATIO = 4
"""Assumed bytes of text per byte of a compressed file, to estimate sizes."""
DEFAULT_UNITS = 64
"""Smallest number of units of a corpus, within the bounds of their size."""
MIN_UNIT_BYTES, MAX_UNIT_BYTES = 10**6, 256 * 10**6
"""Bounds of the default unit size, in bytes of text."""


@dataclass(frozen=True)
class Unit:
    """A unit of work: one rank processes it, and it becomes one shard per split."""

    index: int
    spans: tuple[Span, ...]

    @property
    def text_bytes(self) -> int:
        """Estimated bytes of text in the unit."""
        return sum(span.text_bytes for span in self.spans)


class Corpus:
    """The corpus that `dtt download` wrote to a folder."""

    def __init__(
        self,
        folder: Path,
        manifest: CorpusManifest | None = None,
        comm: Comm | None = None,
        clean: CleanConfig | None = None,
    ) -> None:
        """Open a corpus and check its files against the manifest.

        `manifest` defaults to the one in `folder`. With `clean`, the documents that `dtt clean`
        removed accordingly are left out wherever documents are read. Checking a file takes several
        accesses to the disk or file server, so the ranks of `comm` divide the files among
        themselves; without `comm` this process checks all of them.

        Raises InputError for a missing file or selection, and DamagedError for a file whose size
        has changed or that is a link to a place outside the folder.
        """
        self.folder = folder
        self.manifest = manifest or CorpusManifest.read(folder)
        self.selection = open_selection(clean, self.manifest, folder)
        """The removed documents; None: all are read."""
        self._below = frozenset(self.manifest.names())
        comm = comm or Serial()
        files = range(len(self.manifest.files))
        shares = comm.gather([self._look(file) for file in files[comm.rank :: comm.size]])
        looked = [shares[file % comm.size][file // comm.size] for file in files]
        self._row_groups = [row_groups for row_groups, _ in looked]
        self._is_one_span = [is_one_span for _, is_one_span in looked]

    def _look(self, file: int) -> tuple[list[int], bool]:
        """Check a file; return the bytes of text per row group, and True if it cannot be divided.

        A compressed file is one span anyway, so its content is not looked at.
        """
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
        form = FORMATS[self.manifest.file_format]
        if not form.has_row_groups:
            return [], not is_compressed(path) and form.is_one_span(path)
        try:
            groups = text_chunks(path, self.manifest.text_column)
        except (OSError, pa.ArrowException) as error:
            raise_if_refused(error)  # a later attempt may succeed, and would make other units
            return [0], False  # the file is damaged; documents.py reports the details
        sizes = [sum(chunk.total_uncompressed_size for chunk in chunks) for chunks in groups]
        return sizes, False

    def path(self, file: int) -> Path:
        """Return the path of the file with this index in the manifest."""
        return self.folder / self.manifest.files[file].path

    def with_removed(self) -> Corpus:
        """Return this corpus without its selection, so that all documents are read."""
        whole = copy.copy(self)
        whole.selection = None
        return whole

    def unit_bytes(self) -> int:
        """Return the unit size in bytes of text: the selection's, or 1/64 of the corpus.

        The latter is rounded down to a power of two, within bounds. So a change of the corpus
        rarely changes it, which would move the units of all large files.
        """
        if self.selection is not None:
            return self.selection.manifest.unit_bytes
        total = sum(span.text_bytes for span in self._pieces(MAX_UNIT_BYTES))
        rounded = 1 << (max(total // DEFAULT_UNITS, 1).bit_length() - 1)
        return min(max(rounded, MIN_UNIT_BYTES), MAX_UNIT_BYTES)

    def units(self, unit_bytes: int) -> list[Unit]:
        """Divide the corpus into units of at most `unit_bytes` bytes of text.

        A row group or file that cannot be divided and is larger forms a separate unit. With a
        selection, `unit_bytes` must be that of the selection. Raises DamagedError if the selection
        has another number of units.
        """
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
        if spans:
            units.append(Unit(len(units), tuple(spans)))
        if self.selection is not None:
            assert unit_bytes == self.selection.manifest.unit_bytes
            if len(units) != len(self.selection.manifest.units):
                raise DamagedError(
                    f"the selection is of {len(self.selection.manifest.units)} units, and the "
                    f"corpus has {len(units)}",
                    where=self.selection.folder,
                    next="remove the folder, and run `dtt clean` again",
                )
        return units

    def _pieces(self, unit_bytes: int) -> Iterator[Span]:
        for file, record in enumerate(self.manifest.files):
            if FORMATS[self.manifest.file_format].has_row_groups:
                for group, text_bytes in enumerate(self._row_groups[file]):
                    yield Span(file, group, group + 1, text_bytes)
            elif is_compressed(self.path(file)):
                yield Span(file, 0, record.bytes, COMPRESSION_RATIO * record.bytes)
            elif self.manifest.txt_documents == "file" or self._is_one_span[file]:
                yield Span(file, 0, record.bytes, record.bytes)
            else:
                for start in range(0, max(record.bytes, 1), unit_bytes):
                    stop = min(start + unit_bytes, record.bytes)
                    yield Span(file, start, stop, stop - start)
