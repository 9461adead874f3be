"""Discovery of local files and folders as a corpus; files are not copied."""

from __future__ import annotations

import os
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from pathlib import Path

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

HIDDEN = {
    False: "hidden, or named _…; name one with -d to read it",
    True: "hidden; a pattern of download.include with a leading dot reads it",
}
"""The reason to leave out hidden files, without and with `download.include`."""


LeftOut = dict[str, list[str]]
"""Files, and folders (with a slash), that were found but left out, by reason."""


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
    left_out: LeftOut = defaultdict(list)
    folder = dataset if dataset.is_dir() else dataset.parent
    if dataset.is_dir():
        found = list(_files_below(dataset, left_out, patterns))
    else:
        name = dataset.name
        chosen_itself = not patterns.excludes(name) and patterns.includes(name)
        found = [dataset] if dataset.is_file() and chosen_itself else []
    patterns.check_all_matched(str(dataset))
    chosen = files_of_split(found, folder, str(dataset), split, patterns, left_out)
    files = sorted(_once(chosen, folder, left_out))
    report_left_out(left_out)
    if split is None:
        warn_of_held_out(chosen, folder)
    for path in files:
        _check_is_utf8(path)
    return files


def files_of_split(
    found: list[Path],
    folder: Path,
    dataset: str,
    split: str | None,
    patterns: FilePatterns,
    left_out: LeftOut,
) -> list[Path]:
    """Return the files of known formats, or all if none is known, that belong to `split`.

    Raises InputError if no file belongs to it.
    """
    known = [path for path in found if patterns.format_of(path)]
    if known:
        for path in found:
            if not patterns.format_of(path):
                left_out["files of other formats"].append(path.name)
    chosen = [path for path in known if split is None or _has_word(path, folder, split)]
    if known and not chosen:
        report_left_out(left_out)
        raise InputError(
            f"no file of {dataset} belongs to split {split!r}",
            why=f"files are chosen by a word in their path; found {known[0].name}, …",
            next="omit download.split to use every file",
        )
    return chosen or found


def warn_of_held_out(paths: list[Path], folder: Path) -> None:
    """Log the number of files whose path names a held-out split, beside files of no such split.

    From the Hub, only the split `train` is read; a copy of the same data set would otherwise train
    on its test questions unseen.
    """
    # Words in the names of other files, such as sources, say nothing about splits.
    paths = [path for path in paths if file_format(path)]
    found = {name: [path for path in paths if _has_word(path, folder, name)] for name in HELD_OUT}
    held_out = {path for many in found.values() for path in many}
    if not held_out or len(held_out) == len(paths):
        return
    train = any(_has_word(path, folder, "train") for path in paths)
    counts = ", ".join(f"{len(many)} of {name}" for name, many in found.items() if many)
    log.warning(
        "%d of %d files are named like held-out splits (%s), such as %s, and are read, too; "
        "next: %s",
        len(held_out), len(paths), counts, _name(min(held_out), folder),
        "download.split=train" if train else "download.exclude leaves files out",
    )  # fmt: skip


def report_left_out(left_out: LeftOut) -> None:
    """Log a line for each reason: the number of files and the first names."""
    for reason, names in left_out.items():
        shown = ", ".join(sorted(names)[:LEFT_OUT_SHOWN])
        log.info(
            "left out %d: %s: %s%s", len(names), reason, shown, " …" * (len(names) > LEFT_OUT_SHOWN)
        )


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
            left_out["links to folders that are already read"].append(_name(here, folder) + "/")
            continue
        seen.add(real)
        with os.scandir(here) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                path = here / entry.name
                is_link = entry.is_symlink()
                is_folder = path.is_dir() if is_link else entry.is_dir()
                name = _name(path, folder) + "/" * is_folder
                if patterns.excludes(name):
                    left_out["matched by download.exclude"].append(name)
                elif patterns.skips(entry.name):
                    left_out[HIDDEN[patterns.chooses]].append(name)
                elif is_folder:
                    (linked if is_link else pending).append(path)
                elif path.is_file() if is_link else entry.is_file():
                    if patterns.includes(name):
                        yield path
                    else:
                        left_out["not matched by download.include"].append(name)
                else:
                    left_out["not regular files (broken links, pipes, …)"].append(name)


def _once(paths: Iterable[Path], folder: Path, left_out: LeftOut) -> Iterator[Path]:
    """Yield each file once, even if several links point to it."""
    seen: set[str] = set()
    for path in sorted(paths, key=os.path.islink):  # a file's own name comes before links to it
        real = os.path.realpath(path)
        if real in seen:
            left_out["links to files that are already read"].append(_name(path, folder))
        else:
            seen.add(real)
            yield real_path(path)


def _check_is_utf8(path: Path) -> None:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise InputError(
            "the name of a file is not UTF-8",
            where=ascii(str(path)),
            why="manifests are UTF-8, and could not name it",
        ) from None


def _name(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder))


def _has_word(path: Path, folder: Path, split: str) -> bool:
    words = re.split(r"[^a-z]+", _name(path, folder).lower())
    wanted = SPLIT_NAMES.get(split.lower(), split.lower())
    return any(SPLIT_NAMES.get(word, word) == wanted for word in words)
