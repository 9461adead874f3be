"""Filters, which judge each document by itself: conditions on columns, languages, quality rules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from dtt.base.errors import ConfigError, EnvironmentUnfit
from dtt.config.clean import LanguageConfig, WhereConfig
from dtt.mesh.environment import install

SAMPLE = 4096
"""Characters at the start of a document that decide. py3langid loops in Python over each byte, so
a whole novel would take a tenth of a second and gain nothing."""


class Removal(NamedTuple):
    """Why a document is removed."""

    reason: str
    """`where`, `language`, `contaminated` or `rules`; `exact` and `near` come from other passes."""
    rule: str
    """The rule and what it found, such as `gopher.min_words`, or `hellaswag 17` for a question;
    several questions are separated by commas."""
    score: float | None = None
    """The number that was compared with a limit."""


class Filter(Protocol):
    """A judge of single documents. It is made once for each process and has no state."""

    columns: tuple[str, ...]
    """Columns of the row that it reads besides the text."""

    def __call__(self, text: str, row: Mapping[str, Any]) -> Removal | None:
        """Return why a document is removed; None: it stays."""


class WhereFilter:
    """A judge of one column; a document without a value there does not fulfil the condition."""

    def __init__(self, condition: WhereConfig) -> None:
        """Judge by `condition`."""
        self.columns: tuple[str, ...] = (condition.column,)
        self._condition = condition
        # CSV has text only.
        self._texts = frozenset(map(str, condition.values))

    def __call__(self, text: str, row: Mapping[str, Any]) -> Removal | None:
        """Return `where` with the column and what it holds; None: the condition is fulfilled."""
        wanted, value = self._condition, row.get(self._condition.column)
        if wanted.values:
            if value in (self._texts if isinstance(value, str) else wanted.values):
                return None
            return Removal("where", f"{wanted.column} {_shown(value)}")
        try:
            number = float(value) if isinstance(value, str | int | float) else math.nan
        except (ValueError, OverflowError):
            number = math.nan
        if math.isnan(number):
            return Removal("where", f"{wanted.column} {_shown(value)}")
        if wanted.min is not None and not number >= wanted.min:
            return Removal("where", f"{wanted.column} < {wanted.min:g}", number)
        if wanted.max is not None and not number <= wanted.max:
            return Removal("where", f"{wanted.column} > {wanted.max:g}", number)
        return None


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 40 else text[:39] + "…"


class LanguageFilter:
    """A filter that keeps documents in some languages, as py3langid identifies them.

    py3langid is naive Bayes over byte n-grams, with 139 languages and its model in the wheel.
    lingua's wheel has 96 MB, fastText's model is a download.
    """

    columns: tuple[str, ...] = ()

    def __init__(self, config: LanguageConfig) -> None:
        """Load the model.

        Raises EnvironmentUnfit if py3langid is not installed, and ConfigError for a code that it
        does not know.
        """
        try:
            from py3langid.langid import MODEL_FILE, LanguageIdentifier
        except ModuleNotFoundError as error:
            raise EnvironmentUnfit(
                "clean.language requires py3langid", why=str(error), next=install("language")
            ) from None
        identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
        if unknown := sorted({*config.keep} - {*identifier.labels}):
            raise ConfigError(
                f"clean.language.keep: py3langid has no language {', '.join(unknown)}",
                next=f"ISO 639-1 codes: {', '.join(sorted(identifier.labels))}",
            )
        self._classify = identifier.classify
        self._config = config

    def __call__(self, text: str, row: Mapping[str, Any]) -> Removal | None:
        """Return the language of a document that is removed, with its probability.

        One in a kept language is removed if the probability is below `min_confidence`; so is one
        without any features, such as an empty one, since all languages are equally probable.
        """
        language, probability = self.identify(text)
        if language in self._config.keep and probability >= self._config.min_confidence:
            return None
        return Removal("language", language, probability)

    def identify(self, text: str) -> tuple[str, float]:
        """Return the language of a text, with its probability."""
        language, probability = self._classify(text[:SAMPLE])
        return language, float(probability)
