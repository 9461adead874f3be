"""The kinds of training data of dtt, as variants of the section `data`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from dtt.config.sources import OneSource, TokenData

if TYPE_CHECKING:  # keeps numpy out of the check of a configuration
    from dtt.config.run import RunConfig
    from dtt.data.samples.protocol import OpenedSource


class TokensDataConfig(TokenData):
    """Training from token files: one folder, or a mixture of several."""

    type: Literal["tokens"] = "tokens"
    packing: Literal["concat", "best-fit", "none"] = "concat"
    """Assignment of documents to sequences: `concat` cuts windows from one long stream; `best-fit`
    packs complete documents together (Ding et al. 2024, arXiv 2404.10830) and splits only documents
    longer than a sequence; `none` gives each document, or part, a padded sequence of its own, for
    models whose state no mask divides."""
    mask_documents: bool = False
    """Restrict attention to tokens of the same document, and restart positions at its start."""
    eod_mask_loss: bool = False
    """Exclude from the loss the targets that are the first token of a document, predicted from the
    end of the preceding one (Megatron's `--eod-mask-loss`)."""


class ConversationData(TokenData):
    """Token files of conversations, which are packed whole."""

    has_conversations = True
    mask_documents: ClassVar[bool] = True
    eod_mask_loss: ClassVar[bool] = (
        False  # the loss masks already exclude the first token of every conversation
    )


class ChatDataConfig(ConversationData):
    """Fine-tuning on conversations, whose answers are the targets; see the section `chat`.

    Conversations are packed whole, and attention stays within a conversation.
    """

    type: Literal["chat"] = "chat"
    packing: Literal["best-fit", "none"] = "best-fit"
    """`none` gives each conversation a padded sequence of its own, for models whose state no mask
    divides."""


class PreferenceDataConfig(ConversationData):
    """Preference tuning on pairs of conversations, `chosen` and `rejected`; see `objective`.

    Both conversations of a pair are packed into the same sequence, and attention stays within a
    conversation.
    """

    has_pairs = True
    packing: ClassVar[Literal["best-fit"]] = "best-fit"

    type: Literal["preference"] = "preference"

    def run_problems(self, run: RunConfig) -> Iterator[tuple[str, str]]:
        """Yield an error for another objective, and for what pairs cannot be combined with."""
        needs = f"data.type={self.type} needs"
        if not run.objective.per_pair:
            yield "objective.type", f"{needs} dpo, not {run.objective.type}"
        if len(run.sources) > len(run.token_sources):
            yield "data.sources", f"{needs} token files: a class makes no pairs"
        if run.chat.turns == "expand":
            yield "chat.turns", f"{needs} all: each conversation is one of a pair"
        if run.chat.too_long == "whole_turns":
            yield "chat.too_long", f"{needs} drop or stop: a cut pair has no end"


class TextDataConfig(OneSource):
    """Training straight from text, without token files, with an existing tokenizer.

    Every process encodes the text of the whole run, at about 20M tokens per second and core: enough
    for dozens of fast GPUs. The shuffle buffer spans 16 MB of text. For larger needs, run
    `dtt tokenize` first.
    """

    reads_text = True

    type: Literal["text"] = "text"
    mask_documents: bool = False
    """Restrict attention to tokens of the same document, and restart positions at its start."""
    eod_mask_loss: bool = False
    """Exclude from the loss the targets that are the first token of a document, predicted from the
    end of the preceding one (Megatron's `--eod-mask-loss`)."""

    def open_samples(self, run: RunConfig) -> OpenedSource:
        """Open the corpus with the tokenizer that the run names."""
        from dtt.data.samples.text_source import open_text

        return open_text(run)

    def input_paths(self, run: RunConfig) -> tuple[Path, ...]:
        """Return the folder of the corpus."""
        return (run.corpus_dir,)

    def run_problems(self, run: RunConfig) -> Iterator[tuple[str, str]]:
        """Yield an error for several corpora, and for a tokenizer that is yet to be trained."""
        if run.download.datasets:
            why = f"data.type={self.type} reads one corpus: run dtt tokenize on several"
            yield "download.datasets", why
        if run.tokenizer.type != "file":
            yield "tokenizer.type", f"data.type={self.type} needs a given tokenizer: file"


class SyntheticDataConfig(OneSource):
    """Random token ids in place of data, to measure speed and memory: nothing is learned."""

    has_text = False
    mask_documents: ClassVar[bool] = False
    eod_mask_loss: ClassVar[bool] = False

    type: Literal["synthetic"] = "synthetic"
    vocab_size: int = Field(default=50257, ge=2, le=2**22)
    """Number of different ids."""

    def open_samples(self, run: RunConfig) -> OpenedSource:
        """Return random ids, with a tokenizer that shows them as numbers."""
        from dtt.artifacts.manifest import fingerprint
        from dtt.base.files import sha256_file
        from dtt.data.samples.protocol import OpenedSource, Vocabulary
        from dtt.data.samples.synthetic_source import NAME, SyntheticSource, numbers_tokenizer

        path = numbers_tokenizer(self.vocab_size)
        return OpenedSource(
            SyntheticSource(self.vocab_size, run.train.seq_len, run.seed),
            None,
            fingerprint([NAME, self.vocab_size, run.seed]),
            Vocabulary(path, sha256_file(path), self.vocab_size, 0),
            None,
        )

    def run_problems(self, run: RunConfig) -> Iterator[tuple[str, str]]:
        """Yield an error for more ids than a model has rows, such as that of `init.from`."""
        rows = run.model.vocab_size
        if rows is not None and rows < self.vocab_size:
            why = f"{self.vocab_size} ids are more than model.vocab_size = {rows}: "
            yield "data.vocab_size", f"{why}set data.vocab_size={rows}"

    def known_vocab_size(self) -> int:
        """See Data."""
        return self.vocab_size
