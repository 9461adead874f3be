"""Config keys of `dtt clean`: which documents of a corpus are left out, and why."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from dtt.config.base import Section

Limits = Mapping[str, Mapping[str, float]]

LIMITS: dict[str, dict[str, float]] = {
    # Rae et al. 2021, Scaling Language Models (arXiv 2112.11446), appendix A.1.1. Its stop words
    # and word lengths suit English: a text without spaces between its words is one long word.
    "gopher": {
        "min_words": 50,  # "between 50 and 100,000 words"
        "max_words": 100_000,
        "min_mean_word_length": 3,  # characters; "mean word length … 3 to 10 characters"
        "max_mean_word_length": 10,
        "max_hashes_per_word": 0.1,  # "symbol-to-word ratio greater than 0.1 for … the hash symbol"
        "max_ellipses_per_word": 0.1,  # "… or the ellipsis"
        "max_bullet_lines": 0.9,  # "more than 90% of lines starting with a bullet point"
        "max_ellipsis_lines": 0.3,  # "more than 30% ending with an ellipsis"
        "min_alphabetic_words": 0.8,  # "80% of words … contain at least one alphabetic character"
        "min_stop_words": 2,  # "at least two of the following English words: the, be, to, …"
        # Table A1: repetition. Shares of lines, paragraphs and characters.
        "max_duplicate_lines": 0.30,
        "max_duplicate_paragraphs": 0.30,
        "max_duplicate_line_chars": 0.20,
        "max_duplicate_paragraph_chars": 0.20,
        "max_top_2gram_chars": 0.20,
        "max_top_3gram_chars": 0.18,
        "max_top_4gram_chars": 0.16,
        "max_duplicate_5gram_chars": 0.15,
        "max_duplicate_6gram_chars": 0.14,
        "max_duplicate_7gram_chars": 0.13,
        "max_duplicate_8gram_chars": 0.12,
        "max_duplicate_9gram_chars": 0.11,
        "max_duplicate_10gram_chars": 0.10,
    },
    # Raffel et al. 2020, T5 (JMLR 21/140), section 2.2.
    "c4": {
        "max_lorem_ipsum": 0,  # occurrences; "any page where the phrase lorem ipsum appeared"
        "max_curly_brackets": 0,  # "any pages that contained a curly bracket"
        "min_sentences": 5,  # of the lines that C4 keeps; "any page with fewer than 5 sentences"
        # C4 drops lines where a selection can only remove documents. No share of dropped lines is
        # published, so by default it removes nothing; `clean.limits` may set one.
        "max_dropped_lines": 1.0,
        "line_words": 3,  # of a kept line; "lines that contained at least 3 words"
        "word_length": 1000,  # of a kept line; c4_utils.py of TensorFlow Datasets
    },
    # Penedo et al. 2024, FineWeb (arXiv 2406.17557), section 3.6.
    "fineweb": {
        "min_punctuated_lines": 0.12,  # "fraction of lines ending with punctuation ≤ 0.12"
        # "fraction of characters in duplicated lines ≥ 0.1"; datatrove's default is 0.01.
        "max_duplicate_line_chars": 0.1,
        "max_short_lines": 0.67,  # "fraction of lines shorter than 30 characters ≥ 0.67"
        "short_line": 30,  # characters of a short line at most, as datatrove counts them
    },
}
"""Limits of the quality rules, with their defaults as published.

A document stays if no value is below a limit `min_…` or above a limit `max_…`. The other limits are
parts of a definition, such as the length of a short line. Shares lie between 0 and 1.
"""

Share = Annotated[float, Field(gt=0.0, le=1.0)]


class NearConfig(Section):
    """Near duplicates: documents that share most of their shingles with an earlier kept one."""

    threshold: float = Field(default=0.8, ge=0.05, le=1.0)
    """Smallest Jaccard similarity of the shingle sets of two documents that are duplicates; at
    least 0.05, since lower ones take more band keys for each document than it has words."""
    shingle: PositiveInt = 5
    """Words of a shingle. Text of scripts without spaces has shingles of as many characters."""
    against: tuple[Path, ...] = ()
    """Folders of other corpora. Their documents come first in the order and stay: what equals or
    resembles one of them is removed from this corpus."""


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
        known = [f"{rule}.{name}" for rule, values in LIMITS.items() for name in values]
        for rule, values in self.limits.items():
            for limit in (f"{rule}.{name}" for name in values):
                if limit not in known:
                    close = difflib.get_close_matches(limit, known, n=1)
                    hint = f"did you mean {close[0]}?" if close else f"limits: {', '.join(known)}"
                    yield f"limits.{limit}", f"unknown limit; {hint}"
                elif rule not in self.rules:
                    yield f"limits.{limit}", f"has no effect: {rule} is not in clean.rules"
