"""Typed manifests of the artifacts that training stages write to disk for each other.

Stages communicate only through these files. A manifest is written last, so a folder that has one
is complete. Reading is strict: unknown keys are errors. Paths inside a manifest are relative to its
folder unless they are absolute.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

from pydantic import (
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from dtt.artifacts.corpus import CorpusDescription, CorpusSource
from dtt.artifacts.manifest import FileRecord, Manifest, Record, fingerprint, manifest_text
from dtt.base.reading import parse

CHAT_TEMPLATE = "chat_template.jinja"
"""Name of the file with the chat template, next to tokenizer.json."""


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

    @model_serializer(mode="wrap")
    def _leave_out_absent(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = plain(self)
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


class SelectionFacts(Record):
    """The documents of the corpus that `dtt clean` removed."""

    key: str
    """Key of the selection."""
    content: str | None
    """Hash of the numbers of all removed documents; None: there are none."""
    removed: dict[str, int]
    """Number of removed documents by reason."""

    def describe(self) -> str:
        """Return the number of removed documents, and of each reason."""
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in self.removed.items())
        return f"{sum(self.removed.values()):,} documents" + (f": {reasons}" if reasons else "")


class LostText(Record):
    """The characters of documents that a tokenizer has no token for."""

    documents: int = 0
    """Number of documents that lose any."""
    characters: int = 0
    """Number of lost characters."""
    of: int = 0
    """Number of characters of all documents."""
    such_as: tuple[str, ...] = ()
    """Some of the lost pieces of text."""

    def __add__(self, other: LostText) -> LostText:
        return LostText(
            documents=self.documents + other.documents,
            characters=self.characters + other.characters,
            of=self.of + other.of,
            such_as=tuple(dict.fromkeys((*self.such_as, *other.such_as)))[:5],
        )

    def describe(self) -> str:
        """Return the counts as a line."""
        some = " ".join(repr(piece[:20]) for piece in self.such_as)
        return (
            f"{self.characters:,} characters of {self.documents:,} documents have no token "
            f"({self.characters / max(self.of, 1):.2%} of the text), such as {some}"
        )


class TokensManifest(Manifest):
    """The manifest of token files. `dtt tokenize` writes it, `dtt train` reads it."""

    work: ClassVar[str] = ".units"
    """Subfolder with the state from which `dtt tokenize` continues after it was killed."""
    holds: ClassVar[str] = "token files"
    made_by: ClassVar[str] = "dtt tokenize"

    format: Literal["dtt-tokens-1"] = "dtt-tokens-1"
    key: str
    """Fingerprint of everything that determines the content: corpus, tokenizer, options, and which
    documents of the corpus are removed."""
    key_parts: dict[str, Any]
    """The inputs of `key` except for the removed documents, so that a mismatch can be reported by
    name."""
    corpus: CorpusSource
    """Origin of the documents."""
    text: CorpusDescription | None = None
    """The documents, as the section `download` described them; dtt refuses to train on them for
    another description. None in token files of earlier versions."""
    tokenizer_sha256: str
    """SHA-256 of `tokenizer.json`."""
    vocab_size: int
    """Number of entries of the tokenizer."""
    dtype: Literal["uint16", "int32"]
    """Type of the ids: `uint16` for a vocabulary below 65,500, else `int32`."""
    end_of_document: int
    """Id of the token that follows every document."""
    begin_of_document: int | None = None
    """Id of the token before every document of text; None: there is none."""
    shards: tuple[TokenShard, ...]
    """The pairs of `.bin` and `.idx` files."""
    skipped_documents: int
    """Number of documents that could not be read; the rest of a damaged file counts as one."""
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
    replaced_documents: int = 0
    """Number of documents in which U+FFFD replaces lone surrogates."""
    nulls: int = 0
    """Number of rows whose tools, or arguments of calls, have keys with null."""
    lost: LostText | None = None
    """What the tokenizer has no token for; None if it has one for each byte."""
    chat: ChatFacts | None = None
    """The conversation format; None for plain text."""
    pairs: bool = False
    """True if conversations 2i and 2i + 1 of a shard are a preference pair, the chosen first."""
    selection: SelectionFacts | None = None
    """The documents that a section `clean` removed; None: there is no such section."""

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
    """Name of the source."""
    path: str
    """Its folder or file."""
    key: str
    """Hash of the content."""
    corpus: CorpusSource | None
    """Origin of the documents, if known."""
    tokens: int
    """Number of tokens in one epoch."""
    samples: int
    """Number of samples in one epoch."""
    bytes_per_token: float | None
    """Bytes of text per token, if known."""


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
    """SHA-256 of the copy of `tokenizer.json` beside this file."""
    vocab_size: int
    """Number of entries of the tokenizer."""
    end_of_document: int
    """Id of the token that follows every document."""
    begin_of_document: int | None = None
    """Id of the token before every document of text; None: there is none."""
    chat: ChatFacts | None = None
    """The conversation format that the job trains on; None for plain text."""
    sources: tuple[SourceFacts, ...]
    """The sources, in the order of the configuration."""

    @property
    def named_keys(self) -> list[tuple[str, str]]:
        """The name and the key of each source, in order."""
        return [(source.name, source.key) for source in self.sources]

    @property
    def until_ids(self) -> tuple[int, ...]:
        """Ids that end a generated answer: of the end of a document and of a turn."""
        return (self.end_of_document, *(() if self.chat is None else self.chat.stop_tokens))


class Reference(Record):
    """The weights on which a checkpoint builds that lacks them: frozen ones, as of an adapter."""

    folder: str
    """Absolute path of a checkpoint or of a Hugging Face folder."""
    sha256: str
    """Hash of the checkpoint's MANIFEST.json, and so of all its content, or of the hashes of the
    weight files in the Hugging Face folder."""


class CheckpointManifest(Manifest):
    """The manifest of a checkpoint. `dtt train` writes it last, when all files are complete.

    Fields that this version does not know are ignored: they are optional, and were added later. A
    new field without which a checkpoint cannot be read right changes `format`.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore")

    filename: ClassVar[str] = "MANIFEST.json"
    holds: ClassVar[str] = "checkpoint"
    made_by: ClassVar[str] = "dtt train"

    format: Literal["dtt-checkpoint-3", "dtt-checkpoint-4"] = "dtt-checkpoint-4"
    step: int
    """Optimizer steps done; also in the folder's name."""
    attempt: int
    """Number of the attempt that wrote the checkpoint."""
    world_size: int
    """Number of training processes."""
    config_sha256: str
    """Fingerprint of the resolved configuration."""
    data_key: str
    """`key` of the data of the job."""
    versions: dict[str, str]
    """Versions of dtt and torch."""
    code: dict[str, str] = Field(default_factory=dict)
    """SHA-256 of each file with classes of the user's own, by its name in the job."""
    base: Reference | None = None
    """The weights that this checkpoint lacks; None: it lacks none."""
    models: dict[str, Reference] = Field(default_factory=dict)
    """The frozen models of the objective, by their sources in the configuration."""
    files: tuple[FileRecord, ...]
    """All files of the checkpoint. A file that is not listed here is never read."""

    def names(self) -> Iterable[str]:
        """Return the names of the files."""
        return (file.path for file in self.files)

    def dump(self) -> str:
        """Return the text of the manifest file, which ends with its own hash."""
        return sealed(self.model_dump(mode="json"))

    @classmethod
    def check(cls, content: bytes) -> None:
        """Raise ValueError unless the seal is that of the bytes before it."""
        # The bytes, not the values: the same values can be written in several ways.
        head, mark, _ = content.rpartition(SEAL)
        if content == head + mark + _end_of_seal(head):
            return
        # The seal of the older format is a hash of the values, so that the rest is compared.
        values = parse(content)
        if isinstance(values, dict) and values.get("format") == "dtt-checkpoint-3":
            seal = values.pop("seal", None)
            text = manifest_text(values | {"seal": seal}).encode()
            if seal == fingerprint(values) and content == text:
                return
        raise ValueError("its content has changed: its checksum differs")


SEAL = b',\n "seal": "'


def sealed(content: Mapping[str, Any]) -> str:
    """Return the text of a manifest that ends with the SHA-256 of everything before it."""
    head = manifest_text(content).encode().removesuffix(b"\n}\n")
    return (head + SEAL + _end_of_seal(head)).decode()


def _end_of_seal(head: bytes) -> bytes:
    return f'{hashlib.sha256(head).hexdigest()}"\n}}\n'.encode()


class ExportManifest(Manifest):
    """The manifest of a Hugging Face folder that was verified against the trained model."""

    filename: ClassVar[str] = "dtt_export.json"
    holds: ClassVar[str] = "export"
    made_by: ClassVar[str] = "dtt export"

    format: Literal["dtt-export-1"] = "dtt-export-1"
    job: str
    """Name of the exported job."""
    step: int
    """Step of the exported checkpoint."""
    checkpoint_sha256: str
    """SHA-256 of the checkpoint's MANIFEST.json."""
    ema: bool = False
    """True if the export holds the exponential moving average of the weights."""
    base: str | None = None
    """Model that an exported adapter is for, ORG/NAME or a folder; None: a complete model."""
    dtype: str
    """`fp32`, `bf16` or `fp16`; what `transformers` keeps in fp32, such as a correction of the
    choice of experts, is fp32."""
    parameters: int
    """Number of trainable parameters."""
    max_logit_difference: float
    """Largest absolute difference between the fp32 logits of `transformers` and of dtt."""
    max_rounding_difference: float | None = None
    """Largest absolute difference between the fp32 logits of the weights as they were trained and
    as they are in the export; None: no weight was rounded."""
    options: dict[str, Any] | None = None
    """Keys of `export`, besides `dtype`, that the files depend on; None in older exports."""
    chat: ChatFacts | None = None
    """The conversation format that the model was trained on; None for plain text."""
    end_of_document: int | None = None
    """Id of the token that ends a document, one of those that end generation."""
    files: tuple[FileRecord, ...]
    """`path`, `bytes`, `sha256` of each."""

    @model_serializer(mode="wrap")
    def _leave_out_absent(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = plain(self)
        for name in ("base", "chat"):
            if content[name] is None:
                del content[name]
        return content

    def names(self) -> Iterable[str]:
        """Return the names of the files."""
        return (file.path for file in self.files)
