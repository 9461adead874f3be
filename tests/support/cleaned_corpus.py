"""Corpora for tests of `dtt clean`."""

from __future__ import annotations

import hashlib
from itertools import accumulate
from pathlib import Path
from typing import Any

from dtt.artifacts.selection_manifest import SelectionManifest, removals_name
from dtt.clean.removals import RemovedRow, decode
from dtt.clean.run import clean
from dtt.config.data import DownloadConfig
from dtt.config.load import resolve
from dtt.config.run import RunConfig
from dtt.data.corpus.download import download
from dtt.mesh.comm import Serial


class CleanedCorpus:
    """A corpus in a folder, and its selections."""

    def __init__(self, folder: Path, files: dict[str, bytes], **options: Any) -> None:
        self.folder = folder / "corpus"
        self.source = folder / "source"
        self.source.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (self.source / name).write_bytes(content)
        download(DownloadConfig(dataset=str(self.source), **options), self.folder)

    def config(self, *settings: str) -> RunConfig:
        """The configuration that cleans it."""
        given = [f"download.dataset={self.source}", f"download.out={self.folder}", *settings]
        return resolve(None, given, {}).config

    def clean(self, *settings: str) -> Path:
        """Clean it in this process; return the folder of the selection."""
        result = clean(self.config(*(settings or ("clean.near.threshold=0.8",))), Serial())
        assert result is not None
        return result.folder


def numbered(folder: Path) -> dict[int, tuple[RemovedRow, int | None]]:
    """The removed documents of a selection, and their twins in the corpus, numbered through."""
    units = SelectionManifest.read(folder).units
    starts = [0, *accumulate(unit.documents for unit in units)]
    found = {}
    for start, unit in zip(starts, range(len(units)), strict=False):
        for row in decode(folder / removals_name(unit)) if units[unit].sha256 else ():
            known = row.twin_unit is not None and row.twin_unit >= 0 and row.twin is not None
            found[start + row.document] = row, starts[row.twin_unit] + row.twin if known else None
    return found


def result_bytes(folder: Path) -> dict[str, str]:
    """The hash of every file of a selection."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.is_file() and not path.name.startswith(".lock")
    }
