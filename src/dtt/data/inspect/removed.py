"""The documents that `dtt clean` removed, for reports: how many, and why."""

from __future__ import annotations

from collections.abc import Iterator

from dtt.artifacts.manifests import SelectionFacts, TokensManifest
from dtt.artifacts.selection_manifest import SelectionManifest
from dtt.base.errors import DamagedError
from dtt.config.run import RunConfig
from dtt.data.corpus.described import read_corpus
from dtt.data.corpus.selection import Selection, open_selection
from dtt.data.corpus.units import Corpus


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


def removed_of_run(cfg: RunConfig) -> dict[str, SelectionFacts]:
    """Return the facts about removed documents, for each source of a run with some."""
    if cfg.data.reads_text:
        selection = open_selection(cfg.clean, read_corpus(cfg), cfg.corpus_dir)
        found = {"text": selection and selection.facts()}
    else:
        made_by_dtt = [s for s in cfg.token_sources if TokensManifest.is_in(s.path)]
        found = {s.label: TokensManifest.read(s.path).selection for s in made_by_dtt}
    return {name: facts for name, facts in found.items() if facts and facts.removed}
