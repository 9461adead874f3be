"""Files of a corpus behind URLs: their choice by the rules of local folders, and their download."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from threading import Lock

from dtt.artifacts.corpus import CorpusFile
from dtt.base.errors import DamagedError, InputError
from dtt.base.files import check_space, remove, sha256_file
from dtt.base.log import log, progress
from dtt.base.object_store import ObjectStore, StoredObject
from dtt.base.safe_names import checked_name
from dtt.data.corpus.file_choice import FilePatterns
from dtt.data.corpus.local_files import (
    LeftOut,
    files_of_split,
)

PARALLEL_FILES = 8
PARTS = ".parts"
"""Folder of what is being fetched, each under a hash of its URL, version and size."""


@dataclass(frozen=True, slots=True)
class RemoteCorpusFile:
    """A chosen object, and its path in the corpus folder."""

    store: ObjectStore
    object: StoredObject
    path: str

    @property
    def part(self) -> str:
        """The name of its incomplete file: that of another version is another."""
        facts = [self.store.url, self.object.path, self.object.version, self.object.bytes]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def remote_files(
    urls: tuple[str, ...], dataset: str, split: str | None, patterns: FilePatterns
) -> list[RemoteCorpusFile]:
    """List the objects of `urls` and return the chosen ones, sorted by path.

    Of several URLs, paths begin with what follows `://`. Raises the errors of `local_files`, and
    InputError for two objects of one path.
    """
    left_out = LeftOut()
    chosen = files_of_split(
        _chosen(_listed(urls), patterns, left_out),
        lambda file: Path(file.path), dataset, split, patterns, left_out,
    )  # fmt: skip
    chosen.sort(key=lambda file: file.path)
    for one, other in pairwise(chosen):
        if one.path == other.path:
            raise InputError(f"two objects of {dataset} have the path {one.path}")
    return chosen


def _listed(urls: tuple[str, ...]) -> Iterator[RemoteCorpusFile]:
    """Yield the objects of `urls` while they are listed."""
    for url in urls:
        log.info("listing %s", url)
        store = ObjectStore(url)
        below = store.url.partition("://")[2].partition("?")[0]
        for entry in store.objects():
            # Of a URL that names an object, its name is the last part.
            folder = below.rpartition("/")[0] if entry.path == store.root else below
            path = f"{folder}/{entry.name}" if len(urls) > 1 else entry.name
            yield RemoteCorpusFile(store, entry, checked_name(path, Path(url)))


def _chosen(
    files: Iterable[RemoteCorpusFile], patterns: FilePatterns, left_out: LeftOut
) -> Iterator[RemoteCorpusFile]:
    """Yield what the patterns choose, as `local_files` chooses below a folder."""
    closed: dict[str, bool] = {"": False}

    def is_left_out(name: str) -> bool:
        if reason := patterns.left_out(name):
            left_out.add(reason, name)
        return reason is not None

    def is_closed(folder: str) -> bool:
        if folder not in closed:
            closed[folder] = is_closed(folder.rpartition("/")[0]) or is_left_out(folder + "/")
        return closed[folder]

    for file in files:
        if not is_closed(file.path.rpartition("/")[0]) and not is_left_out(file.path):
            yield file


def fetch(
    files: list[RemoteCorpusFile],
    known: Mapping[str, CorpusFile],
    intact: Container[str],
    folder: Path,
    dataset: str,
) -> list[str]:
    """Download `files` into `folder`, in parallel; return their sha256.

    `known` has the records of an earlier download by path, and `intact` the paths that need not be
    fetched. What an interrupted download left of the same version is continued, and no file gets
    its name before all are complete.
    """
    for file in files:
        record = known.get(file.path)
        if record is not None and record.version != file.object.version:
            raise DamagedError(
                "an object changed since this corpus was downloaded",
                where=f"{file.store.url}: {file.object.name}",
                why=f"version {record.version} then, {file.object.version} now",
                next="download.out=FOLDER reads its present state into another corpus",
            )
    missing = [file for file in files if file.path not in intact]
    parts = folder / PARTS
    parts.mkdir(exist_ok=True)
    there = {entry.name: entry.stat().st_size for entry in os.scandir(parts)}
    for name in there.keys() - {file.part for file in missing}:
        remove(parts / name)
    needed = sum(file.object.bytes - there.get(file.part, 0) for file in missing)
    check_space(folder, needed, dataset)
    lock = Lock()
    with progress(f"downloading {dataset}", needed) as advance:

        def bring(file: RemoteCorpusFile) -> str:
            for count in file.store.download(file.object, parts / file.part):
                with lock:
                    advance(count)
            return sha256_file(parts / file.part)

        with ThreadPoolExecutor(PARALLEL_FILES) as pool:
            futures = {file.path: pool.submit(bring, file) for file in missing}
            try:
                hashes = {path: future.result() for path, future in futures.items()}
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    for file in missing:
        (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
        (parts / file.part).replace(folder / file.path)
    remove(parts)
    return [hashes.get(file.path) or known[file.path].sha256 for file in files]
