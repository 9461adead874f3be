"""Typed manifests of the artifacts that training stages write to disk for each other.

Stages communicate only through these files. A manifest is written last, so a folder that has one
is complete. Reading is strict: unknown keys are errors. Paths inside a manifest are relative to its
folder unless they are absolute.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    model_serializer,
    model_validator,
)

from dtt.base.errors import DamagedError, InputError
from dtt.base.reading import parse, read_small
from dtt.base.safe_names import checked_name

LARGEST = 2**28
"""Maximum size of a manifest in bytes, enough for a million files."""


CHAT_TEMPLATE = "chat_template.jinja"
"""Name of the file with the chat template, next to tokenizer.json."""


def fingerprint(value: Any) -> str:
    """Return the SHA-256 of a JSON-serialisable value in canonical form: sorted keys, no spaces."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


class Record(BaseModel):
    """A part of a manifest."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")


class Manifest(Record):
    """Base class of manifests, the files that mark a folder as a complete artifact."""

    filename: ClassVar[str] = "manifest.json"
    holds: ClassVar[str]
    made_by: ClassVar[str]

    @classmethod
    def exists(cls, folder: Path) -> bool:
        """Return True if `folder` is a complete artifact."""
        return (folder / cls.filename).is_file()

    @classmethod
    def is_in(cls, folder: Path) -> bool:
        """Return True if `folder` has a manifest of this kind, damaged or not.

        A file of that name that is valid JSON without the `format` of dtt belongs to another
        program.
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
        """Read the manifest of `folder`.

        Raises InputError if it does not exist, and DamagedError if its content is invalid or names
        a file outside its folder.
        """
        path = folder / cls.filename
        try:
            manifest = cls.model_validate_json(read_small(path, LARGEST))
        except (FileNotFoundError, NotADirectoryError):
            raise InputError(
                f"no {cls.holds} in {folder}",
                why=f"{path.name} is missing: the command that writes this folder has not finished"
                if folder.is_dir()
                else "there is no such folder",
                next=f"create it with `{cls.made_by}`, or specify another folder",
            ) from None
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"])) or "the file"
            raise DamagedError(
                f"cannot read the manifest {path}",
                why=f"{key}: {first['msg']}",
                next=f"create it again with `{cls.made_by}`",
            ) from None
        except ValueError as error:
            raise DamagedError(
                f"cannot read the manifest {path}",
                why=str(error),
                next=f"create it again with `{cls.made_by}`",
            ) from None
        for name in manifest.names():
            checked_name(name, path)
        return manifest

    def names(self) -> Iterable[str]:
        """Return the names of the files and folders that must lie in the manifest's folder."""
        return ()

    def dump(self) -> str:
        """Return the text of the manifest file."""
        return manifest_text(self.model_dump(mode="json"))


def manifest_text(content: Any) -> str:
    """Return the text of a manifest file with this JSON content."""
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


class FileRecord(Record):
    """The name, size and hash of one file."""

    path: str
    bytes: int
    sha256: str


class CorpusFile(FileRecord):
    """A file of raw documents."""

    mtime_ns: int
    """Modification time when the content was hashed. A file whose size and time have not changed is
    not hashed again."""


class CorpusSource(Record):
    """The origin of documents, with everything needed to fetch the same ones again."""

    kind: Literal["stdlib", "local", "hub"]
    id: str
    name: str | None = None
    split: str | None = None
    revision: str | None = None
    max_files: int | None = None
    """Number of files that were taken from the start of the split; None: all."""


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
    file_format: Literal["parquet", "jsonl", "csv", "txt"]
    text_column: str | None
    """Column or key of the text; None for txt, and for conversations, which are complete rows."""
    txt_documents: Literal["file", "line", "section"] | None
    files: tuple[CorpusFile, ...]

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


class SplitCounts(Record):
    """The numbers of documents, tokens and bytes in a split."""

    documents: int = 0
    tokens: int = 0
    """Number of tokens, including end-of-document tokens."""
    bytes: int = 0
    """Size of the text in UTF-8 bytes."""
    trained: int | None = None
    """Number of tokens of conversations that are targets; None for plain text, where all are."""

    def __add__(self, other: SplitCounts) -> SplitCounts:
        return SplitCounts(
            documents=self.documents + other.documents,
            tokens=self.tokens + other.tokens,
            bytes=self.bytes + other.bytes,
            trained=None
            if self.trained is None is other.trained
            else (self.trained or 0) + (other.trained or 0),
        )


class TokenShard(Record):
    """One `.bin`/`.idx` pair in Megatron's format."""

    split: Literal["train", "validation"]
    stem: str
    """Path without the suffix."""
    counts: SplitCounts
    bin_sha256: str
    idx_sha256: str
    mask_sha256: str | None = None
    """Hash of the `.mask` file, one byte per token: 1 if the token is a target. None: there is no
    such file, and every token is a target."""
    host: str | None = None
    """Node whose local disk holds the files; None: they are at `stem`."""
    path: str | None = None
    """Absolute path on the local disk of `host`, without the suffix."""

    @model_serializer(mode="wrap")
    def _leave_out_absent(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = plain(self)
        if self.host is None:
            del content["host"], content["path"]
        if self.mask_sha256 is None:
            del content["mask_sha256"]
        return content


class ChatFacts(Record):
    """The conversation format of token files, as needed by `dtt chat` and `dtt export`.

    The text of the template is in the file `chat_template.jinja` next to the tokenizer.
    """

    template_sha256: str
    kwargs: dict[str, Any]
    """Variables that the template was rendered with."""
    stop_tokens: tuple[int, ...]
    """Ids that end an answer, the most frequent first."""
    special_tokens: dict[str, str] = Field(default_factory=dict)
    """Variables of the template such as `bos_token`, from the files next to the tokenizer."""


class TokensManifest(Manifest):
    """The manifest of token files. `dtt tokenize` writes it, `dtt train` reads it."""

    work: ClassVar[str] = ".units"
    """Subfolder with the state from which `dtt tokenize` continues after it was killed."""
    holds: ClassVar[str] = "token files"
    made_by: ClassVar[str] = "dtt tokenize"

    format: Literal["dtt-tokens-1"] = "dtt-tokens-1"
    key: str
    """Fingerprint of everything that determines the content: corpus, tokenizer and options."""
    key_parts: dict[str, Any]
    """The inputs of `key`, so that a mismatch can be reported by name."""
    corpus: CorpusSource
    tokenizer_sha256: str
    vocab_size: int
    dtype: Literal["uint16", "int32"]
    end_of_document: int
    """Id of the token that follows every document."""
    shards: tuple[TokenShard, ...]
    skipped_documents: int
    """Number of documents that could not be read."""
    empty_documents: int
    """Number of documents without any text, which are left out."""
    blank_documents: int = 0
    """Number of documents that consist of white space only, which are kept."""
    lost_bytes: int = 0
    """Approximate number of bytes in damaged files that could not be read."""
    refused: dict[str, int] = Field(default_factory=dict)
    """Number of rows that are not valid conversations, by reason."""
    unread: dict[str, int] = Field(default_factory=dict)
    """Number of rows by key that dtt does not use, such as `source` or `messages[].id`."""
    chat: ChatFacts | None = None
    """The conversation format; None for plain text."""
    pairs: bool = False
    """True if conversations 2i and 2i + 1 of a shard are a preference pair, the chosen first."""

    @property
    def left_out(self) -> int:
        """Number of documents that could not be read, or that were refused."""
        return self.skipped_documents + sum(self.refused.values())

    def names(self) -> Iterable[str]:
        """Return the stems of all shards."""
        return (shard.stem for shard in self.shards)

    def counts(self, split: str) -> SplitCounts:
        """Return the total counts of one split."""
        return sum((s.counts for s in self.shards if s.split == split), SplitCounts())


class SourceFacts(Record):
    """One data source that a job trains on."""

    name: str
    path: str
    key: str
    """Hash of the content."""
    corpus: CorpusSource | None
    """Origin of the documents, if known."""
    tokens: int
    """Number of tokens in one epoch."""
    samples: int
    """Number of samples in one epoch."""
    bytes_per_token: float | None


class DataManifest(Manifest):
    """A description of the training data, kept in the job directory with a copy of the tokenizer.

    `dtt train` writes it. With it, a checkpoint can be exported and can generate text without the
    token files.
    """

    filename: ClassVar[str] = "data.json"
    holds: ClassVar[str] = "description of the data"
    made_by: ClassVar[str] = "dtt train"

    format: Literal["dtt-data-1"] = "dtt-data-1"
    key: str
    """Hash of the content of all sources and of their order."""
    tokenizer_sha256: str
    vocab_size: int
    end_of_document: int
    """Id of the token that follows every document."""
    chat: ChatFacts | None = None
    """The conversation format that the job trains on; None for plain text."""
    sources: tuple[SourceFacts, ...]

    @property
    def until_ids(self) -> tuple[int, ...]:
        """Ids that end a generated answer: of the end of a document and of a turn."""
        return (self.end_of_document, *(() if self.chat is None else self.chat.stop_tokens))


class CheckpointManifest(Manifest):
    """The manifest of a checkpoint. `dtt train` writes it last, when all files are complete.

    Fields that this version does not know are ignored: they are optional, and were added later. A
    new field without which a checkpoint cannot be read right changes `format`.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore")

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
    """All files of the checkpoint. A file that is not listed here is never read."""

    def names(self) -> Iterable[str]:
        """Return the names of the files."""
        return (file.path for file in self.files)

    def dump(self) -> str:
        """Return the text of the manifest file, with a hash that detects damage to the manifest."""
        content = self.model_dump(mode="json")
        return manifest_text(content | {"seal": fingerprint(content)})

    @model_validator(mode="before")
    @classmethod
    def _break_seal(cls, content: Any, info: ValidationInfo) -> Any:
        if info.mode == "json" and isinstance(content, dict):
            seal = content.pop("seal", None)
            if seal != fingerprint(content):
                raise ValueError("its content has changed: its checksum differs")
        return content


class ExportManifest(Manifest):
    """The manifest of a Hugging Face folder that was verified against the trained model."""

    filename: ClassVar[str] = "dtt_export.json"
    holds: ClassVar[str] = "export"
    made_by: ClassVar[str] = "dtt export"

    format: Literal["dtt-export-1"] = "dtt-export-1"
    job: str
    step: int
    checkpoint_sha256: str
    """SHA-256 of the checkpoint's MANIFEST.json."""
    ema: bool = False
    """True if the export holds the exponential moving average of the weights."""
    dtype: str
    parameters: int
    max_logit_difference: float
    """Largest absolute difference between the fp32 logits of `transformers` and of dtt."""
    chat: ChatFacts | None = None
    """The conversation format that the model was trained on; None for plain text."""
    files: tuple[FileRecord, ...]

    @model_serializer(mode="wrap")
    def _leave_out_absent(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = plain(self)
        if self.chat is None:
            del content["chat"]
        return content

    def names(self) -> Iterable[str]:
        """Return the names of the files."""
        return (file.path for file in self.files)
