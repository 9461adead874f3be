"""Selections written as `dtt clean` writes them, with documents that a test chooses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import chain
from pathlib import Path

from dtt.artifacts.manifest import fingerprint
from dtt.artifacts.selection_manifest import SelectionManifest, SelectionUnit, removals_name
from dtt.base.files import sha256_file
from dtt.clean.removals import RemovedRow, encode
from dtt.config.clean import CleanConfig
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.documents import read_rows, read_unit
from dtt.data.corpus.selection import selection_folder, selection_parts
from dtt.data.corpus.units import Corpus, Unit

CLEAN = CleanConfig()


def contents(corpus: Corpus, unit: Unit) -> list[bytes]:
    """The text of each document of a unit, or the JSON text of each row."""
    if not corpus.manifest.has_rows:
        return [*read_unit(corpus, unit, BadDocuments())]
    rows = chain.from_iterable(read_rows(corpus, unit, BadDocuments()))
    return [row.content for row in rows]


def write_selection(
    folder: Path,
    removes: Callable[[bytes], bool],
    *,
    unit_bytes: int,
    clean: CleanConfig = CLEAN,
) -> Path:
    """Remove the documents of the corpus in `folder` for which `removes` is True; return where.

    Each has the first kept document of its unit as its twin.
    """
    corpus = Corpus(folder)
    place = selection_folder(clean, corpus.manifest, folder)
    place.mkdir(exist_ok=True)
    units = []
    for unit in corpus.units(unit_bytes):
        texts = contents(corpus, unit)
        removed = [number for number, text in enumerate(texts) if removes(text)]
        kept = next((number for number, text in enumerate(texts) if not removes(text)), None)
        twin = (None if kept is None else unit.index, kept)
        path = place / removals_name(unit.index)
        path.unlink(missing_ok=True)
        if removed:
            rows = [RemovedRow(number, "rules", "chosen", 0.5, *twin) for number in removed]
            path.write_bytes(encode(rows))
        units.append(
            SelectionUnit(
                documents=len(texts),
                bytes=sum(map(len, texts)),
                removed={"rules": len(removed)} if removed else {},
                removed_bytes=sum(len(texts[number]) for number in removed),
                sha256=sha256_file(path) if removed else None,
            )
        )
    parts = selection_parts(clean, corpus.manifest)
    manifest = SelectionManifest(
        key=fingerprint(parts), key_parts=parts, unit_bytes=unit_bytes, units=tuple(units)
    )
    (place / SelectionManifest.filename).write_text(manifest.dump())
    return place


def is_third(content: bytes) -> bool:
    """Choose a third of the documents, by their content."""
    return hashlib.sha256(content).digest()[0] % 3 == 0
