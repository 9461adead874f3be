"""Config keys of raw text and tokenizers: the input of `download` and `tokenize`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from dtt.config.base import Section
from dtt.config.sources import Documents

OF_FILES = ("name", "split", "revision", "max_files", "include", "exclude")
"""Keys of a dataset that say which of its files to read."""


class DatasetConfig(Section):
    """One dataset of several, which becomes a corpus of its own."""

    dataset: str | None = None
    """A name in `configs/datasets/`, a Hugging Face dataset id (`org/name`), a local file or
    folder, a URL (`s3://`, `gs://`, `abfs://`, `https://`, `hf://`) or several separated by spaces,
    or `python-stdlib`."""
    documents: Documents | None = None
    """Documents of your own, in place of `dataset`: `{type: FILE.py:CLASS}`, with its keys."""
    name: str | None = None
    """Subset (configuration) of a Hub dataset."""
    split: str | None = None
    """Split to download; null: `train` from the Hub, every file of a local folder, with a warning
    if some are named like held-out splits. With `include` and no `name`, null means every file of
    the repository."""
    revision: str | None = None
    """Branch, tag or commit of a Hub dataset; the manifest records the resolved commit."""
    text_column: str | None = None
    """Column or JSON key that contains the text; null: detected (`text`, `content`, `document`,
    `body`, or the only string column)."""
    txt_documents: Literal["auto", "file", "line", "section"] = "auto"
    """The unit that counts as one document in .txt files: the whole file, a line, or a section
    (paragraphs up to about 4 kB); `auto` means `section` for a single file and `file` for a
    folder."""
    max_files: PositiveInt | None = None
    """Maximum number of files, taken in name order; null: all."""
    include: tuple[str, ...] = ()
    """Patterns of the files to read, such as `['**/*.md']`, as in .gitignore and relative to the
    folder or repository: `*.md` at any depth, `docs/` everything below, `a/*.md` only directly in
    it, `**` any number of folders. A file of an unknown ending is then text, as in .txt files.
    Hidden files need a pattern with a leading dot. Empty: all files of a known ending."""
    exclude: tuple[str, ...] = ()
    """Patterns of the files and folders to leave out, of the same kind."""
    out: Path | None = None
    """Folder of the corpus, which `tokenize` reads, and `train` with `data.type: text`; null:
    `data/corpus/<dataset>`."""

    @property
    def names_one(self) -> bool:
        """True if it names a dataset, or a class of documents."""
        return self.dataset is not None or self.documents is not None

    @property
    def slug(self) -> str:
        """The short name of the dataset in folder names: Hub name and subset, or file stem."""
        if self.documents is not None:
            return slug(self.documents.type.rpartition(":")[2])
        if self.dataset is None:
            return "corpus"
        stem = Path(self.dataset).name.split(".")[0] or "corpus"
        return slug("-".join(part for part in (stem, self.name, self.split) if part))

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield an error for keys that choose among files, beside documents of a user's own."""
        for name in ("dataset", *OF_FILES):
            if self.documents is not None and getattr(self, name) not in (None, ()):
                yield name, "is for datasets of files: documents of your own come from their class"

    @property
    def label(self) -> str:
        """The name of the corpus among several: the last component of its folder."""
        return self.slug if self.out is None else slug(self.out.name)


class DownloadConfig(DatasetConfig):
    """The source of the raw documents: one dataset, or several."""

    datasets: tuple[DatasetConfig, ...] = ()
    """Several datasets, in place of `dataset`, each with its own options. `tokenize` trains one
    tokenizer on all of them, in proportion to their sizes, and writes the token files of each into
    a folder of its own below `tokenize.out`. `data.sources` is then one source for each, without
    weights, unless it is set."""

    @property
    def is_named(self) -> bool:
        """True if the configuration names a dataset to download."""
        return self.names_one or bool(self.datasets)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error for datasets that are not named, or share a name, and for other keys."""
        if not self.datasets:
            yield from self.conflicts()
            return
        for name in DatasetConfig.model_fields:
            if getattr(self, name) != DatasetConfig.model_fields[name].default:
                yield name, "cannot be combined with datasets: set it in their entries"
        labels = [one.label for one in self.datasets]
        for i, one in enumerate(self.datasets):
            for name, why in one.conflicts():
                yield f"datasets.{i}.{name}", why
            if not one.names_one:
                yield f"datasets.{i}.dataset", "must name a dataset"
            elif labels.index(one.label) < i:
                yield f"datasets.{i}.out", f"two are called {one.label}: set a folder for each"


def slug(text: str) -> str:
    """Return a text as a part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "unnamed"


CHAT_TOKENS = (
    "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>",
    "</tool_response>", "<think>", "</think>", *(f"<|spare_{i}|>" for i in range(16)),
)  # fmt: skip
"""Special tokens of conversations that `tokenizer.chat_tokens` reserves."""


class TrainedTokenizerConfig(Section):
    """A byte-level BPE tokenizer, trained on the corpus."""

    type: Literal["bpe"] = "bpe"
    vocab_size: int = Field(default=4096, ge=257)
    """Vocabulary size, including the 256 bytes and the special tokens."""
    pre_tokenizer: Literal["gpt2", "llama3", "qwen2", "qwen3.5"] = "gpt2"
    """Pre-tokenization before BPE merges: the published regular expression of that model. Those of
    Qwen also compose characters (NFC) first."""
    train_bytes: PositiveInt = 100_000_000
    """Approximate number of bytes of training text, sampled evenly over the corpus, or over all."""
    special_tokens: tuple[str, ...] = ("<|endoftext|>",)
    """Special tokens; the first is the end-of-document token."""
    chat_tokens: bool = False
    """Also reserve the special tokens of conversations, for fine-tuning after pretraining:
    `<|im_start|>`, `<|im_end|>`, those of tool calls and of thinking, and 16 spare ones."""

    @property
    def all_special_tokens(self) -> tuple[str, ...]:
        """The special tokens in the order of their ids, those of `chat_tokens` last."""
        chat = CHAT_TOKENS if self.chat_tokens else ()
        return self.special_tokens + tuple(x for x in chat if x not in self.special_tokens)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error for missing or duplicate special tokens and a vocabulary too small."""
        if not self.special_tokens:
            yield "special_tokens", "at least one is required: the end-of-document token"
        if len(set(self.special_tokens)) != len(self.special_tokens):
            yield "special_tokens", "an entry appears twice"
        if self.vocab_size < 256 + len(self.all_special_tokens):
            yield "vocab_size", "smaller than the 256 bytes plus the special tokens"


class GivenTokenizerConfig(Section):
    """An existing Hugging Face tokenizer."""

    type: Literal["file"] = "file"
    path: str = "tokenizer.json"
    """A `tokenizer.json`, a folder that contains one, or the Hub id of a model."""
    revision: str | None = None
    """Branch, tag or commit, when `path` is a Hub id."""
    end_of_document: str | None = None
    """The token that ends each document; null: detected (`<|endoftext|>`, `<|end_of_text|>`,
    `</s>`, `<eos>`)."""
    bos: Literal["tokenizer", "never"] = "tokenizer"
    """Beginning-of-sequence token before each document: as the tokenizer adds one before a text
    (those of Llama, Mistral and Gemma do, and their models were trained so), or never."""


TokenizerConfig = Annotated[
    TrainedTokenizerConfig | GivenTokenizerConfig, Field(discriminator="type")
]


Engine = Literal["auto", "gigatoken", "hf"]


class TokenizeConfig(Section):
    """The conversion of documents into token files."""

    out: Path | None = None
    """Folder of the token files; null: `data/tokens/<dataset>-<tokenizer>`. With
    `download.datasets`, it contains a folder for each dataset."""
    validation_fraction: float = Field(default=0.005, ge=0.0, lt=0.5)
    """Share of documents held out for validation, chosen by a hash of their text: disjoint from
    training, and unchanged when documents are added."""
    unit_bytes: int | None = Field(default=None, ge=4096)
    """Bytes of raw text in one unit of work, which becomes one shard; null: that of a
    selection, else 1/64 of the corpus, as a power of two between 1 and 256 MB."""
    on_bad_document: Literal["skip", "stop"] = "skip"
    """Action on a document that cannot be read (broken JSON, invalid UTF-8): count and report it,
    or stop."""
    engine: Engine = "auto"
    """Tokenizer implementation: `gigatoken`, or `hf`, the slower Hugging Face `tokenizers`. Both
    yield the same ids: `auto` selects gigatoken if it agrees with `hf` on a sample of the
    corpus. Conversations are encoded by `hf`."""


class ChatConfig(Section):
    """The conversion of conversations into token ids and loss masks.

    `dtt tokenize` reads it with `data.type: chat`; a job keeps it for `dtt chat` and `dtt export`.
    """

    template: str | None = None
    """Chat template: `chatml`, `tokenizer` (the tokenizer's own), or the path of a Jinja file,
    which is used unmodified. By default, the tokenizer's own, or `chatml` if it has none."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the template, such as `{enable_thinking: false}`. A row's `template_kwargs`
    take precedence."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Tokens that are targets: the answers of the assistant, each with its stop token; only the
    last answer; or all tokens of the conversation. A message with `train: false` is never one."""
    turns: Literal["all", "expand"] = "all"
    """Samples per conversation: one with all turns, or one per answer. Only `expand` equals
    inference where the template renders earlier turns differently, for example without their
    reasoning."""
    too_long: Literal["drop", "stop", "whole_turns"] = "drop"
    """Action on a conversation that is longer than `train.seq_len`: leave it out and count it, end
    with an error, or cut it after the last answer that fits. An answer is never cut."""
    control_text: Literal["text", "stop", "token"] = "text"
    """Treatment of the strings of special tokens, such as `<|im_end|>`, in the content of messages:
    encode them as ordinary text, refuse the row, or encode them as special tokens, which lets the
    data end turns and start new ones."""
