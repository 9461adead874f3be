"""Discovery of local files and folders as a corpus; files are not copied."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from dtt.base.errors import InputError
from dtt.base.log import log
from dtt.config.data import DownloadConfig
from dtt.data.corpus.file_choice import FilePatterns
from dtt.data.corpus.formats import file_format
from dtt.data.corpus.streams import is_compressed

SPLIT_NAMES = {
    "training": "train", "val": "validation", "valid": "validation", "dev": "validation",
    "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
"""Synonyms of split names, as of `datasets`."""
HELD_OUT = ("validation", "test")
LEFT_OUT_SHOWN = 3
"""Maximum number of files that are logged for each reason to leave files out."""

T = TypeVar("T")


class LeftOut:
    """The files, and folders (with a slash), that were found but left out, by reason.

    Keeps their number and the first names only: a bucket may hold millions.
    """

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, list[str]]] = {}

    def add(self, reason: str, name: str) -> None:
        """Count a file."""
        count, first = self._found.get(reason, (0, []))
        self._found[reason] = count + 1, sorted([*first, name])[:LEFT_OUT_SHOWN]

    def report(self) -> None:
        """Log a line for each reason: the number of files and the first names."""
        for reason, (count, first) in self._found.items():
            shown = ", ".join(first[:LEFT_OUT_SHOWN])
            log.info("left out %d: %s: %s%s", count, reason, shown, " …" * (count > LEFT_OUT_SHOWN))


def local_files(
    dataset: Path, split: str | None, patterns: FilePatterns | None = None
) -> list[Path]:
    """Return the files with documents in `dataset`, a file or a folder, sorted by path.

    A folder is searched recursively. Links to files and folders are followed, and each file is
    returned once. `patterns` choose the files; these are left out, too: hidden files, files whose
    name starts with `_` and files of unknown formats (both unless `include` is set), and, if
    `split` is given, files whose path does not contain it as a word: `train` selects
    `train-00000-of-7.parquet` and `train/a.txt`. The number of files left out is logged with the
    reasons.

    Raises InputError if no file belongs to `split`, or if a name is not UTF-8, and ConfigError if a
    pattern matches nothing.
    """
    patterns = patterns or FilePatterns(DownloadConfig())
    left_out = LeftOut()
    folder = dataset if dataset.is_dir() else dataset.parent
    if dataset.is_dir():
        found = list(_files_below(dataset, left_out, patterns))
    else:  # even a hidden file, as it is named
        chosen_itself = not patterns.excludes(dataset.name) and patterns.includes(dataset.name)
        found = [dataset] if dataset.is_file() and chosen_itself else []

    def below(path: Path) -> Path:
        return path.relative_to(folder)

    chosen = files_of_split(found, below, str(dataset), split, patterns, left_out)
    once: dict[str, Path] = {}
    links = LeftOut()
    for path in sorted(chosen, key=os.path.islink):  # a file's own name comes before links to it
        real = os.path.realpath(path)
        if real in once:
            links.add("links to files that are already read", str(below(path)))
        else:
            once[real] = real_path(path)
    links.report()
    for path in once.values():
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise InputError(
                "the name of a file is not UTF-8",
                where=ascii(str(path)),
                why="manifests are UTF-8, and could not name it",
            ) from None
    return sorted(once.values())


def files_of_split(
    found: Iterable[T],
    name: Callable[[T], Path],
    dataset: str,
    split: str | None,
    patterns: FilePatterns,
    left_out: LeftOut,
) -> list[T]:
    """Return the files of known formats, or all if none is known, that belong to `split`.

    `name` returns the path of a file in the dataset. Holds no file that it does not return. Logs
    what is left out, and held-out files among the chosen ones, if no split was asked for. Raises
    InputError if no file belongs to `split`, and ConfigError if a pattern matched nothing.
    """
    chosen: list[T] = []
    others: list[T] = []
    known: Path | None = None
    wanted = split and SPLIT_NAMES.get(split.lower(), split.lower())
    for file in found:
        path = name(file)
        if not patterns.format_of(path):
            others.append(file)
        else:
            known = known or path
            if wanted is None or wanted in _splits(path):
                chosen.append(file)
        if known:
            for other in others:
                left_out.add("files of other formats", name(other).name)
            others.clear()
    patterns.check_all_matched(dataset)
    left_out.report()
    if known and not chosen:
        raise InputError(
            f"no file of {dataset} belongs to split {split!r}",
            why=f"files are chosen by a word in their path; found {known.name}, …",
            next="omit download.split to use every file",
        )
    if split is None:
        _warn_of_held_out(map(name, chosen))
    return chosen or others


def _warn_of_held_out(paths: Iterable[Path]) -> None:
    """Log the number of files whose path names a held-out split, beside files of no such split.

    From the Hub, only the split `train` is read; a copy of the same data set would otherwise train
    on its test questions unseen.
    """
    files, held_out, train = 0, 0, False
    first: Path | None = None
    for path in paths:
        if not file_format(path):
            continue  # words in the names of other files, such as sources, say nothing about splits
        files += 1
        splits = _splits(path)
        train = train or "train" in splits
        if not splits.isdisjoint(HELD_OUT):
            held_out += 1
            first = min(first or path, path)
    if 0 < held_out < files:
        log.warning(
            "%d of %d files are named like held-out splits, such as %s, and are read; next: %s",
            held_out, files, first,
            "download.split=train" if train else "download.exclude leaves files out",
        )  # fmt: skip


def real_path(path: Path) -> Path:
    """Return `path` with its links resolved, unless the target's name implies a different format.

    For example, the Hub's cache links `train.jsonl.gz` to a file without any suffix.
    """
    real = path.resolve()
    kinds = [(file_format(one) or one.suffix, is_compressed(one)) for one in (real, path)]
    if kinds[0] == kinds[1]:
        return real
    return path.parent.resolve() / path.name


def _files_below(folder: Path, left_out: LeftOut, patterns: FilePatterns) -> Iterator[Path]:
    """Yield every file below `folder` that the patterns choose; hidden files are left out.

    An excluded folder is not even listed: it may be huge, or closed to this user.

    Each folder is visited once, so cycles of links terminate. Linked folders are visited last, so
    that a folder that is also reachable without a link gets its real path.
    """
    pending, linked = deque([folder]), deque[Path]()
    seen: set[str] = set()
    while pending or linked:
        here = pending.popleft() if pending else linked.popleft()
        real = os.path.realpath(here)
        if real in seen:
            name = f"{here.relative_to(folder)}/"
            left_out.add("links to folders that are already read", name)
            continue
        seen.add(real)
        with os.scandir(here) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                path = here / entry.name
                is_link = entry.is_symlink()
                is_folder = path.is_dir() if is_link else entry.is_dir()
                name = str(path.relative_to(folder)) + "/" * is_folder
                if reason := patterns.left_out(name):
                    left_out.add(reason, name)
                elif is_folder:
                    (linked if is_link else pending).append(path)
                elif path.is_file() if is_link else entry.is_file():
                    yield path
                else:
                    left_out.add("not regular files (broken links, pipes, …)", name)


def _splits(path: Path) -> set[str]:
    """Return the words of a path, synonyms of splits as their names."""
    return {SPLIT_NAMES.get(word, word) for word in re.split(r"[^a-z]+", str(path).lower())}
