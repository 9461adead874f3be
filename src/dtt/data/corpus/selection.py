"""The selection of a corpus: which of its documents `dtt clean` removed.

Whoever reads a corpus through its selection divides it into the units of the selection, and leaves
out the documents that the file of a unit lists. A selection is named by a hash of the corpus and of
the section `clean`, so a configuration finds its own, and several may lie beside a corpus.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dtt.artifacts.corpus import CorpusManifest
from dtt.artifacts.manifest import fingerprint
from dtt.artifacts.manifests import SelectionFacts
from dtt.artifacts.selection_manifest import SelectionManifest, removals_name
from dtt.base.errors import ConfigError, DamagedError, InputError
from dtt.base.files import has_sha256
from dtt.config.clean import CleanConfig

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

T = TypeVar("T")
VERSION = 2
"""Version of the result of `dtt clean` for given texts; another one makes other selections."""


def selection_parts(clean: CleanConfig, corpus: CorpusManifest) -> dict[str, Any]:
    """Return what determines a selection: other values make another folder."""
    section = clean.model_dump(mode="json")
    if clean.near is not None:
        for path in clean.near.against:
            if SelectionManifest.exists(path):
                raise ConfigError(
                    "near.against names a selection",
                    where=path,
                    why="it takes folders of corpora, all of whose documents count",
                    next=f"use the folder of its corpus: {path.absolute().parent}",
                )
        # The contents, wherever they lie.
        against = [CorpusManifest.read(path).content_key() for path in clean.near.against]
        section["near"]["against"] = against
    return {"corpus": corpus.content_key(), "clean": section, "version": VERSION}


def selection_key(clean: CleanConfig, corpus: CorpusManifest) -> str:
    """Return the key of a selection."""
    return fingerprint(selection_parts(clean, corpus))


def selection_folder(clean: CleanConfig, corpus: CorpusManifest, folder: Path) -> Path:
    """Return the folder of the selection of the corpus in `folder`, whether it exists or not."""
    return folder / f"selection-{selection_key(clean, corpus)[:8]}"


class Selection:
    """The removed documents of each unit of a corpus."""

    def __init__(self, folder: Path) -> None:
        """Read the manifest; raise InputError if there is none."""
        self.folder = folder
        self.manifest = SelectionManifest.read(folder)

    @property
    def removals(self) -> list[str | None]:
        """The hash of what is removed from each unit; None: nothing."""
        return [unit.sha256 for unit in self.manifest.units]

    def facts(self) -> SelectionFacts:
        """Return the facts about the removed documents that a token folder records."""
        removed = sum((Counter(unit.removed) for unit in self.manifest.units), Counter())
        return SelectionFacts(
            key=self.manifest.key, content=removals_key(self.removals), removed=dict(removed)
        )

    @property
    def kept_share(self) -> float:
        """The share of the bytes of text that stay."""
        units = self.manifest.units
        total = sum(unit.bytes for unit in units)
        return 1 - sum(unit.removed_bytes for unit in units) / max(total, 1)

    def removed(self, unit: int) -> npt.NDArray[np.int64]:
        """Return the numbers of the removed documents of a unit, ascending.

        A document's number is its place among those that `read_unit` yields. Raises DamagedError if
        the file is not the one that the manifest names.
        """
        # Here: the checks of `dtt submit` on a login node need the keys only.
        import numpy as np
        import pyarrow.parquet as pq

        expected, path = self.manifest.units[unit].sha256, self.folder / removals_name(unit)
        if expected is None:
            return np.empty(0, np.int64)
        if not has_sha256(path, expected):
            raise DamagedError(
                "a file of the selection is damaged or missing",
                where=path,
                next="remove the folder, and run `dtt clean` again",
            )
        numbers: npt.NDArray[np.int64] = pq.read_table(path, columns=["document"])[0].to_numpy()
        return numbers

    def keep(self, unit: int, batches: Iterable[list[T]]) -> Iterator[list[T]]:
        """Yield all batches of the documents of a unit without the removed ones.

        Raises DamagedError if the unit has another number of documents than `dtt clean` read.
        """
        removed, first = self.removed(unit), 0
        for batch in batches:
            bounds = removed.searchsorted((first, first + len(batch)))
            gone = set((removed[slice(*bounds)] - first).tolist())
            yield [one for i, one in enumerate(batch) if i not in gone] if gone else batch
            first += len(batch)
        self.check_documents(unit, first)

    def check_documents(self, unit: int, found: int) -> None:
        """Raise DamagedError unless `dtt clean` read as many documents of a unit."""
        # Otherwise numbers would mean other documents: of files that changed but kept their size,
        # or can no longer be read.
        expected = self.manifest.units[unit].documents
        if found != expected:
            raise DamagedError(
                f"unit {unit} of the corpus has {found} readable documents",
                where=self.folder,
                why=f"`dtt clean` read {expected}, so the selection names other documents",
                next="dtt download with the same options checks the files; then remove this folder "
                "and run `dtt clean` again",
            )


def removals_key(removals: Iterable[str | None]) -> str | None:
    """Return a hash of what is removed from all units; None: nothing."""
    named = {str(unit): sha256 for unit, sha256 in enumerate(removals) if sha256 is not None}
    return fingerprint(named) if named else None


def open_selection(
    clean: CleanConfig | None, corpus: CorpusManifest, folder: Path
) -> Selection | None:
    """Return the selection of the corpus in `folder`; None without a section `clean`.

    Raises InputError if `dtt clean` has not made it yet.
    """
    if clean is None:
        return None
    place = selection_folder(clean, corpus, folder)
    if not SelectionManifest.exists(place):
        raise InputError(
            "the corpus has not been cleaned as the configuration says",
            where=place,
            why="the section `clean` asks for documents to be left out",
            next="run `dtt clean` with the same configuration first",
        )
    return Selection(place)
