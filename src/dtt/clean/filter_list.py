"""The filters of single documents that a configuration asks for."""

from __future__ import annotations

from dtt.clean.filters import Filter
from dtt.clean.language import LanguageFilter
from dtt.clean.rules import QualityRules
from dtt.config.clean import CleanConfig


def filters_of(clean: CleanConfig) -> list[Filter]:
    """Return the filters by text: the rules and the language, fast ones first.

    Contamination takes two passes, see `dtt.clean.contamination`. Raises EnvironmentUnfit or
    ConfigError if the language cannot be identified.
    """
    filters: list[Filter] = []
    if clean.rules:
        filters.append(QualityRules(clean.rules, clean.limits))
    if clean.language is not None:
        filters.append(LanguageFilter(clean.language))
    return filters
