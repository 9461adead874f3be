"""Config keys of `dtt clean`: which documents of a corpus are left out, and why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from dtt.config.base import Section
from dtt.config.quality_limits import limit_problems

Share = Annotated[float, Field(gt=0.0, le=1.0)]


class NearConfig(Section):
    """Near duplicates: documents that share most of their shingles with an earlier kept one."""

    threshold: float = Field(default=0.8, ge=0.05, le=1.0)
    """Smallest Jaccard similarity of the shingle sets of two documents that are duplicates; at
    least 0.05, since lower ones take more band keys for each document than it has words."""
    shingle: PositiveInt = 5
    """Words of a shingle. Text of scripts without spaces has shingles of as many characters."""
    against: tuple[Path, ...] = ()
    """Folders of other corpora, or of their selections. Their (kept) documents come first in the
    order and stay: what equals or resembles one of them is removed from this corpus."""


class DecontaminateConfig(Section):
    """Documents that contain a part of an evaluation task."""

    tasks: tuple[str, ...]
    """Tasks or suites of `dtt eval`, such as `core` or `hellaswag`."""
    ngram: PositiveInt = 13
    """Words of a shared n-gram (GPT-3's convention). Shorter questions, with their answer, count as
    a whole if they have at least 5 words."""


class WhereConfig(Section):
    """A condition on a column: documents that do not fulfil it are removed."""

    column: str
    """Column (Parquet, CSV) or key (JSON) of the rows of the corpus."""
    min: float | None = None
    """Smallest value that stays."""
    max: float | None = None
    """Largest value that stays."""
    values: tuple[str | int | float | bool, ...] = ()
    """Values that stay."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error for a condition that is none, or two at once."""
        if (self.min is None and self.max is None) == (not self.values):
            yield "values", "give either min, max or both, or values"


class LanguageConfig(Section):
    """Documents in other languages, as the identifier of the optional package says."""

    keep: tuple[str, ...]
    """Languages that stay, by their ISO 639-1 code: `[en, de]`."""
    min_confidence: Share = 0.65
    """Smallest probability of the language that stays."""


class CleanConfig(Section):
    """Removal of documents from training, without rewriting the corpus."""

    exact: bool = True
    """Remove documents that equal an earlier one, up to white space."""
    near: NearConfig | None = None
    """Remove documents that resemble an earlier kept one; null: none."""
    decontaminate: DecontaminateConfig | None = None
    """Remove documents that contain a part of a task; null: none."""
    rules: tuple[Literal["gopher", "c4", "fineweb"], ...] = ()
    """Published quality rules to apply. They keep or remove whole documents: lines that C4 drops
    count for `c4.min_sentences` and `c4.max_dropped_lines`."""
    limits: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Other limits of single rules than the published ones, such as `gopher.min_words: 20`."""
    where: tuple[WhereConfig, ...] = ()
    """Conditions on columns, all of which a document must fulfil."""
    language: LanguageConfig | None = None
    """Remove documents in other languages; null: none."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield an error for each limit that no applied rule has."""
        yield from limit_problems(self.limits, self.rules)
