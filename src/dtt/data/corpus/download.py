"""`dtt download`: raw documents in a corpus folder, from the Hub, URLs, local files, Python's
library or a class of the user's own.

Files are stored unmodified. Files that the manifest already lists, and that have not changed, are
neither fetched nor read again.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from dtt.artifacts.corpus import (
    CorpusFile,
    CorpusManifest,
    CorpusRequest,
    CorpusSource,
    SourceKind,
)
from dtt.base.errors import ConfigError, InputError
from dtt.base.files import (
    check_space,
    exclusive,
    patience_of_step,
    remove,
    sha256_file,
    write_atomically,
)
from dtt.base.log import log, progress
from dtt.base.object_store import urls_of
from dtt.config.data import DownloadConfig
from dtt.config.run import RunConfig
from dtt.data.corpus import own_documents, stdlib
from dtt.data.corpus.encodings import check_encodings
from dtt.data.corpus.file_choice import FilePatterns, one_format
from dtt.data.corpus.formats import FORMATS
from dtt.data.corpus.local_files import local_files, real_path
from dtt.data.corpus.text_columns import columns_of_all, find_text_column, holds_conversations

Found = tuple[CorpusSource, Sequence[CorpusFile]]
"""The origin of documents, and their files."""


def run(cfg: RunConfig) -> None:
    """Create each corpus that the `download` section describes, and print a summary."""
    for one in cfg.corpora:
        out = one.corpus_dir
        manifest = download(one.download, out, rows=one.data.has_conversations)
        source, column = manifest.source, manifest.text_column
        documents = manifest.txt_documents or (f"column {column}" if column else "conversations")
        size = sum(file.bytes for file in manifest.files)
        print(f"corpus  {out}")
        print(f"source  {source.id}" + (f" at {source.revision}" if source.revision else ""))
        print(f"files   {len(manifest.files)} {manifest.file_format}, {size / 1e6:.1f} MB")
        print(f"text    {documents}")


def download(cfg: DownloadConfig, out: Path, *, rows: bool = False) -> CorpusManifest:
    """Create or update the corpus folder `out` from the dataset that `cfg` names.

    Local files are not copied: the manifest refers to them where they are. With `rows`, documents
    are complete rows, such as conversations, instead of the text in one column.

    Raises InputError if there is nothing to read, ConfigError if a subset, split or column does not
    exist, if `rows` is set for text files, or if `out` contains a different corpus,
    EnvironmentUnfit if the Hub or a store cannot be reached, DamagedError if an object changes
    meanwhile, and StorageError if the disk has too little free space.
    """
    dataset = cfg.dataset if cfg.documents is None else cfg.documents.type
    if dataset is None:
        raise ConfigError(
            "no dataset is named",
            where="download.dataset",
            next="dtt download -d DATASET: a FILE, FOLDER, URL, ORG/NAME or python-stdlib",
        )
    with exclusive(out, "dtt download", patience_of_step()):
        # What killed downloads left. No other pattern: `dtt clean` may be writing here.
        for name in (CorpusManifest.filename, stdlib.NAME, own_documents.PART):
            for torn in out.glob(f".{name}*.tmp"):
                torn.unlink(missing_ok=True)
        previous = CorpusManifest.read(out) if CorpusManifest.exists(out) else None
        kind: SourceKind = "own" if cfg.documents is not None else _kind(dataset)
        _check_options(cfg, kind, rows=rows)
        if kind == "local":
            dataset = str(real_path(Path(dataset).expanduser()))
        if previous and (previous.source.kind, previous.source.id) != (kind, dataset):
            raise ConfigError(
                "the folder holds another corpus",
                where=out,
                why=f"it contains {previous.source.id}, not {dataset}",
                next="specify another folder: download.out=FOLDER, or delete this one",
            )
        find = {
            "stdlib": _from_stdlib,
            "local": _from_local,
            "own": _from_own,
            "url": _from_urls,
            "hub": _from_hub,
        }
        source, files = find[kind](cfg, dataset, out, previous)
        manifest = _manifest(cfg, source, out, files, rows=rows or dataset == stdlib.CHAT_NAME)
        asked = {name: getattr(cfg, name) for name in CorpusRequest.model_fields}
        asked["documents"] = cfg.documents and cfg.documents.model_dump(mode="json")
        manifest = manifest.model_copy(update={"request": CorpusRequest(**asked)})
        if manifest == previous:
            log.info("already done: %s is complete and unchanged", out)
        else:
            write_atomically(out / CorpusManifest.filename, manifest.dump())
        if previous is not None and kind == "own":
            # Only now: until the manifest is replaced, it lists these files.
            for path in {*previous.names()} - {*manifest.names()}:
                remove(out / path)
        return manifest


def _kind(dataset: str) -> SourceKind:
    if dataset in (stdlib.NAME, stdlib.CHAT_NAME):
        return "stdlib"
    if urls_of(dataset):
        return "url"
    path = Path(dataset).expanduser()
    if path.exists():
        return "local"
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", dataset) and not path.suffix[1:].isalpha():
        return "hub"
    raise InputError(
        f"no dataset {dataset!r}",
        why="it is not a shipped dataset, a local file or folder, a URL, or a Hub id (org/name)",
        next="dtt download -d FILE, FOLDER, URL, ORG/NAME or python-stdlib",
    )


def _check_options(cfg: DownloadConfig, kind: str, *, rows: bool) -> None:
    """Raise ConfigError if an option, or `rows`, does not apply to this kind of dataset."""
    of_hub = ("name", "revision")
    foreign = {
        "hub": (),
        "own": (),
        "local": of_hub,
        "url": of_hub,
        "stdlib": (*of_hub, "split", "include", "exclude"),
    }
    for option in foreign[kind]:
        value = getattr(cfg, option)
        if value not in (None, ()):
            where = "datasets on the Hub" if option in of_hub else "folders and datasets on the Hub"
            raise ConfigError(
                f"download.{option} ({value}) applies only to {where}",
                why=f"{cfg.dataset} is none",
                next=f"set download.{option}={'null' if isinstance(value, str) else '[]'}",
            )
    if rows and cfg.dataset == stdlib.NAME:
        raise ConfigError(
            f"{stdlib.NAME} contains text, not conversations",
            next=f"dtt download -d {stdlib.CHAT_NAME}, or files of JSON lines with messages",
        )
    if rows and cfg.text_column is not None:
        raise ConfigError(
            f"download.text_column ({cfg.text_column}) is for text",
            why="data.type=chat reads complete rows",
            next="omit download.text_column",
        )


def _source(cfg: DownloadConfig, kind: SourceKind, id: str, **facts: str | None) -> CorpusSource:
    """Return the origin of files that `cfg` chooses among those of a dataset."""
    chosen = cfg.model_dump(include={"max_files", "include", "exclude"})
    return CorpusSource.model_validate({"kind": kind, "id": id, **chosen, **facts})


def _from_stdlib(
    cfg: DownloadConfig, dataset: str, out: Path, previous: CorpusManifest | None
) -> Found:
    source = CorpusSource(kind="stdlib", id=dataset, revision=stdlib.revision())
    if previous and previous.source == source and _unchanged(out, previous):
        return source, previous.files
    chat = dataset == stdlib.CHAT_NAME
    path = stdlib.write_stdlib_chat(out) if chat else stdlib.write_stdlib(out)
    return source, [_record(path, path.name)]


def _from_own(
    cfg: DownloadConfig, dataset: str, out: Path, previous: CorpusManifest | None
) -> Found:
    assert cfg.documents is not None
    version, paths = own_documents.read_into(cfg.documents, out)
    source, known = CorpusSource(kind="own", id=dataset, revision=version), _known(previous)
    return source, [_record(path, path.name, known) for path in paths]


def _from_local(
    cfg: DownloadConfig, dataset: str, out: Path, previous: CorpusManifest | None
) -> Found:
    patterns = FilePatterns(cfg)
    found = local_files(Path(dataset), cfg.split, patterns)
    one_format(found, dataset, patterns)
    found = found[: cfg.max_files]
    patterns.refuse_binary(found)
    files, known = [], _known(previous)
    with progress("hashing", sum(path.stat().st_size for path in found)) as advance:
        for path in found:
            files.append(_record(path, str(path), known))
            advance(files[-1].bytes)
    return _source(cfg, "local", dataset, split=cfg.split), files


def _from_hub(
    cfg: DownloadConfig, dataset: str, out: Path, previous: CorpusManifest | None
) -> Found:
    """Fetch a dataset from the Hub.

    `cfg.include` without a subset or split chooses among all files of the repository: `datasets`
    knows no split of text files such as .md. Keeps the commit that `previous` is pinned to, unless
    `cfg.revision` names another one.
    """
    from dtt.data.corpus import hub  # slow to import, and not needed for other sources

    log.info("looking up %s on the Hub", dataset)
    pinned = previous.source.revision if previous else None
    commit = pinned if pinned and cfg.revision in (None, pinned) else hub.pin(dataset, cfg.revision)
    whole = bool(cfg.include) and cfg.name is None and cfg.split is None
    split = None if whole else cfg.split or "train"
    source = _source(cfg, "hub", dataset, name=cfg.name, split=split, revision=commit)
    if previous and previous.source == source and _unchanged(out, previous):
        return source, previous.files
    patterns = FilePatterns(cfg)
    remote = (
        hub.all_files(dataset, commit)
        if split is None
        else hub.files_of_split(dataset, cfg.name, split, commit)
    )
    remote = [
        file for file in remote if not patterns.excludes(file.path) and patterns.includes(file.path)
    ][: cfg.max_files]
    patterns.check_all_matched(dataset)
    one_format([Path(file.path) for file in remote], dataset, patterns)
    log.info("%s at %s: %d files", dataset, commit[:12], len(remote))
    missing = sum(file.bytes for file in remote if not (out / file.path).is_file())
    check_space(out, missing, dataset)
    hashes = hub.fetch(dataset, commit, remote, out)
    patterns.refuse_binary([out / file.path for file in remote])
    pairs = zip(remote, hashes, strict=True)
    return source, [_record(out / file.path, file.path, sha256=one) for file, one in pairs]


def _from_urls(
    cfg: DownloadConfig, dataset: str, out: Path, previous: CorpusManifest | None
) -> Found:
    """Fetch objects; those of `previous` keep the versions that it records."""
    from dtt.data.corpus.remote_files import fetch, remote_files

    source = _source(cfg, "url", dataset, split=cfg.split)
    if previous and previous.source == source and _unchanged(out, previous):
        return source, previous.files
    patterns = FilePatterns(cfg)
    found = remote_files(urls_of(dataset), dataset, cfg.split, patterns)
    one_format((Path(file.path) for file in found), dataset, patterns)
    found = found[: cfg.max_files]
    log.info("%s: %d files", dataset, len(found))
    known = _known(previous)
    intact = {path for path, record in known.items() if _is_unchanged(out / path, record)}
    hashes = fetch(found, known, intact, out, dataset)
    patterns.refuse_binary([out / file.path for file in found])
    return source, [
        _record(out / file.path, file.path, sha256=sha256, version=file.object.version)
        for file, sha256 in zip(found, hashes, strict=True)
    ]


def local_manifest(path: Path) -> CorpusManifest:
    """Return a manifest of a local file or folder for inspection; nothing is hashed or written."""
    cfg = DownloadConfig()
    found = local_files(path, None)
    one_format(found, str(path), FilePatterns(cfg), inspects=True)
    files = [_record(file, str(file), sha256="not hashed") for file in found]
    source = CorpusSource(kind="local", id=str(path))
    rows = holds_conversations([path / record.path for record in files if record.bytes])
    command = f"dtt download -d {shlex.quote(str(path))} "  # an inspection reads no configuration
    return _manifest(cfg, source, path, files, rows=rows, command=command)


def _manifest(
    cfg: DownloadConfig,
    source: CorpusSource,
    out: Path,
    files: Sequence[CorpusFile],
    *,
    rows: bool,
    command: str = "",
) -> CorpusManifest:
    paths = [out / record.path for record in files if record.bytes]
    if not paths:
        raise InputError(
            f"{source.id} is empty",
            why="no file has any content",
            next="specify another file or folder with -d",
        )
    file_format = one_format(paths, source.id, FilePatterns(cfg))
    if not FORMATS[file_format].has_row_groups:
        check_encodings(paths)
    is_txt = file_format == "txt"
    if is_txt and rows:
        raise ConfigError(
            "text files contain no conversations",
            where=paths[0],
            why="data.type=chat reads rows with messages",
            next="specify a file or folder of JSON lines, Parquet or CSV",
        )
    if rows:
        columns_of_all(paths)
    documents = cfg.txt_documents
    if documents == "auto":
        documents = "section" if len(files) == 1 else "file"
    return CorpusManifest(
        dataset=out.resolve().name,
        source=source,
        file_format=file_format,
        text_column=None if is_txt or rows else find_text_column(paths, cfg.text_column, command),
        txt_documents=documents if is_txt else None,
        files=tuple(files),
    )


def _record(
    path: Path,
    name: str,
    known: Mapping[str, CorpusFile] = MappingProxyType({}),
    sha256: str | None = None,
    version: str | None = None,
) -> CorpusFile:
    """Return the record of a file; hash it, unless `sha256` is given or `known` has it by name."""
    record = known.get(name)
    if record is not None and _is_unchanged(path, record):
        return record
    stat = path.stat()
    return CorpusFile(
        path=name,
        bytes=stat.st_size,
        sha256=sha256 or sha256_file(path),
        mtime_ns=stat.st_mtime_ns,
        version=version,
    )


def _known(previous: CorpusManifest | None) -> dict[str, CorpusFile]:
    return {record.path: record for record in previous.files} if previous else {}


def _is_unchanged(path: Path, record: CorpusFile) -> bool:
    if not path.is_file():
        return False
    stat = path.stat()
    return (stat.st_size, stat.st_mtime_ns) == (record.bytes, record.mtime_ns)


def _unchanged(out: Path, manifest: CorpusManifest) -> bool:
    return all(_is_unchanged(out / record.path, record) for record in manifest.files)
