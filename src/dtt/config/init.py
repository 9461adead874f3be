"""Initial weights: random, or from a checkpoint (warm start)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, create_model

from dtt.config.base import Section

HF = "hf:"
"""Prefix of `init.from` for weights from the Hugging Face Hub or a local Hugging Face folder."""
HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?")
"""Pattern of a model on the Hub: `ORG/NAME` or `ORG/NAME@REVISION`."""
MAY_DIFFER = {"vocab_size", "max_seq_len", "tie_embeddings", "init_std", "dropout"}
"""Keys of `model` that may differ from those of the source of the weights."""


class _Init(Section):
    @property
    def source(self) -> str | None:
        """The value of the key `from`, which cannot be an attribute: it is a keyword of Python."""
        value: str | None = getattr(self, "from")
        return value

    average: bool = False
    """Start from the exponential moving average of the other job's weights (its `train.ema_decay`)
    instead of the weights."""
    adapter: Path | None = None
    """Folder of an adapter in the format of PEFT to train on, for `adapter.type: lora` with the
    same ranks, scales and targets; null: a new adapter, which changes nothing at first."""
    optimizer: Literal["fresh", "carry"] = "fresh"
    """State of the optimizer: `fresh`, or the other job's (`carry`), for the same model and
    optimizer. Steps, schedule and data order start over in either case."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error for keys that need another job's checkpoint, if there is none."""
        if self.source is None or self.source.startswith(HF):
            why = "requires a dtt checkpoint to start from: init.from=JOB"
            if self.average:
                yield "average", why
            if self.optimizer == "carry":
                yield "optimizer", why


if TYPE_CHECKING:

    class InitConfig(_Init):
        """Initial weights: random, or from a checkpoint (warm start)."""

else:
    InitConfig = create_model(
        "InitConfig",
        __base__=_Init,
        __doc__="Initial weights.",
        **{
            "from": (
                str | None,
                Field(
                    default=None,
                    description="Weights that a new job starts from. Another job's: `JOB` or "
                    "`JOB@STEP`, such as `jobs/base@5000`; tensors without a "
                    "match in name and shape keep their random initialisation and "
                    "are listed. Released weights: `hf:FOLDER` or `hf:ORG/NAME`, "
                    "or `hf:ORG/NAME@REVISION`: the model has their family, sizes and vocabulary, "
                    "in place of the `model` section of files below the one that sets it; "
                    "keys of `model` in the same file or on the command line must agree, "
                    "`vocab_size`, "
                    "`max_seq_len`, `tie_embeddings`, `init_std` and `dropout` excepted. "
                    "null: all weights are random.",
                ),
            )
        },
    )
