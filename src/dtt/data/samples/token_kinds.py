"""Training from token files, as variants of the section `data`: text, conversations and pairs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from dtt.config.sources import TokenData

if TYPE_CHECKING:
    from dtt.config.run import RunConfig


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
