"""Small corpora of every format."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.corpora import write_files

from dtt.artifacts.corpus import CorpusManifest
from dtt.config.data import DownloadConfig
from dtt.data.corpus.download import download
from dtt.data.corpus.units import Corpus


class Corpora:
    """Makes corpora below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self, files: dict[str, bytes], **options: object) -> Corpus:
        """Write `files` and download them."""
        source = self.folder / "source"
        write_files(source, files)
        dataset = source / next(iter(files)) if len(files) == 1 else source
        self.download(dataset=str(dataset), **options)
        return Corpus(self.folder / "corpus")

    def download(self, **options: object) -> CorpusManifest:
        """Run a download into the folder `corpus`."""
        return download(DownloadConfig(**options), self.folder / "corpus")  # type: ignore[arg-type]


@pytest.fixture
def corpora(tmp_path: Path) -> Corpora:
    """Makes corpora in a folder of this test."""
    return Corpora(tmp_path)
