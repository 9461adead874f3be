"""Local files and folders as a corpus: found, not copied."""

from __future__ import annotations

import re
from pathlib import Path

from dtt.data.formats import file_format
from dtt.errors import InputError
from dtt.runtime.log import log

SPLIT_NAMES = {"val": "validation", "valid": "validation", "dev": "validation"}


def local_files(dataset: Path, split: str | None) -> list[Path]:
    """The files of `dataset` (a file, or a folder with all below it) that hold documents.

    Hidden files and files of unknown formats are left out, and with `split` those whose path has
    no such word: `train` takes `train-00000-of-7.parquet` and `train/a.txt`. Sorted by path.
    """
    folder = dataset.parent if dataset.is_file() else dataset
    found = [dataset.resolve()] if dataset.is_file() else _files_below(dataset)
    known = [path for path in found if file_format(path)]
    if known and len(known) < len(found):
        others = [path.name for path in found if not file_format(path)]
        log.info(
            "left out %d files of other formats: %s%s",
            len(others),
            ", ".join(others[:3]),
            " …" * (len(others) > 3),
        )
    if split is None or not known:
        return known or found
    root = folder.resolve()
    chosen = [path for path in known if _names(path, root, split)]
    if not chosen:
        raise InputError(
            f"no file of {dataset} is of split {split!r}",
            why=f"files are chosen by a word in their path; found {known[0].name}, …",
            next="leave --split out to take every file",
        )
    return chosen


def _files_below(folder: Path) -> list[Path]:
    return sorted(
        path.resolve()
        for path in folder.rglob("*")
        if path.is_file() and not _is_hidden(path.relative_to(folder))
    )


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def _names(path: Path, root: Path, split: str) -> bool:
    inside = path.relative_to(root) if path.is_relative_to(root) else Path(path.name)
    words = re.split(r"[^a-z]+", str(inside).lower())
    wanted = SPLIT_NAMES.get(split.lower(), split.lower())
    return any(SPLIT_NAMES.get(word, word) == wanted for word in words)
