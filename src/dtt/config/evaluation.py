"""The sections `eval` and `export`: what is done with a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from dtt.config.base import RESUMABLE, Section, resumable


class EvalConfig(Section):
    """Benchmark tasks, evaluated in the loop and by `dtt eval`."""

    tasks: tuple[str, ...] = resumable(())
    """Tasks to evaluate: names of shipped tasks or suites (`hellaswag`, `core`), or YAML files."""
    every: NonNegativeInt = resumable(0)
    """Steps between evaluations of `tasks` in the training loop; 0: only at the end."""
    shots: NonNegativeInt | None = resumable(None)
    """Number of examples in each prompt; null: the number that each task defines."""
    limit: PositiveInt | None = resumable(None)
    """Maximum number of questions of a task, selected by hash; null: all."""
    batch_tokens: PositiveInt = resumable(8192)
    """Maximum number of tokens in a batch; a longer option is a batch by itself."""
    bos: Literal["tokenizer", "always", "never"] = resumable("tokenizer")
    """Beginning-of-sequence token before a context: as the tokenizer adds it, always, or never."""
    data: Path = resumable(Path("data/eval"))
    """Folder of the questions that were downloaded."""
    keep_samples: bool = resumable(False)
    """Also record the text of each prompt and answer in the result files."""


class ExportConfig(Section):
    """The exported Hugging Face folder."""

    dtype: Literal["fp32", "bf16", "fp16"] = resumable("bf16")
    """Data type of the exported weights."""
    max_shard_size: str = Field(
        default="5GB", pattern=r"^[1-9][0-9]*(KB|MB|GB)$", json_schema_extra=RESUMABLE
    )
    """Maximum size of one weight file, such as `500MB` or `5GB`."""
    license: str | None = resumable(None)
    """Licence in the model card, spelled as on the Hub (`mit`, `apache-2.0`); null: none."""
