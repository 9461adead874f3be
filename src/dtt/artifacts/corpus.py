"""The manifest of a corpus, and its description in what is made from it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from dtt.artifacts.manifest import FileRecord, Manifest, Record, fingerprint


class CorpusFile(FileRecord):
    """A file of raw documents."""

    mtime_ns: int
    """Modification time when the content was hashed. A file whose size and time have not changed is
    not hashed again."""
    version: str | None = None
    """Version of a downloaded object, such as its ETag; None for other files."""


SourceKind = Literal["stdlib", "local", "hub", "url", "own"]


class CorpusSource(Record):
    """The origin of documents, with everything needed to fetch the same ones again."""

    kind: SourceKind
    id: str
    name: str | None = None
    split: str | None = None
    revision: str | None = None
    """Commit of the Hub."""
    max_files: int | None = None
    """Number of files that were taken from the start of the split; None: all."""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


class CorpusRequest(Record):
    """The keys of the section `download` that decide which documents there are, as configured."""

    name: str | None
    split: str | None
    revision: str | None
    text_column: str | None
    txt_documents: str
    max_files: int | None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    documents: dict[str, Any] | None = None
    """Class of the documents of a user's own, as `type`, and its keys."""


class CorpusDescription(Record):
    """The documents of a corpus, as a configuration describes them."""

    source: CorpusSource
    request: CorpusRequest | None = None
    """What was configured; None in folders of earlier versions."""
    text_column: str | None = None
    txt_documents: str | None = None

    def resolved(self, option: str) -> Any:
        """Return what an option of `request` was resolved to."""
        return getattr(self if option in ("text_column", "txt_documents") else self.source, option)


FileFormat = Literal["parquet", "jsonl", "csv", "txt"]
"""Names of file formats; data/corpus/formats.py has an entry for each."""


class CorpusManifest(Manifest):
    """The manifest of a corpus: raw documents in files of one format.

    `dtt download` writes it, `dtt tokenize` reads it.
    """

    holds: ClassVar[str] = "corpus"
    made_by: ClassVar[str] = "dtt download"

    format: Literal["dtt-corpus-1"] = "dtt-corpus-1"
    dataset: str
    """Short name of the data set, used in default folder names."""
    source: CorpusSource
    """Origin of the documents."""
    file_format: FileFormat
    """`parquet`, `jsonl`, `csv` (also of .tsv files) or `txt`; all but the first may be compressed
    (.gz or .zst)."""
    text_column: str | None
    """Column or key of the text; None for txt, and for conversations, which are complete rows."""
    txt_documents: Literal["file", "line", "section"] | None
    """The unit that is one document in a txt file: `file`, `line`, `section`; null for other
    formats."""
    request: CorpusRequest | None = None
    """What the section `download` asked for; dtt refuses to use the corpus for another request."""
    files: tuple[CorpusFile, ...]
    """The files of documents."""

    def names(self) -> Iterable[str]:
        """Return all names, without the absolute ones of a local corpus.

        The files of a local corpus stay where they are, outside the folder of the manifest.
        """
        local = self.source.kind == "local"
        return (file.path for file in self.files if not (local and file.path.startswith("/")))

    @property
    def has_rows(self) -> bool:
        """True if the documents are complete rows: conversations rather than text."""
        return self.text_column is None and self.file_format != "txt"

    def description(self) -> CorpusDescription:
        """Return what token files record of the corpus."""
        return CorpusDescription(
            source=self.source,
            request=self.request,
            text_column=self.text_column,
            txt_documents=self.txt_documents,
        )

    def content_key(self) -> str:
        """Return a hash of the documents' content, independent of where the files lie."""
        return fingerprint(
            {
                "file_format": self.file_format,
                "text_column": self.text_column,
                "txt_documents": self.txt_documents,
                "files": [file.sha256 for file in self.files],
            }
        )
