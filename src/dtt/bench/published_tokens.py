"""Download of published token files, whose hashes are recorded once and checked ever after.

    data/bench/NAME/
      fineweb_train_000001.bin …   the files, as published
      tokenizer.json               the tokenizer that made them
      published.json               repository, commit, and size and sha256 of each file

A file whose size and modification time have not changed since it was last hashed is not hashed
again.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Literal

from dtt.artifacts.corpus import CorpusFile
from dtt.artifacts.manifest import Manifest
from dtt.base.errors import ConfigError, DamagedError, InputError
from dtt.base.files import check_space, exclusive, sha256_file, write_atomically
from dtt.base.log import log
from dtt.bench.recipe import PublishedTokens
from dtt.data.samples.raw_tokens import read_header

TOKENIZER = "tokenizer.json"


class PublishedManifest(Manifest):
    """The record of published token files, made at their first download."""

    filename: ClassVar[str] = "published.json"
    holds: ClassVar[str] = "published token files"
    made_by: ClassVar[str] = "dtt bench"

    format: Literal["dtt-published-1"] = "dtt-published-1"
    repo: str
    revision: str
    """Commit of the first download."""
    asked: str | None
    """Branch, tag or commit that the recipe named at the first download; null: none."""
    tokenizer: str
    """Model on the Hub that the tokenizer is from."""
    files: tuple[CorpusFile, ...]

    def names(self) -> Iterable[str]:
        """Return the names of the files."""
        return (file.path for file in self.files)


def fetch(tokens: PublishedTokens) -> PublishedManifest:
    """Download the files that are missing and verify the others; return their record.

    Raises ConfigError if the folder holds files of another repository or revision, DamagedError
    for a file that differs from its first download, InputError for token files that the recipe
    does not name, and the errors of the Hub and of `read_header`. Recorded files are never
    replaced.
    """
    folder = tokens.folder
    with exclusive(folder, "a download of token files"):
        previous = PublishedManifest.read(folder) if PublishedManifest.exists(folder) else None
        if previous is not None:
            _check_origin(tokens, previous)
        _check_names(tokens)
        recorded = {file.path: file for file in previous.files} if previous else {}
        wanted = [*tokens.names(), TOKENIZER]
        here = [name for name in wanted if name in recorded and (folder / name).is_file()]
        found = {name: _verified(folder, recorded[name], tokens) for name in here}
        missing = [name for name in wanted if name not in found]
        commit = previous.revision if previous else None
        if missing:
            commit, hashes = _download(tokens, missing, commit)
            for name, sha256 in hashes.items():
                found[name] = _record(folder / name, sha256)
                if name in recorded:
                    _check_hash(folder, recorded[name], sha256, tokens)
        files = tuple(found[name] for name in wanted)
        assert commit is not None, "a first download has missing files"
        asked = previous.asked if previous else tokens.revision
        manifest = PublishedManifest(
            repo=tokens.repo, revision=commit, asked=asked, tokenizer=tokens.tokenizer, files=files
        )
        if manifest != previous:
            write_atomically(folder / PublishedManifest.filename, manifest.dump())
        return manifest


def _check_origin(tokens: PublishedTokens, previous: PublishedManifest) -> None:
    """Raise ConfigError if the recorded files are not those that a recipe names."""
    asked, has = tokens.revision, previous.revision
    # A branch or tag is resolved only once: what it points to may change.
    same = asked in (previous.asked, has)
    origin = (tokens.repo, tokens.tokenizer)
    if not same or origin != (previous.repo, previous.tokenizer):
        raise ConfigError(
            "the folder holds other published token files",
            where=tokens.folder,
            why=f"it contains {previous.repo} at {has} with the tokenizer of {previous.tokenizer}, "
            f"and the recipe names {tokens.repo}{f' at {asked}' if asked else ''} with that of "
            f"{tokens.tokenizer}",
            next=f"mv {tokens.folder} ANOTHER, then run the same command again",
        )


def _check_names(tokens: PublishedTokens) -> None:
    """Raise InputError for token files that the recipe does not name: they would be trained on."""
    names = set(tokens.names())
    others = sorted(path for path in tokens.folder.glob("*.bin") if path.name not in names)
    if others:
        raise InputError(
            "the folder has token files that the recipe does not name",
            where=tokens.folder,
            why=f"runs would train on {others[0].name} ({len(others)} such files)",
        )


def _download(
    tokens: PublishedTokens, missing: list[str], commit: str | None
) -> tuple[str, dict[str, str]]:
    """Download files; return the commit and the sha256 of each file.

    Without a `commit`, it is that of the revision of the recipe.
    """
    from dtt.data.corpus import hub  # slow to import, and not needed when all files are there

    folder, hashes, recorded = tokens.folder, {}, commit
    commit = commit or hub.pin(tokens.repo, tokens.revision)
    names = [name for name in missing if name != TOKENIZER]
    if names:
        try:
            remote = hub.files_named(tokens.repo, names, commit)
        except ConfigError:  # no such revision
            if recorded is None:
                raise
            raise ConfigError(
                "the revision of the first download is gone",
                where=folder,
                why=f"{tokens.repo} has no revision {recorded} any more, and {names[0]} is missing",
                next=f"restore that file, or mv {folder} ANOTHER and run the same command again, "
                "for the revision of today",
            ) from None
        left = sum(file.bytes for file in remote if not (folder / file.path).is_file())
        check_space(folder, left, tokens.repo)
        log.info("%s at %s: %d files", tokens.repo, commit[:12], len(remote))
        hashes = dict(zip(names, hub.fetch(tokens.repo, commit, remote, folder), strict=True))
        for name in names:
            _check_format(folder / name)
    if TOKENIZER in missing:
        content = hub.fetch_tokenizer(tokens.tokenizer, None).read_bytes()
        write_atomically(folder / TOKENIZER, content)
        hashes[TOKENIZER] = sha256_file(folder / TOKENIZER)
    return commit, hashes


def _check_format(path: Path) -> None:
    """Raise an error unless a file has a header of llm.c that agrees with its size."""
    header = read_header(path, "uint16")
    if header.format != "llm.c":
        raise InputError(
            "a published token file has no header of llm.c",
            where=path,
            why=f"its first number is not 20240520, so it would be read as {header.format}",
            next="check the names in tokens.files of the recipe",
        )


def _verified(folder: Path, record: CorpusFile, tokens: PublishedTokens) -> CorpusFile:
    """Return the record of a file with its current time; raise DamagedError if it has changed."""
    stat = (folder / record.path).stat()
    if (stat.st_size, stat.st_mtime_ns) == (record.bytes, record.mtime_ns):
        return record
    sha256 = sha256_file(folder / record.path)
    _check_hash(folder, record, sha256, tokens)
    return _record(folder / record.path, sha256)


def _check_hash(folder: Path, record: CorpusFile, sha256: str, tokens: PublishedTokens) -> None:
    if sha256 != record.sha256:
        path = folder / record.path
        raise DamagedError(
            "a published token file differs from its first download",
            where=path,
            why=f"its sha256 is {sha256}, and that of the first download was {record.sha256}",
            next=f"rm {path}, then run the same command again: it is downloaded from {tokens.repo}",
        )


def _record(path: Path, sha256: str) -> CorpusFile:
    stat = path.stat()
    return CorpusFile(path=path.name, bytes=stat.st_size, sha256=sha256, mtime_ns=stat.st_mtime_ns)
