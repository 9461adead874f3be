"""The manifest of a selection: the documents of a corpus that are left out, and why.

A selection lies in a folder beside the files of its corpus, which it does not change. Each unit of
work of the corpus with removals has a Parquet file, `00012.removed.parquet`, with the columns
`document` (int64, its number in the unit, in the order of `read_unit`, empty ones included),
`reason` (`where`, `rules`, `language`, `contaminated`, `exact` or `near`), `rule` (the rule, such
as `gopher.min_words`, or the task and row of a question), both strings,
`twin_unit`, `twin` (int64, the document that stays instead; null without one; `twin_unit` is -1 - i
for a document of the i-th corpus of `near.against`, whose documents are then numbered through) and
`score` (float64, what was compared with the limit, such as the Jaccard similarity; null without
one), sorted by `document`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from dtt.artifacts.manifest import Manifest, Record


class SelectionUnit(Record):
    """A unit of the corpus."""

    documents: int
    """Number of its readable documents, empty ones included."""
    bytes: int
    """Size of their text, in UTF-8 bytes."""
    removed: dict[str, int]
    """Number of removed documents by reason."""
    removed_bytes: int
    sha256: str | None
    """Hash of the unit's file; None: nothing is removed, and there is no file."""


class SelectionManifest(Manifest):
    """The manifest of a selection. `dtt clean` writes it last; `dtt tokenize` and training from
    text read it."""

    filename: ClassVar[str] = "selection.json"
    work: ClassVar[str] = ".work"
    """Subfolder with the state from which `dtt clean` continues after it was killed."""
    holds: ClassVar[str] = "selection"
    made_by: ClassVar[str] = "dtt clean"

    format: Literal["dtt-selection-1"] = "dtt-selection-1"
    key: str
    """Fingerprint of everything that determines the content; the folder is named by its start."""
    key_parts: dict[str, Any]
    """The inputs of `key`: content of the corpus, section `clean`, version of `dtt clean`."""
    tasks: str | None = None
    """Hash of the tasks of `clean.decontaminate`, with their data; None: there are none. It is not
    part of the key, because `dtt tokenize` and training do not open tasks."""
    unit_bytes: int
    """Size of the units: whoever reads the corpus through the selection divides it likewise."""
    units: tuple[SelectionUnit, ...]

    def names(self) -> list[str]:
        """Return the names of all files."""
        return [removals_name(i) for i, unit in enumerate(self.units) if unit.sha256 is not None]


def removals_name(unit: int) -> str:
    """Return the name of the file of a unit."""
    return f"{unit:05d}.removed.parquet"
