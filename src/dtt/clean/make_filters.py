"""The filters that a configuration asks for."""

from __future__ import annotations

from dtt.clean.contamination import TaskNgrams, open_task_ngrams
from dtt.clean.filters import Filter
from dtt.clean.language import LanguageFilter
from dtt.clean.rules import QualityRules
from dtt.clean.where import WhereFilter
from dtt.config.run import RunConfig


def make_filters(cfg: RunConfig) -> list[Filter]:
    """Return the filters of the section `clean`, cheap ones first.

    Raises EnvironmentUnfit or ConfigError if the language cannot be identified.
    """
    clean = cfg.clean
    if clean is None:
        return []
    filters: list[Filter] = list(map(WhereFilter, clean.where))
    if clean.rules:
        filters.append(QualityRules(clean.rules, clean.limits))
    if clean.language is not None:
        filters.append(LanguageFilter(clean.language))
    return filters


def make_tasks(cfg: RunConfig) -> TaskNgrams | None:
    """Return the n-grams of the tasks of `clean.decontaminate`; None: none are looked for.

    Raises the errors of `open_task_ngrams`.
    """
    if cfg.clean is None or cfg.clean.decontaminate is None:
        return None
    return open_task_ngrams(cfg.clean.decontaminate, cfg.eval.data)
