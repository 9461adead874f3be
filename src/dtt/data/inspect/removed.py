"""The documents that `dtt clean` removed, for reports: how many, why, and some of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain, cycle, islice
from typing import Any

from dtt.artifacts.manifests import SelectionFacts, TokensManifest
from dtt.artifacts.selection_manifest import SelectionManifest
from dtt.base.errors import DamagedError
from dtt.config.run import RunConfig
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.described import read_corpus
from dtt.data.corpus.documents import read_unit
from dtt.data.corpus.json_rows import read_rows
from dtt.data.corpus.selection import Selection, open_selection
from dtt.data.corpus.units import Corpus, Unit
from dtt.data.inspect.report import DocumentSample, spread


def selections_of(corpus: Corpus) -> list[Selection]:
    """Return the finished selections of a corpus, by name; not those of earlier files."""
    folders = (path for path in corpus.folder.glob("selection-*") if SelectionManifest.exists(path))
    found = (Selection(path) for path in sorted(folders))
    key = corpus.manifest.content_key()
    return [one for one in found if one.manifest.key_parts.get("corpus") == key]


def damages_of(selection: Selection) -> Iterator[str]:
    """Yield an error for each file that does not have the sha256 of its manifest."""
    for unit in range(len(selection.manifest.units)):
        try:
            selection.removed(unit)
        except DamagedError as error:
            yield str(error).splitlines()[0] + f": {selection.folder}, unit {unit}"


def removed_samples(corpus: Corpus, selection: Selection, count: int) -> Iterator[DocumentSample]:
    """Yield up to `count` removed documents from all over the corpus, of every reason in turn."""
    units, seen = corpus.units(selection.manifest.unit_bytes), Counter[str]()
    chosen = spread([i for i, sha256 in enumerate(selection.removals) if sha256], count)
    rows = {unit: selection.rows(unit) for unit in chosen}
    for unit in islice(cycle(chosen), count):
        row = min(rows[unit], key=lambda row: seen[row["reason"]], default=None)
        if row is None:
            continue
        rows[unit].remove(row)
        seen[row["reason"]] += 1
        text = next(islice(_contents(corpus, units[unit]), row["document"], None), b"")
        where = f"removed by {selection.folder.name}: document {row['document']} of unit {unit}"
        yield DocumentSample.of(f"{where}: {_why(row)}", text)


def _why(row: dict[str, Any]) -> str:
    """Return the reason, rule, score and twin of a removed document."""
    parts = [row["reason"]]
    if row["rule"]:
        parts.append(str(row["rule"]))
    if row["score"] is not None:
        parts.append(f"{row['score']:.3g}")
    if row["twin"] is not None:
        of, document = row["twin_unit"], row["twin"]
        place = f"unit {of}" if of >= 0 else f"near.against[{-1 - of}]"
        parts.append(f"its twin is document {document} of {place}")
    return ", ".join(parts)


def _contents(corpus: Corpus, unit: Unit) -> Iterator[bytes]:
    if not corpus.manifest.has_rows:
        return read_unit(corpus, unit, BadDocuments())
    rows = chain.from_iterable(read_rows(corpus, unit, BadDocuments()))
    return (row.content for row in rows)


def removed_of_run(cfg: RunConfig) -> dict[str, SelectionFacts]:
    """Return the facts about removed documents, for each source of a run with some."""
    if cfg.data.reads_text:
        selection = open_selection(cfg.clean, read_corpus(cfg), cfg.corpus_dir)
        found = {"text": selection and selection.facts()}
    else:
        made_by_dtt = [s for s in cfg.token_sources if TokensManifest.is_in(s.path)]
        found = {s.label: TokensManifest.read(s.path).selection for s in made_by_dtt}
    return {name: facts for name, facts in found.items() if facts and facts.removed}
