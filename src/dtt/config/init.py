"""Initial weights: random, or from a checkpoint (warm start)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, create_model

from dtt.config.base import Section

HF = "hf:"
"""Prefix of `init.from` for weights from the Hugging Face Hub or a local Hugging Face folder."""
MAY_DIFFER = {"vocab_size", "max_seq_len", "tie_embeddings", "init_std", "dropout"}
"""Keys of `model` that may differ from those of the source of the weights."""


class _Init(Section):
    @property
    def source(self) -> str | None:
        """The value of the key `from`, which cannot be an attribute: it is a keyword of Python."""
        value: str | None = getattr(self, "from")
        return value


if TYPE_CHECKING:

    class InitConfig(_Init):
        """Initial weights: random, or from a checkpoint (warm start)."""

else:
    InitConfig = create_model(
        "InitConfig",
        __base__=_Init,
        __doc__="Where the weights begin.",
        **{
            "from": (
                str | None,
                Field(
                    default=None,
                    description="Weights that a new job begins with. Another job's: `JOB` or "
                    "`JOB@STEP`, as `jobs/base@5000`; what does not fit in name and shape keeps "
                    "its random start, and is listed. Released ones: `hf:FOLDER` or `hf:ORG/NAME`, "
                    "or `hf:ORG/NAME@REVISION`: the model has their family, sizes and vocabulary, "
                    "in place of the `model` section of files below the one that says so; keys of "
                    "`model` beside it or on the command line must agree, `vocab_size`, "
                    "`max_seq_len`, `tie_embeddings`, `init_std` and `dropout` excepted. "
                    "null: all weights are random.",
                ),
            )
        },
    )
