"""What stages leave on disk for each other: typed manifests, read strictly, written canonically.

Stages meet only through these files. A manifest is written last, so a folder that has one is
complete. Paths inside a manifest are relative to its folder unless they are absolute.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    model_serializer,
    model_validator,
)

from dtt.errors import DamagedError, InputError
from dtt.reading import parse, read_small

LARGEST = 2**28
"""Bytes that a manifest may have: a million files."""


def fingerprint(value: Any) -> str:
    """sha256 of a JSON-able value in canonical form: sorted keys, no spaces."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def checked_name(name: str, where: Path) -> str:
    """Return `name` if it is a relative path that stays in the folder of the manifest `where`.

    A manifest may come from somebody else, and its names decide which files are read and written.
    Raises DamagedError for an empty or absolute name, for one with `.` or `..` or an empty part,
    and for one with a character that does not print, which could forge a line of a message.
    """
    parts = name.split("/")
    if not name.isprintable():
        why = f"{name!r} holds a character that does not print"
    elif name.startswith("/"):
        why = f"{name!r} is an absolute path"
    elif not {"", ".", ".."}.isdisjoint(parts):
        why = f"{name!r} is not a plain path below the folder"
    else:
        return name
    raise _unsafe(where, why)


def checked_file(name: str, where: Path) -> Path:
    """Return the path of the file `name` beside the manifest `where`, once `name` is checked.

    Raises DamagedError for a bad name (`checked_name`) and for a link that leads out of the folder.
    The file need not exist.
    """
    folder = where.parent
    path = folder / checked_name(name, where)
    # One lstat for a name without a slash: a folder may hold ten thousand files on a file server.
    through = [path, *path.parents][: name.count("/") + 1]
    if any(map(os.path.islink, through)):
        target = Path(os.path.realpath(path))  # unlike Path.resolve, says nothing of a loop
        if not target.is_relative_to(os.path.realpath(folder)):
            raise _unsafe(where, f"{name!r} is a link to {target}, outside the folder")
    return path


def _unsafe(where: Path, why: str) -> DamagedError:
    return DamagedError(
        "a manifest names a file outside its folder",
        where=where,
        why=why,
        next="make or fetch the folder again; do not use one from a source you do not trust",
    )


class Record(BaseModel):
    """A part of a manifest."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")


class Manifest(Record):
    """The file that makes a folder an artifact."""

    filename: ClassVar[str] = "manifest.json"
    holds: ClassVar[str]
    made_by: ClassVar[str]

    @classmethod
    def exists(cls, folder: Path) -> bool:
        """Whether `folder` is a complete artifact."""
        return (folder / cls.filename).is_file()

    @classmethod
    def is_in(cls, folder: Path) -> bool:
        """Whether `folder` has a manifest of this kind, sound or not.

        A file of that name that is whole JSON without our format is another program's.
        """
        try:
            content = read_small(folder / cls.filename, LARGEST)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except ValueError:
            return True
        if f'"{cls.model_fields["format"].default}"'.encode() in content:
            return True
        try:
            parse(content)
        except ValueError:
            return True
        return False

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the manifest of `folder`; InputError if absent, DamagedError if not as written, or
        if it names a file outside of its folder."""
        path = folder / cls.filename
        try:
            manifest = cls.model_validate_json(read_small(path, LARGEST))
        except (FileNotFoundError, NotADirectoryError):
            raise InputError(
                f"no {cls.holds} in {folder}",
                why=f"{path.name} is missing, so nothing finished writing there"
                if folder.is_dir()
                else "there is no such folder",
                next=f"make it with `{cls.made_by}`, or name another folder",
            ) from None
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"])) or "the file"
            raise DamagedError(
                f"cannot read the manifest {path}",
                why=f"{key}: {first['msg']}",
                next=f"make it again with `{cls.made_by}`",
            ) from None
        except ValueError as error:
            raise DamagedError(
                f"cannot read the manifest {path}",
                why=str(error),
                next=f"make it again with `{cls.made_by}`",
            ) from None
        for name in manifest.names():
            checked_name(name, path)
        return manifest

    def names(self) -> Iterable[str]:
        """Return the names of files and folders that must lie in the manifest's own folder."""
        return ()

    def dump(self) -> str:
        """The text of the file."""
        return _text(self.model_dump(mode="json"))


def _text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


class FileRecord(Record):
    """One file, by name, size and content."""

    path: str
    bytes: int
    sha256: str


class CorpusFile(FileRecord):
    """A file of raw documents."""

    mtime_ns: int
    """When the content was hashed it had this time; with the same size and time it is not again."""


class CorpusSource(Record):
    """Where documents came from: enough to fetch the same ones again."""

    kind: Literal["stdlib", "local", "hub"]
    id: str
    name: str | None = None
    split: str | None = None
    revision: str | None = None
    max_files: int | None = None
    """Only the first so many files were taken."""


class CorpusManifest(Manifest):
    """Raw documents: files of one format. Made by `download`, read by `tokenize`."""

    holds: ClassVar[str] = "corpus"
    made_by: ClassVar[str] = "dtt download"

    format: Literal["dtt-corpus-1"] = "dtt-corpus-1"
    dataset: str
    """Short name, used in default folder names."""
    source: CorpusSource
    file_format: Literal["parquet", "jsonl", "csv", "txt"]
    text_column: str | None
    """Column or key of the text; None for txt."""
    txt_documents: Literal["file", "line", "section"] | None
    files: tuple[CorpusFile, ...]

    def names(self) -> Iterable[str]:
        """Return all names, but absolute ones of a local corpus: its files stay where they are."""
        local = self.source.kind == "local"
        return (file.path for file in self.files if not (local and file.path.startswith("/")))

    def content_key(self) -> str:
        """Identity of the documents, wherever the files lie."""
        return fingerprint(
            {
                "file_format": self.file_format,
                "text_column": self.text_column,
                "txt_documents": self.txt_documents,
                "files": [file.sha256 for file in self.files],
            }
        )


class SplitCounts(Record):
    """How much text a split holds."""

    documents: int = 0
    tokens: int = 0
    """End-of-document tokens included."""
    bytes: int = 0
    """UTF-8 bytes of the text."""

    def __add__(self, other: SplitCounts) -> SplitCounts:
        return SplitCounts(
            documents=self.documents + other.documents,
            tokens=self.tokens + other.tokens,
            bytes=self.bytes + other.bytes,
        )


class TokenShard(Record):
    """One `.bin`/`.idx` pair in Megatron's format."""

    split: Literal["train", "validation"]
    stem: str
    """Path without the suffix."""
    counts: SplitCounts
    bin_sha256: str
    idx_sha256: str
    host: str | None = None
    """Node whose own disk the files were left on; None: they are where `stem` says."""
    path: str | None = None
    """Absolute path there, without the suffix."""

    @model_serializer(mode="wrap")
    def _where_only_if_elsewhere(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = plain(self)
        if self.host is None:
            del content["host"], content["path"]
        return content


def shard_stem(folder: Path, shard: TokenShard) -> Path:
    """Where the files of a shard are, without the suffix: in `folder`, or on this node's own disk.

    Raises InputError when they are on the disk of another node, with the line that fetches them.
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


class TokensManifest(Manifest):
    """Token files. Made by `tokenize`, read by `train`."""

    work: ClassVar[str] = ".units"
    """Folder, in that of the token files, of what `tokenize` needs to go on after a kill."""
    holds: ClassVar[str] = "token files"
    made_by: ClassVar[str] = "dtt tokenize"

    format: Literal["dtt-tokens-1"] = "dtt-tokens-1"
    key: str
    """Fingerprint of everything that decides the content: corpus, tokenizer, options."""
    key_parts: dict[str, Any]
    """What the key was made of, to name a difference."""
    corpus: CorpusSource
    tokenizer_sha256: str
    vocab_size: int
    dtype: Literal["uint16", "int32"]
    end_of_document: int
    """Id of the token after every document."""
    shards: tuple[TokenShard, ...]
    skipped_documents: int
    """Documents that could not be read."""
    empty_documents: int
    """Documents without any text, left out."""
    blank_documents: int = 0
    """Documents of nothing but white space, which are kept."""
    lost_bytes: int = 0
    """About how many bytes of damaged files could not be read."""

    def names(self) -> Iterable[str]:
        """Return the stems of all shards."""
        return (shard.stem for shard in self.shards)

    def counts(self, split: str) -> SplitCounts:
        """Totals of one split."""
        return sum((s.counts for s in self.shards if s.split == split), SplitCounts())


class SourceFacts(Record):
    """One body of text that a job trains on."""

    name: str
    path: str
    key: str
    """Identity of its content."""
    corpus: CorpusSource | None
    """Where its documents came from, where known."""
    tokens: int
    """In an epoch."""
    samples: int
    """In an epoch."""
    bytes_per_token: float | None


class DataManifest(Manifest):
    """What training reads. Made by `train` in the job directory, beside a copy of the tokenizer.

    With it a checkpoint can be exported, and continue a text, wherever the token files are.
    """

    filename: ClassVar[str] = "data.json"
    holds: ClassVar[str] = "description of the data"
    made_by: ClassVar[str] = "dtt train"

    format: Literal["dtt-data-1"] = "dtt-data-1"
    key: str
    """Identity of all that is read, and of the order of its sources."""
    tokenizer_sha256: str
    vocab_size: int
    end_of_document: int
    """Id of the token after every document."""
    sources: tuple[SourceFacts, ...]


class CheckpointManifest(Manifest):
    """A training state. Made by `train`; written last, so what it names is whole."""

    filename: ClassVar[str] = "MANIFEST.json"
    holds: ClassVar[str] = "checkpoint"
    made_by: ClassVar[str] = "dtt train"

    format: Literal["dtt-checkpoint-3"] = "dtt-checkpoint-3"
    step: int
    attempt: int
    world_size: int
    config_sha256: str
    data_key: str
    versions: dict[str, str]
    files: tuple[FileRecord, ...]
    """All that belongs to the checkpoint: a file that is not named here is never read."""

    def names(self) -> Iterable[str]:
        """Return the names of the files."""
        return (file.path for file in self.files)

    def dump(self) -> str:
        """The text of the file, with a seal: damage to the manifest itself shows, too."""
        content = self.model_dump(mode="json")
        return _text(content | {"seal": fingerprint(content)})

    @model_validator(mode="before")
    @classmethod
    def _break_seal(cls, content: Any, info: ValidationInfo) -> Any:
        if info.mode == "json" and isinstance(content, dict):
            seal = content.pop("seal", None)
            if seal != fingerprint(content):
                raise ValueError("its content has changed, the seal differs")
        return content


class ExportManifest(Manifest):
    """A Hugging Face folder that was verified against the model it came from."""

    filename: ClassVar[str] = "dtt_export.json"
    holds: ClassVar[str] = "export"
    made_by: ClassVar[str] = "dtt export"

    format: Literal["dtt-export-1"] = "dtt-export-1"
    job: str
    step: int
    checkpoint_sha256: str
    """Of the checkpoint's MANIFEST.json."""
    ema: bool = False
    """Whether it is of the weights' moving average."""
    dtype: str
    parameters: int
    max_logit_difference: float
    """Largest absolute difference of fp32 logits to the trained model, seen by `transformers`."""
    files: tuple[FileRecord, ...]

    def names(self) -> Iterable[str]:
        """Return the names of the files."""
        return (file.path for file in self.files)
