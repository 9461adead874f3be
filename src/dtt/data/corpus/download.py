"""Download of raw documents into a corpus folder: from the Hub, URLs, local files or Python's
library.

Files are stored unmodified. Files that the manifest already lists, and that have not changed, are
neither fetched nor read again.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

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
from dtt.data.corpus import own_documents, stdlib, stdlib_chat
from dtt.data.corpus.encodings import check_encodings
from dtt.data.corpus.file_choice import FilePatterns, one_format
from dtt.data.corpus.formats import FORMATS
from dtt.data.corpus.local_files import local_files, real_path
from dtt.data.corpus.text_columns import check_rows, find_text_column, holds_conversations


def download(cfg: DownloadConfig, out: Path, *, rows: bool = False) -> CorpusManifest:
    """Create or update the corpus folder `out` from the dataset that `cfg` names.

    Local files are not copied: the manifest refers to them where they are. With `rows`, documents
    are complete rows, such as conversations, instead of the text in one column.

    Raises InputError if there is nothing to read, ConfigError if a subset, split or column does not
    exist, if `rows` is set for text files, or if `out` contains a different corpus,
    EnvironmentUnfit if the Hub or a store cannot be reached, DamagedError if an object changes
    meanwhile, and StorageError if the disk has too little free
    space.
    """
    dataset = cfg.dataset if cfg.documents is None else cfg.documents.type
    if dataset is None:
        raise ConfigError(
            "no dataset is named",
            where="download.dataset",
            next="dtt download -d DATASET: a FILE, FOLDER, URL, ORG/NAME or python-stdlib",
        )
    with exclusive(out, "dtt download", patience_of_step()):
        _remove_torn(out)
        previous = CorpusManifest.read(out) if CorpusManifest.exists(out) else None
        kind: SourceKind = "own" if cfg.documents is not None else _kind(dataset)
        _check_options(cfg, kind)
        _check_rows(cfg, rows=rows)
        if kind == "local":
            dataset = str(real_path(Path(dataset).expanduser()))
        if previous and (previous.source.kind, previous.source.id) != (kind, dataset):
            raise ConfigError(
                "the folder holds another corpus",
                where=out,
                why=f"it contains {previous.source.id}, not {dataset}",
                next="specify another folder: download.out=FOLDER, or delete this one",
            )
        match kind:
            case "stdlib":
                manifest = _from_stdlib(dataset, out, previous)
            case "local":
                manifest = _from_local(cfg, Path(dataset), out, previous, rows=rows)
            case "own":
                manifest = _from_own(cfg, out, previous, rows=rows)
            case "url":
                manifest = _from_urls(cfg, dataset, out, previous, rows=rows)
            case _:
                manifest = _from_hub(cfg, dataset, out, previous, rows=rows)
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


def _remove_torn(out: Path) -> None:
    """Remove what killed downloads left."""
    # No other pattern: `dtt clean` may be writing into this folder.
    for name in (CorpusManifest.filename, stdlib.NAME, own_documents.PART):
        for torn in out.glob(f".{name}*.tmp"):
            torn.unlink(missing_ok=True)


def _kind(dataset: str) -> SourceKind:
    if dataset in (stdlib.NAME, stdlib_chat.NAME):
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


def _check_options(cfg: DownloadConfig, kind: str) -> None:
    """Raise ConfigError if an option is set that does not apply to this kind of dataset."""
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


def _check_rows(cfg: DownloadConfig, *, rows: bool) -> None:
    """Raise ConfigError for conversations (`rows`) if the dataset or an option is for text."""
    if rows and cfg.dataset == stdlib.NAME:
        raise ConfigError(
            f"{stdlib.NAME} contains text, not conversations",
            next=f"dtt download -d {stdlib_chat.NAME}, or files of JSON lines with messages",
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


def _from_stdlib(dataset: str, out: Path, previous: CorpusManifest | None) -> CorpusManifest:
    revision = stdlib.revision()
    if previous and previous.source.revision == revision and _unchanged(out, previous):
        return previous
    chat = dataset == stdlib_chat.NAME
    path = stdlib_chat.write_stdlib_chat(out) if chat else stdlib.write_stdlib(out)
    return CorpusManifest(
        dataset=out.resolve().name,
        source=CorpusSource(kind="stdlib", id=dataset, revision=revision),
        file_format="jsonl" if chat else "parquet",
        text_column=None if chat else "text",
        txt_documents=None,
        files=(_record(path, path.name),),
    )


def _from_own(
    cfg: DownloadConfig, out: Path, previous: CorpusManifest | None, *, rows: bool
) -> CorpusManifest:
    documents = cfg.documents
    assert documents is not None
    version, paths = own_documents.read_into(documents, out)
    known = {record.path: record for record in previous.files} if previous else {}
    files = []
    for path in paths:
        record = known.get(path.name)
        if record is None or not _is_unchanged(path, record):
            record = _record(path, path.name)
        files.append(record)
    source = CorpusSource(kind="own", id=documents.type, revision=version)
    return _manifest(cfg, source, out, tuple(files), rows=rows)


def local_manifest(path: Path) -> CorpusManifest:
    """Return a manifest of a local file or folder for inspection; nothing is hashed or written."""
    cfg = DownloadConfig()
    found = local_files(path, None)
    one_format(found, str(path), FilePatterns(cfg), inspects=True)
    files = tuple(_record(file, str(file), sha256="not hashed") for file in found)
    source = CorpusSource(kind="local", id=str(path))
    rows = holds_conversations([path / record.path for record in files if record.bytes])
    command = f"dtt download -d {shlex.quote(str(path))} "  # an inspection reads no configuration
    return _manifest(cfg, source, path, files, rows=rows, command=command)


def _from_local(
    cfg: DownloadConfig,
    dataset: Path,
    out: Path,
    previous: CorpusManifest | None,
    *,
    rows: bool,
) -> CorpusManifest:
    patterns = FilePatterns(cfg)
    found = local_files(dataset, cfg.split, patterns)
    source = _source(cfg, "local", str(dataset), split=cfg.split)
    one_format(found, str(dataset), patterns)
    found = found[: cfg.max_files]
    if patterns.chooses:
        patterns.refuse_binary(found)
    known = {record.path: record for record in previous.files} if previous else {}
    files = []
    with progress("hashing", sum(path.stat().st_size for path in found)) as advance:
        for path in found:
            record = known.get(str(path))
            if record is None or not _is_unchanged(path, record):
                record = _record(path, str(path))
            files.append(record)
            advance(record.bytes)
    return _manifest(cfg, source, out, tuple(files), rows=rows)


def _from_hub(
    cfg: DownloadConfig,
    dataset: str,
    out: Path,
    previous: CorpusManifest | None,
    *,
    rows: bool,
) -> CorpusManifest:
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
        return _manifest(cfg, source, out, previous.files, rows=rows)
    patterns = FilePatterns(cfg)
    if whole:
        remote = hub.all_files(dataset, commit)
    else:
        remote = hub.files_of_split(dataset, cfg.name, cfg.split or "train", commit)
    remote = [
        file for file in remote if not patterns.excludes(file.path) and patterns.includes(file.path)
    ][: cfg.max_files]
    patterns.check_all_matched(dataset)
    one_format([Path(file.path) for file in remote], dataset, patterns)
    log.info("%s at %s: %d files", dataset, commit[:12], len(remote))
    missing = sum(file.bytes for file in remote if not (out / file.path).is_file())
    check_space(out, missing, dataset)
    hashes = hub.fetch(dataset, commit, remote, out)
    if patterns.chooses:
        patterns.refuse_binary([out / file.path for file in remote])
    files = tuple(
        _record(out / file.path, file.path, sha256)
        for file, sha256 in zip(remote, hashes, strict=True)
    )
    return _manifest(cfg, source, out, files, rows=rows)


def _from_urls(
    cfg: DownloadConfig,
    dataset: str,
    out: Path,
    previous: CorpusManifest | None,
    *,
    rows: bool,
) -> CorpusManifest:
    """Fetch objects; those of `previous` keep the versions that it records."""
    from dtt.data.corpus.remote_files import fetch, remote_files

    source = _source(cfg, "url", dataset, split=cfg.split)
    if previous and previous.source == source and _unchanged(out, previous):
        return _manifest(cfg, source, out, previous.files, rows=rows)
    patterns = FilePatterns(cfg)
    found = remote_files(urls_of(dataset), dataset, cfg.split, patterns)
    one_format((Path(file.path) for file in found), dataset, patterns)
    found = found[: cfg.max_files]
    log.info("%s: %d files", dataset, len(found))
    known = {record.path: record for record in previous.files} if previous else {}
    intact = {path for path, record in known.items() if _is_unchanged(out / path, record)}
    hashes = fetch(found, known, intact, out, dataset)
    if patterns.chooses:
        patterns.refuse_binary([out / file.path for file in found])
    files = tuple(
        _record(out / file.path, file.path, sha256).model_copy(
            update={"version": file.object.version}
        )
        for file, sha256 in zip(found, hashes, strict=True)
    )
    return _manifest(cfg, source, out, files, rows=rows)


def _manifest(
    cfg: DownloadConfig,
    source: CorpusSource,
    out: Path,
    files: tuple[CorpusFile, ...],
    *,
    rows: bool = False,
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
        check_rows(paths)
    documents = cfg.txt_documents
    if documents == "auto":
        documents = "section" if len(files) == 1 else "file"
    return CorpusManifest(
        dataset=out.resolve().name,
        source=source,
        file_format=file_format,
        text_column=None if is_txt or rows else find_text_column(paths, cfg.text_column, command),
        txt_documents=documents if is_txt else None,
        files=files,
    )


def _record(path: Path, name: str, sha256: str | None = None) -> CorpusFile:
    stat = path.stat()
    return CorpusFile(
        path=name,
        bytes=stat.st_size,
        sha256=sha256 or sha256_file(path),
        mtime_ns=stat.st_mtime_ns,
    )


def _is_unchanged(path: Path, record: CorpusFile) -> bool:
    if not path.is_file():
        return False
    stat = path.stat()
    return (stat.st_size, stat.st_mtime_ns) == (record.bytes, record.mtime_ns)


def _unchanged(out: Path, manifest: CorpusManifest) -> bool:
    return all(_is_unchanged(out / record.path, record) for record in manifest.files)
