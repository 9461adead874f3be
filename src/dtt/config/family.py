"""The base class of models that their family builds itself, beside dtt's own decoder."""

from __future__ import annotations

from typing import Any

from dtt.config.base import Section, Tokens32


class Family(Section):
    """A family of models. One of your own defines keys and `build`.

    dtt trains it with DDP, FSDP2 and HSDP, on the data, with the optimizers and schedules and from
    the checkpoints of its own models. What needs to know the inside of a model is refused by name.
    """

    family: str
    """The class of the model, as `FILE.py:CLASS` or `MODULE:CLASS`."""
    vocab_size: Tokens32 | None = None
    """Rows of the embedding matrix; null: the tokenizer's vocabulary size, rounded up to a multiple
    of 64."""
    max_seq_len: Tokens32 | None = None
    """Maximum context length the model declares, in tokens; null: `train.seq_len`."""

    def build(self, vocab_size: int, context: int) -> Any:
        """Return the model, a `dtt.Model`, for a vocabulary and a context length in tokens.

        Its parameters get no memory here, and their values later: see `dtt.Model.init_weights`.
        """
        raise NotImplementedError
