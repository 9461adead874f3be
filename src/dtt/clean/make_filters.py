"""The filters that a configuration asks for."""

from __future__ import annotations

from dtt.base.errors import ConfigError
from dtt.clean.filters import Filter
from dtt.clean.where import WhereFilter
from dtt.config.run import RunConfig
from dtt.data.corpus.units import Corpus


def make_filters(cfg: RunConfig, corpus: Corpus) -> list[Filter]:
    """Return the filters of the section `clean`, cheap ones first."""
    clean = cfg.clean
    if clean is None:
        return []
    for name in ("rules", "limits", "language", "decontaminate"):
        if getattr(clean, name):
            raise ConfigError(f"clean.{name} is not implemented", next=f"omit clean.{name}")
    return list(map(WhereFilter, clean.where))
