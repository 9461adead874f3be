"""Raw text, tokenizer, token files: what `download` and `tokenize` read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from dtt.config.base import Section


class DownloadConfig(Section):
    """Where the raw documents come from."""

    dataset: str | None = None
    """A name in `configs/datasets/`, a Hugging Face dataset id (`org/name`), a local file or
    folder, or `python-stdlib`."""
    name: str | None = None
    """Subset (configuration) of a Hub dataset."""
    split: str | None = None
    """Split to take; null: `train` from the Hub, every file of a local folder."""
    revision: str | None = None
    """Branch, tag or commit of a Hub dataset; its commit is pinned in the manifest."""
    text_column: str | None = None
    """Column or JSON key that holds the text; null: found (`text`, `content`, `document`, `body`,
    or the only string column)."""
    txt_documents: Literal["auto", "file", "line", "section"] = "auto"
    """What a document is in .txt files: the whole file, a line, or a section (paragraphs up to
    about 4 kB); `auto` means `section` for a single file and `file` for a folder."""
    max_files: PositiveInt | None = None
    """Take only the first so many files, in name order; null: all."""
    out: Path | None = None
    """Folder of the corpus; null: `data/corpus/<dataset>`."""


class TrainedTokenizerConfig(Section):
    """Learn a byte-level BPE tokenizer from the corpus."""

    type: Literal["bpe"] = "bpe"
    vocab_size: int = Field(default=4096, ge=257)
    """Entries of the vocabulary, the 256 bytes and the special tokens included."""
    pre_tokenizer: Literal["gpt2", "llama3", "qwen2"] = "gpt2"
    """How text is split before merging: the published regular expression of that model."""
    train_bytes: PositiveInt = 100_000_000
    """Learn from about so much text, taken evenly over the corpus."""
    special_tokens: tuple[str, ...] = ("<|endoftext|>",)
    """Reserved entries; the first is the end-of-document token."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """An end-of-document token is a must, and the vocabulary must have room."""
        if not self.special_tokens:
            yield "special_tokens", "at least one is needed: the end-of-document token"
        if len(set(self.special_tokens)) != len(self.special_tokens):
            yield "special_tokens", "an entry stands twice"
        if self.vocab_size < 256 + len(self.special_tokens):
            yield "vocab_size", "smaller than the 256 bytes plus the special tokens"


class GivenTokenizerConfig(Section):
    """Use an existing Hugging Face tokenizer."""

    type: Literal["file"] = "file"
    path: str = "tokenizer.json"
    """A `tokenizer.json`, a folder that holds one, or the Hub id of a model."""
    revision: str | None = None
    """Branch, tag or commit, when `path` is a Hub id."""
    end_of_document: str | None = None
    """The token that ends each document; null: found (`<|endoftext|>`, `<|end_of_text|>`, `</s>`,
    `<eos>`)."""


TokenizerConfig = Annotated[
    TrainedTokenizerConfig | GivenTokenizerConfig, Field(discriminator="type")
]


Engine = Literal["auto", "gigatoken", "hf"]


class TokenizeConfig(Section):
    """How documents become token files."""

    corpus: Path | None = None
    """Folder that `download` made; null: the one this config's `download` section names."""
    out: Path | None = None
    """Folder of the token files; null: `data/tokens/<dataset>-<tokenizer>`."""
    validation_fraction: float = Field(default=0.005, ge=0.0, lt=0.5)
    """Share of documents held out, chosen by a hash of their text: disjoint from training, and
    stable when documents are added."""
    unit_bytes: int | None = Field(default=None, ge=4096)
    """Bytes of raw text in one unit of work, which becomes one shard; null: 1/64 of the corpus,
    at least 1 MB and at most 256 MB."""
    on_bad_document: Literal["skip", "stop"] = "skip"
    """What to do with a document that cannot be read (broken JSON, invalid UTF-8): count and name
    it, or stop."""
    engine: Engine = "auto"
    """What encodes: `gigatoken`, or `hf`, the slow Hugging Face `tokenizers`. The ids are the same:
    `auto` takes gigatoken if it agrees with the other on a sample of the corpus."""
    compare: str | None = None
    """Another tokenizer (a `tokenizer.json`, a folder that holds one, or a Hub id such as
    `openai-community/gpt2`), for the report: bytes per token of both on held-out text."""
    local: Path | None = None
    """Folder on each node's own disk: token files stay on the node that makes them, below it, and
    `out` (on a shared disk) gets the manifest that says where they are; null: all go to `out`."""


class SourceConfig(Section):
    """One body of token files."""

    path: Path
    """Folder that `tokenize` made; or token files of others: a Megatron `.bin`/`.idx` pair (its
    path without the suffix) or a folder of such, a datatrove `.ds` file or a folder of such, a
    file of ids (llm.c's and modded-nanogpt's `.bin`, an `.npy`, nanoGPT's raw `.bin`) or a folder
    of such."""
    name: str | None = None
    """What metrics call it; with the seed it decides the order of its samples. null: the last part
    of `path`."""
    weight: PositiveFloat | None = None
    """Share of the samples, relative to the other sources; null for all of them: by their size.
    Shares that are multiples of 1e-5 are kept exactly, others rounded to them, and none to 0."""
    validation: Path | None = None
    """Held-out token files; null: those that `tokenize` held out, if it made the folder."""
    dtype: Literal["uint16", "uint32", "int32", "int64"] = "uint16"
    """Of raw ids; the other formats say it themselves."""

    @property
    def label(self) -> str:
        """What the source is called."""
        return self.name or self.path.name


class WeightsConfig(Section):
    """Other weights from some step on."""

    step: int = Field(ge=2)
    """First optimizer step that they hold for, as metrics count: the first step of a run is 1."""
    weights: dict[str, float]
    """By the name of the source; 0 leaves one out. Every source must be named."""


class TokensDataConfig(Section):
    """Train from token files: one folder, or a mixture of several."""

    type: Literal["tokens"] = "tokens"
    tokens: Path | None = None
    """Folder that `tokenize` made; null: the one this config's `tokenize` section names."""
    sources: tuple[SourceConfig, ...] = ()
    """A mixture instead of `tokens`."""
    weights: tuple[WeightsConfig, ...] = ()
    """Changes of the sources' weights while training goes on (annealing)."""
    on_exhausted: Literal["repeat", "stop", "renormalise"] = "repeat"
    """When every sample of a source has been seen: begin its next epoch, end the run, or go on with
    the others in proportion to their weights."""
    packing: Literal["concat", "best-fit"] = "concat"
    """How documents fill sequences: windows over one long stream, or whole documents put together
    (Ding et al. 2024, arXiv 2404.10830), of which only those longer than a sequence are cut."""
    mask_documents: bool = False
    """Let tokens attend only within their own document, and restart positions at its start."""
    eod_mask_loss: bool = False
    """Leave out of the loss the targets that are the first token of a document, predicted from the
    end of the one before (Megatron's `--eod-mask-loss`)."""
    tokenizer: Path | None = None
    """The tokenizer.json of token files of others; those of dtt name theirs, which must be the
    same."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Sources must be told apart, and weights be complete."""
        names = [source.label for source in self.sources]
        if self.tokens is not None and self.sources:
            yield "tokens", "excludes sources: name the folder among them"
        for twice in sorted({name for name in names if names.count(name) > 1}):
            yield "sources", f"two are called {twice}: give each a name"
        if len({source.weight is None for source in self.sources}) > 1:
            yield "sources", "some have a weight and some have none: give it to all or to none"
        for i, change in enumerate(self.weights):
            if set(change.weights) != set(names):
                yield f"weights.{i}", f"must name every source, and no other: {', '.join(names)}"
            values = change.weights.values()
            if not all(0 <= w < math.inf for w in values) or not any(values):
                yield f"weights.{i}", "weights are 0 or more, and at least one is more"
        steps = [change.step for change in self.weights]
        if sorted(set(steps)) != steps:
            yield "weights", "their steps must ascend"


class TextDataConfig(Section):
    """Train straight from text, without token files, by a given tokenizer.

    Every process encodes the text of the whole run, some 20M tokens a second of a core: enough for
    dozens of fast GPUs. The shuffle is as wide as 16 MB of text. For more, `dtt tokenize` first.
    """

    type: Literal["text"] = "text"
    corpus: Path | None = None
    """Folder that `download` made; null: the one this config's `download` section names."""
    mask_documents: bool = False
    """Let tokens attend only within their own document, and restart positions at its start."""
    eod_mask_loss: bool = False
    """Leave out of the loss the targets that are the first token of a document, predicted from the
    end of the one before (Megatron's `--eod-mask-loss`)."""


DataConfig = Annotated[TokensDataConfig | TextDataConfig, Field(discriminator="type")]
