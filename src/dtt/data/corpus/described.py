"""Comparison of the corpus that a configuration describes with the one that a folder was made from.

Default names of folders contain only the last component of a dataset, so `one/docs.jsonl` and
`two/docs.jsonl` share a folder. Whatever opens a corpus, or token files, for a configuration calls
`check_described` first; otherwise it would train on another dataset without a sign of it.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from dtt.artifacts.corpus import CorpusDescription, CorpusManifest, CorpusSource
from dtt.artifacts.manifests import SelectionFacts, TokensManifest
from dtt.base.errors import ConfigError
from dtt.config.data import DatasetConfig
from dtt.config.run import RunConfig
from dtt.data.corpus.selection import open_selection, selection_key

SAMPLED = 2**20
"""Bytes that are compared at both ends of a file."""
OPTIONS = (
    "name", "split", "revision", "text_column", "txt_documents", "max_files", "include", "exclude",
)  # fmt: skip
"""Keys of the section `download` that decide which documents there are."""


def read_corpus(cfg: RunConfig) -> CorpusManifest:
    """Return the manifest of the corpus that `cfg` describes.

    Raises InputError if the folder has none, and ConfigError if it holds another corpus.
    """
    manifest = CorpusManifest.read(cfg.corpus_dir)
    check_described(
        cfg.download,
        manifest.description(),
        cfg.corpus_dir,
        next="dtt download with the same options reads it again; or another folder for each: "
        "download.out=FOLDER",
    )
    return manifest


def check_tokens(cfg: RunConfig, path: Path, manifest: TokensManifest) -> None:
    """Raise ConfigError if the token files at `path` are not those that `cfg` describes.

    They must also lack the documents that its section `clean` removes. Nothing is compared if `cfg`
    names the folder itself (`data.tokens`, `data.sources`): then these sections describe nothing of
    this folder.
    """
    made = next((one for one in cfg.corpora if one.tokenize_dir == path), None)
    if made is None or cfg.data.tokens is not None or cfg.data.sources:
        return
    check_described(
        made.download,
        manifest.text or CorpusDescription(source=manifest.corpus),
        path,
        next="another folder for each, in both commands: tokenize.out=FOLDER",
    )
    there = None if manifest.selection is None else manifest.selection.key
    now = None
    if cfg.clean is not None:
        # If only the token files are here, as on another machine, nothing can be compared.
        known = there is None or CorpusManifest.exists(cfg.corpus_dir)
        now = selection_key(cfg.clean, CorpusManifest.read(cfg.corpus_dir)) if known else there
    if there != now:
        names = [f"selection-{key[:8]}" if key else "no selection" for key in (there, now)]
        raise ConfigError(
            "other documents were removed from the token files than the section `clean` removes",
            where=path,
            why=f"{names[0]} there, {names[1]} now",
            next="dtt tokenize with the same options encodes them again",
        )


def removed_of_run(cfg: RunConfig) -> dict[str, SelectionFacts]:
    """Return the facts about removed documents, for each source of a run with some."""
    if cfg.data.reads_text:
        selection = open_selection(cfg.clean, read_corpus(cfg), cfg.corpus_dir)
        found = {"text": selection and selection.facts()}
    else:
        made_by_dtt = [s for s in cfg.token_sources if TokensManifest.is_in(s.path)]
        found = {s.label: TokensManifest.read(s.path).selection for s in made_by_dtt}
    return {name: facts for name, facts in found.items() if facts and facts.removed}


def check_described(
    download: DatasetConfig, there: CorpusDescription, folder: Path, *, next: str
) -> None:
    """Raise ConfigError if `download` names a dataset, and `there` describes other documents."""
    if not download.names_one:  # such as on a node to which only the token files were copied
        return
    differences = []
    if download.documents is not None:
        # Not the file of the class: another word in a comment of it changes no document.
        now, found = download.documents.model_dump(mode="json"), there.request
        if found is None or found.documents != now:
            was = there.source.id if found is None or found.documents is None else found.documents
            differences.append(f"documents is {was} there, {now} now")
    elif not _is_same_dataset(str(download.dataset), there.source):
        differences.append(f"dataset is {there.source.id} there, {download.dataset} now")
    for option in OPTIONS:
        now, found = getattr(download, option), there.resolved(option)
        asked = found if there.request is None else getattr(there.request, option)
        # What is found without being asked for (the column `text`) may also be asked for.
        if now in (found, asked):
            continue
        # Folders of earlier versions do not record what was asked for.
        if there.request is None and (now in (None, "auto") or found is None):
            continue
        differences.append(f"{option} is {_shown(asked)} there, {_shown(now)} now")
    if differences:
        raise ConfigError(
            "the folder was made from other documents than the configuration describes",
            where=folder,
            why="; ".join(f"download.{difference}" for difference in differences),
            next=next,
        )


def _is_same_dataset(dataset: str, source: CorpusSource) -> bool:
    if source.kind != "local":
        return dataset == source.id
    from dtt.data.corpus.local_files import real_path  # imports pyarrow, slow on a login node

    here, there = Path(dataset).expanduser(), Path(source.id)
    if here.exists() and there.exists():
        return real_path(here) == there or _samples(here) == _samples(there)
    # The text was moved together with the project, or is not on this machine.
    return here.name == there.name


def _samples(path: Path) -> dict[str, tuple[int, bytes]]:
    """Return the size, and a hash of both ends, of each file.

    They are equal for a copy of a project, whose data has moved with it. Hashing terabytes of text
    at each start would take hours.
    """
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    found = {}
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as stream:
            ends = stream.read(SAMPLED)
            stream.seek(max(0, size - SAMPLED))
            ends += stream.read(SAMPLED)
        found[str(file.relative_to(path.parent))] = size, sha256(ends).digest()
    return found


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return str(list(value)) if value else "not set"
    return "not set" if value is None else str(value)
