"""The section `eval`: benchmark tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from dtt.config.base import Section, resumable


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
