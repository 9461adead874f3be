"""Inspection of raw documents: a corpus made by `dtt download`, or any text files."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from dtt.artifacts.corpus import CorpusManifest
from dtt.artifacts.selection_manifest import SelectionManifest
from dtt.artifacts.token_folders import ShardFile
from dtt.base.errors import InputError
from dtt.base.log import progress
from dtt.data.conversations.dialects import parse_pair, parse_row
from dtt.data.corpus.bad_documents import NUMBER, BadDocuments, raise_if_refused, reason
from dtt.data.corpus.documents import read_rows, read_unit
from dtt.data.corpus.download import local_manifest
from dtt.data.corpus.selection import Selection
from dtt.data.corpus.units import Corpus, Unit
from dtt.data.inspect.report import (
    ODDITIES_SHOWN,
    SHOWN_CHARACTERS,
    InspectOptions,
    Report,
    Sample,
    damages,
    spread,
    summary,
)

SAMPLE_BYTES = 2**26
PLACES = 32
"""Number of evenly spread positions at which a large corpus is read."""


def inspect_documents(path: Path, options: InspectOptions) -> Report:
    """Report on the documents of a corpus, or of a file or folder, without writing anything.

    Unreadable ones are among the oddities. Raises InputError if there are none.
    """
    if not path.exists():
        raise InputError(
            f"there is no {path}", next="specify a corpus, documents, or token files of any kind"
        )
    made_here = CorpusManifest.is_in(path)
    manifest = CorpusManifest.read(path) if made_here else local_manifest(path)
    files = [ShardFile(path / file.path, file.bytes, file.sha256) for file in manifest.files]
    damaged = damages(files, hashes=options.hashes)
    whole_files = tuple(file for file in manifest.files if path / file.path not in damaged)
    corpus = Corpus(path, manifest.model_copy(update={"files": whole_files}))
    units = corpus.units(corpus.unit_bytes())
    total = sum(unit.text_bytes for unit in units)
    whole = options.everything or total <= SAMPLE_BYTES
    statistics = _TextStatistics()
    chosen = units if whole else units[:: -(-len(units) // PLACES)]
    with progress("reading", sum(place.text_bytes for place in chosen)) as advance:
        for place in chosen:
            statistics.read(corpus, place, None if whole else SAMPLE_BYTES // len(chosen))
            advance(place.text_bytes)
    # Of a part, about as many as in the same number of bytes of what was read.
    estimate = round(len(statistics.lengths) * total / max(statistics.bytes, 1))
    # Without all files, units would be others.
    selections = _selections(corpus) if made_here and not damaged else []
    return Report(
        path=str(path),
        kind="corpus of dtt" if made_here else "documents",
        files=len(files),
        file_bytes=sum(file.bytes for file in files),
        documents=len(statistics.lengths) if whole else estimate,
        documents_estimated=not whole,
        text_bytes=statistics.bytes if whole else total,
        facts=manifest.model_dump(
            include={"file_format", "text_column", "txt_documents", *["source"] * made_here},
            exclude_none=True,
        )
        | statistics.keys
        | {f"removed by {one.folder.name}": one.facts().describe() for one in selections},
        read={
            "amount": statistics.bytes,
            "total": statistics.bytes if whole else total,
            "unit": "bytes of text",
        },
        lengths=summary(np.array(statistics.lengths, dtype=np.int64), "bytes"),
        samples=spread(statistics.firsts, options.samples),
        oddities=list(statistics.oddities()),
        damaged=[f"{file}: {problem}" for file, problem in damaged.items()],
        verified=options.hashes,
    )


def _selections(corpus: Corpus) -> list[Selection]:
    """Return the finished selections of a corpus, by name; not those of earlier files."""
    folders = (path for path in corpus.folder.glob("selection-*") if SelectionManifest.exists(path))
    found = (Selection(path) for path in sorted(folders))
    key = corpus.manifest.content_key()
    return [one for one in found if one.manifest.key_parts.get("corpus") == key]


class _TextStatistics:
    """Running statistics of the documents read so far."""

    def __init__(self) -> None:
        self.lengths = array("q")
        """UTF-8 bytes of each document."""
        self.bytes = self._blank = 0
        self._bad = BadDocuments(shown=ODDITIES_SHOWN)
        self._refused = BadDocuments()
        self.keys: dict[str, Counter[str]] = {}
        """Number of rows of conversations by key that dtt reads, and by key that it does not."""
        self.firsts: list[Sample] = []
        """The first document of each unit."""

    def read(self, corpus: Corpus, unit: Unit, limit: int | None) -> None:
        """Read the documents of a unit until `limit` bytes of text are read (None: all).

        Of conversations, a document is the JSON text of a row.
        """
        stop = None if limit is None else self.bytes + limit
        rows = self._rows(corpus, unit)
        texts = rows if corpus.manifest.has_rows else read_unit(corpus, unit, self._bad)
        where = corpus.path(unit.spans[0].file).name
        for number, text in enumerate(texts):
            self.bytes += len(text)
            self.lengths.append(len(text))
            self._blank += text.isspace()
            if number == 0:
                # `ignore`: the cut may be within a character.
                start = text[: 4 * SHOWN_CHARACTERS].decode(errors="ignore")[:SHOWN_CHARACTERS]
                self.firsts.append({"where": f"{where}, unit {unit.index}", "text": start})
            if stop is not None and self.bytes >= stop:
                break

    def _rows(self, corpus: Corpus, unit: Unit) -> Iterator[bytes]:
        """Yield rows; count their keys as read or not used, or the reason to refuse them."""
        for span in unit.spans:
            # The files of one set differ in numbers only and count as one; others may be of
            # another format, so that a sum over them would not tell where a key is lost.
            name = NUMBER.sub("N", corpus.path(span.file).name)
            place = f"{name}: " if len(corpus.manifest.files) > 1 else ""
            found = read_rows(corpus, replace(unit, spans=(span,)), self._bad)
            for row in chain.from_iterable(found):
                is_pair = row.value.keys() >= {"chosen", "rejected"}
                try:
                    parsed = parse_pair(row.value).chosen if is_pair else parse_row(row.value)
                except Exception as error:  # noqa: BLE001  rows of others raise anything
                    raise_if_refused(error)
                    self._refused.add(row.where, place + reason(error))
                else:
                    present = [key for key, value in row.value.items() if value is not None]
                    read = [key for key in present if key not in parsed.unread]
                    for kind, keys in (("keys read", read), ("keys not used", parsed.unread)):
                        if keys:
                            self.keys.setdefault(place + kind, Counter()).update(keys)
                yield row.content

    def oddities(self) -> Iterator[str]:
        """Yield a line for each anomaly in the documents."""
        if empty := self.lengths.count(0):
            yield f"empty documents, which tokenize skips: {empty:,}"
        if self._blank:
            yield f"documents that contain only white space: {self._blank:,}"
        for why, count in self._refused.reasons.most_common(ODDITIES_SHOWN):
            yield f"rows that are refused as conversations: {count:,}: {why}"
        if self._bad.replaced:
            yield f"documents in which U+FFFD replaces lone surrogates: {self._bad.replaced:,}"
        if self._bad.count:
            lost = self._bad.lost_bytes
            loss = f"; about {lost:,} bytes are lost" if lost else ""
            yield f"documents that cannot be read: {self._bad.count:,}{loss}"
            yield from self._bad.examples
