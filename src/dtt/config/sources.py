"""The base classes of documents and of kinds of data. `dtt.config.variants` lists those of dtt."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, PositiveFloat

from dtt.config.base import Section

if TYPE_CHECKING:
    HeldOutFiles: TypeAlias = "Path | Source | None"
else:
    HeldOutFiles = Path | None  # `config/own.py` adds classes of a user's own


class Documents(Section):
    """Documents that `dtt download` reads once, into a corpus. One of your own defines `rows`."""

    type: str = "FILE.py:CLASS"
    """Its class, as `FILE.py:CLASS` from the folder of the configuration, or `MODULE:CLASS`."""

    def parts(self) -> int:
        """Return the number of parts, each of which becomes a file.

        An interrupted command continues with the next part.
        """
        return 1

    def rows(self, part: int) -> Iterator[str | Mapping[str, Any]]:
        """Yield the documents of a part (from 0), in the same order each time.

        A document is a text, or a row: names with values of JSON, such as `messages`.
        """
        raise NotImplementedError

    def version(self) -> str:
        """Return a text that changes when the documents do: then they are read again.

        They are read again as well when the keys or the file of the class change.
        """
        return ""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error for a section without a class."""
        if type(self) is Documents:
            yield "type", "must name a class, as FILE.py:CLASS or MODULE:CLASS"


class Data(Section):
    """The base class of kinds of data: keys, and what dtt must know of each."""

    type: str

    reads_token_files: ClassVar[bool] = False
    """True if `dtt tokenize` must run before `dtt train`."""
    reads_text: ClassVar[bool] = False
    """True if training itself reads the corpus."""
    is_counted: ClassVar[bool] = False
    """True if the number of samples is known before they are read, as `train.epochs` needs."""
    has_text: ClassVar[bool] = True
    """True if the ids stand for text."""
    has_conversations: ClassVar[bool] = False
    """True if the documents of the corpus are rows: conversations, or pairs of them."""
    has_pairs: ClassVar[bool] = False
    """True if each of them is a pair, `chosen` and `rejected`."""

    if TYPE_CHECKING:  # keys of some kinds, and constants of the others

        @property
        def packing(self) -> Literal["concat", "best-fit", "none"]:
            """The assignment of documents to sequences."""

        @property
        def mask_documents(self) -> bool:
            """True if attention is restricted to tokens of the same document."""

        @property
        def eod_mask_loss(self) -> bool:
            """True if the first token of a document is no target."""

    def input_paths(self, run: Any) -> tuple[Path, ...]:
        """Return what a run reads: the paths that must exist before it starts."""
        return ()

    def run_problems(self, run: Any) -> Iterator[tuple[str, str]]:
        """Yield problems of this kind of data with the rest of the run, a `RunConfig`."""
        return iter(())

    def known_vocab_size(self) -> int | None:
        """Return the number of ids that the keys decide; None: the tokenizer does."""
        return None


class SourceEntry(Section):
    """The keys of an entry of `data.sources`, whatever the source is."""

    type: str
    name: str | None = None
    """Name of the source in metrics; with the seed it determines the order of its samples. null:
    the last component of `path`, or the class. For `FOLDER/**`: the beginning of the names, before
    a `/`."""
    weight: PositiveFloat | None = None
    """Share of the samples, relative to the other sources; null for all of them: in proportion to
    their sizes. That of `FOLDER/**` is split in proportion to the sizes of its folders, as if they
    were one source: all of them complete an epoch together. Shares that are multiples of 1e-5 are
    exact; others are rounded to such a multiple, never to 0."""
    validation: HeldOutFiles = None
    """Held-out token files, or a class of your own, as a section with its keys; null: those that
    `tokenize` held out, if it wrote the folder, or the samples that `held_out` counts."""

    @property
    def label(self) -> str:
        """The name of the source: `name`, or its class."""
        return self.name or self.type.rpartition(":")[2]

    @property
    def place(self) -> Path:
        """The origin of its samples: a path, or a class."""
        return Path(self.type)


class SourceConfig(SourceEntry):
    """One set of token files."""

    type: Literal["tokens"] = "tokens"
    """`tokens`, or a class of your own, `FILE.py:CLASS`, whose keys take the place of `path` and
    `dtype`."""
    path: Path
    """Folder written by `tokenize`; or token files of other tools: a Megatron `.bin`/`.idx` pair
    (its path without the suffix) or a folder of such pairs, a datatrove `.ds` file or a folder of
    such files, a file of ids (llm.c's and modded-nanogpt's `.bin`, an `.npy`, nanoGPT's raw `.bin`)
    or a folder of such files. `FOLDER/**`: each folder below FOLDER that holds a dtt manifest, or
    `.idx` or `.ds` files, is a source, named by its path from FOLDER, in the order of the names."""
    dtype: Literal["uint16", "uint32", "int32", "int64"] = "uint16"
    """Integer type of raw ids; all other formats declare it themselves."""

    @property
    def label(self) -> str:
        """The name of the source, or of the pattern: `name`, or the last component of `path`."""
        return self.name or (str(self.path) if self.is_pattern else self.path.name)

    @property
    def place(self) -> Path:
        """See SourceEntry."""
        return self.path

    @property
    def is_pattern(self) -> bool:
        """True if `path` is a pattern, `FOLDER/**`, for the token folders below a folder."""
        return self.path.name == "**"

    @property
    def folder(self) -> Path:
        """The path, or the folder that a pattern searches."""
        return self.path.parent if self.is_pattern else self.path

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error for another kind of pattern, and for a key that none can have."""
        if any("*" in part for part in self.folder.parts):
            yield "path", "the only pattern is FOLDER/**, every token folder below FOLDER"
        if self.is_pattern and self.validation is not None:
            yield "validation", "must be null for FOLDER/**: each folder has held-out files itself"


if TYPE_CHECKING:
    AnySource: TypeAlias = "SourceConfig | OwnEntry"
else:
    AnySource = SourceConfig


class WeightsConfig(Section):
    """Source weights that apply from a given step on."""

    step: int = Field(ge=2)
    """First optimizer step with these weights, numbered as in the metrics: the first step of a run
    is 1."""
    weights: dict[str, float]
    """Weights by source name; 0 leaves a source out. Every source must be listed; `FOLDER/**` is
    one, called by its `name`, or by its path."""


class TokenData(Data):
    """Token files: one folder, or a mixture of several."""

    reads_token_files = is_counted = True

    tokens: Path | None = None
    """Folder written by `tokenize`; null: the output folder of this config's `tokenize` section."""
    sources: tuple[AnySource, ...] = ()
    """Sources of a mixture, in place of `tokens`."""
    weights: tuple[WeightsConfig, ...] = ()
    """Changes of the sources' weights during training (annealing)."""
    on_exhausted: Literal["repeat", "stop", "renormalise"] = "repeat"
    """Action when every sample of a source has been used: start its next epoch, end the run, or
    continue with the other sources in proportion to their weights."""
    tokenizer: Path | None = None
    """The tokenizer.json that belongs to token files of other tools. Token files of dtt record
    their own, which must be the same."""

    def input_paths(self, run: Any) -> tuple[Path, ...]:
        """Return the token files, also held-out ones."""
        paths: tuple[Path, ...] = run.token_paths
        return paths

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error for ambiguous source names and for incomplete or invalid weights."""
        names = [source.label for source in self.sources]
        for i, source in enumerate(self.sources):
            given = [("held_out", source)] if source.validation is not None else []
            for key, own in [*given, ("validation.held_out", source.validation)]:
                if isinstance(own, Source) and own.held_out:
                    yield f"sources.{i}.{key}", "must be 0: all samples of validation are held out"
        if self.tokens is not None and "*" in str(self.tokens):
            yield "tokens", f"is one folder: data.sources=[{{path: {self.tokens}}}] takes patterns"
        if self.tokens is not None and self.sources:
            yield "tokens", "cannot be combined with sources: list the folder among them"
        for twice in sorted({name for name in names if names.count(name) > 1}):
            yield "sources", f"two are called {twice}: give each a name"
        if len({source.weight is None for source in self.sources}) > 1:
            yield "sources", "some have a weight and some have none: set it for all or for none"
        for i, change in enumerate(self.weights):
            if set(change.weights) != set(names):
                yield f"weights.{i}", f"must name every source, and no other: {', '.join(names)}"
            values = change.weights.values()
            if not all(0 <= w < math.inf for w in values) or not any(values):
                yield (
                    f"weights.{i}",
                    "weights must be non-negative, and at least one must be positive",
                )
        steps = [change.step for change in self.weights]
        if sorted(set(steps)) != steps:
            yield "weights", "their steps must ascend"


class OneSource(Data):
    """Data that is one source: the values of the keys that TokenData has."""

    tokens: ClassVar[None] = None
    sources: ClassVar[tuple[AnySource, ...]] = ()
    weights: ClassVar[tuple[WeightsConfig, ...]] = ()
    on_exhausted: ClassVar[Literal["repeat"]] = "repeat"
    packing: ClassVar[Literal["concat"]] = "concat"

    @property
    def label(self) -> str:
        """The name of the source, with the seed the key of its order: the name of its class."""
        return self.type.rpartition(":")[2]

    def open_samples(self, run: Any) -> Any:
        """Return the `dtt.data.samples.protocol.Opened` samples of a run, a `RunConfig`.

        dtt opens those of a Source itself, by what it reads.
        """
        raise NotImplementedError


class Source(OneSource):
    """Samples that are not documents. One of your own defines `samples` and `read`."""

    mask_documents: ClassVar[bool] = False
    eod_mask_loss: ClassVar[bool] = False
    is_counted = True

    tokenizer: Path
    """The tokenizer.json whose ids the samples have."""
    held_out: int = Field(default=0, ge=0)
    """Number of samples that are held out for validation: the last ones."""

    def samples(self) -> int:
        """Return the number of samples, those held out included."""
        raise NotImplementedError

    def read(self, number: int, tokens: int) -> Any:
        """Return the token ids of a sample (from 0), at most `tokens`; the same ones each time.

        dtt shuffles the samples in each epoch, and pads them. With a second sequence of the same
        length beside the ids, only the ids for which it is True are targets of the loss. Each rank
        reads all samples of a step, to count the targets.
        """
        raise NotImplementedError

    def version(self) -> str:
        """Return a text that changes when the samples do: then a job is not resumed with them."""
        return ""


Row = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""A text, token ids, the messages of a conversation, or a mapping with `messages`."""


class Rows(Source):
    """Rows that dtt encodes and packs. One of your own defines `__len__` and `__getitem__`.

    Each stays whole, unless it is a text longer than a sequence, and attention stays within it.
    """

    packing: ClassVar[Literal["best-fit"]] = "best-fit"  # type: ignore[assignment]
    mask_documents: ClassVar[bool] = True

    held_out: int = Field(default=0, ge=0)
    """Number of rows that are held out for validation: the last ones."""

    def __len__(self) -> int:
        """Return the number of rows, those held out included."""
        raise NotImplementedError

    def __getitem__(self, row: int) -> Row:
        """Return a row (from 0), the same one each time.

        It is a text, which dtt encodes, token ids, or a conversation, as messages with `role` and
        `content`, or as a mapping with `messages` and, for example, `tools`. Of a conversation, the
        targets are those that `chat.train_on` names. dtt ends a text, and ids, with the token that
        ends a document. All rows are read before the first step, and kept encoded.
        """
        raise NotImplementedError

    def __bool__(self) -> bool:
        """Return True: a section is there, however many rows it has."""
        return True

    def samples(self) -> int:
        """Return the number of rows."""
        return len(self)


if TYPE_CHECKING:

    class OwnEntry(SourceEntry, Source):
        """A class of a user's own as an entry of `data.sources`, as `config/own.py` makes it."""
