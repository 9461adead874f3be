"""Choice of the files of a dataset by `download.include` and `download.exclude`, and their format.

The patterns are those of .gitignore, which most users know, and which find `**/*.md` in the folder
itself, too. `fnmatch`, and thus `allow_patterns` of `huggingface_hub`, would not.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from pathspec import GitIgnoreSpec

from dtt.artifacts.corpus import FileFormat
from dtt.base.errors import ConfigError, InputError
from dtt.config.data import DownloadConfig
from dtt.data.corpus.encodings import is_binary
from dtt.data.corpus.formats import KNOWN, METADATA, file_format
from dtt.data.corpus.streams import is_compressed

Key = Literal["include", "exclude"]

HIDDEN = {
    False: "hidden, or named _…; name one with -d to read it",
    True: "hidden; a pattern of download.include with a leading dot reads it",
}
"""The reason to leave out hidden files, without and with `download.include`."""


class FilePatterns:
    """The patterns of a configuration, and which of them have matched something.

    Names are relative to the folder or repository, with slashes.
    """

    def __init__(self, cfg: DownloadConfig) -> None:
        """Compile the patterns.

        Raises ConfigError for a pattern that is not valid.
        """
        self._patterns: dict[Key, tuple[str, ...]] = {
            "include": cfg.include,
            "exclude": cfg.exclude,
        }
        pairs = [(key, one) for key, many in self._patterns.items() for one in many]
        self._specs = {pair: _compiled(*pair) for pair in pairs}
        self._unused = set(pairs)
        self._hidden = {
            pattern
            for pattern in cfg.include
            if any(part.startswith(".") for part in pattern.split("/"))
        }

    @property
    def chooses(self) -> bool:
        """True if `include` chooses the files; then a file of an unknown ending is text."""
        return bool(self._patterns["include"])

    def left_out(self, name: str) -> str | None:
        """Return why a file, or a folder (with a slash at the end), is left out; None if not.

        As in a shell, `*` does not match a leading dot. A leading underscore hides a file only
        without `include`: `**/*.py` must find `__init__.py`.
        """
        if self.excludes(name):
            return "matched by download.exclude"
        last = name.rstrip("/").rpartition("/")[2]
        if (last.startswith(".") and not self._hidden) or (
            last.startswith("_") and not self.chooses
        ):
            return HIDDEN[self.chooses]
        if not name.endswith("/") and not self.includes(name):
            return "not matched by download.include"
        return None

    def excludes(self, name: str) -> bool:
        """Return True if `exclude` matches a file, or a folder, whose name ends with a slash."""
        return self._matches("exclude", self._patterns["exclude"], name)

    def includes(self, name: str) -> bool:
        """Return True if `include` matches a file, or is not set."""
        if not self.chooses:
            return True
        path = Path(name)
        if path.name in METADATA:
            return False
        hidden = any(part.startswith(".") for part in path.parts)
        return self._matches("include", self._hidden if hidden else self._patterns["include"], name)

    def format_of(self, path: Path) -> FileFormat | None:
        """Return the format of a file that was chosen, or None if dtt does not support it."""
        return file_format(path) or ("txt" if self.chooses else None)

    def _matches(self, key: Key, patterns: Iterable[str], name: str) -> bool:
        # Without a short cut: each pattern that matches something must be known.
        found = {(key, one) for one in patterns if self._specs[key, one].match_file(name)}
        self._unused -= found
        return bool(found)

    def check_all_matched(self, dataset: str) -> None:
        """Raise ConfigError if a pattern has matched nothing in `dataset`."""
        for key, pattern in self._specs:
            if (key, pattern) in self._unused:
                raise ConfigError(
                    f"no file of {dataset} matches {pattern!r}",
                    where=f"download.{key}",
                    why="patterns are those of .gitignore, relative to the folder, and exclude is "
                    "applied first",
                )

    def refuse_binary(self, paths: Sequence[Path]) -> None:
        """Raise InputError for a file that is not text, among those that `include` chose as text.

        Files whose ending is known are not checked: their readers report what they cannot use.
        """
        foreign = [path for path in paths if self.chooses and file_format(path) is None]
        binary = [path for path in foreign if is_binary(path)]
        if not binary:
            return
        path, more = binary[0], f", and so do {len(binary) - 1} others" if binary[1:] else ""
        raise InputError(
            "download.include matches a file that is not text",
            where=path,
            why=f"it contains NUL bytes{more}",
            next=f"{_pattern('exclude', path)} leaves such files out; or convert them to UTF-8 "
            "text first",
        )


def one_format(
    paths: Iterable[Path], dataset: str, patterns: FilePatterns, *, inspects: bool = False
) -> FileFormat:
    """Return the format that all `paths` share; files of unsupported formats are ignored.

    Raises InputError if dtt supports none of the formats, ConfigError if there are several; with
    `inspects`, its remedy is for `dtt data inspect`, which reads no configuration.
    """
    # Of each format the first, as messages name no more: there may be millions of files.
    by_format: dict[FileFormat, Path] = {}
    shown: list[Path] = []
    arrow = False
    for path in paths:
        shown += [path][: 3 - len(shown)]
        arrow = arrow or path.suffix == ".arrow"
        if (found := patterns.format_of(path)) is not None:
            by_format.setdefault(found, path)
    if not by_format and arrow:
        raise InputError(
            f"{dataset} was written by save_to_disk of `datasets`",
            why="dtt does not read .arrow files",
            next='write Parquet: python -c "from datasets import load_from_disk as load; '
            f"load('{dataset}').to_parquet('NEW.parquet')\"; of several splits, "
            f"load('{dataset}')['train']",
        )
    if not by_format:
        raise InputError(
            f"no file of {dataset} has a format that dtt reads",
            why=f"found {', '.join(path.name for path in shown)}" if shown else "no file at all",
            next=f"use {KNOWN}"
            + (f"; text of another ending: {_pattern('include', shown[0])}" if shown else ""),
        )
    if len(by_format) > 1:
        one = shlex.quote(str(shown[0]))
        raise ConfigError(
            f"{dataset} mixes formats",
            why=", ".join(f"{path.name} is {name}" for name, path in by_format.items()),
            next=f"inspect files of one format, such as: dtt data inspect {one}"
            if inspects
            else f"{_pattern('include', next(iter(by_format.values())))} reads such files alone; "
            "download.datasets with an entry for each kind of file reads them all",
        )
    return next(iter(by_format))


def _compiled(key: Key, pattern: str) -> GitIgnoreSpec:
    # In .gitignore, `!` takes a file back from the patterns before it, so their order would count.
    if pattern.startswith("!"):
        raise ConfigError(
            f"a pattern begins with an exclamation mark: {pattern!r}",
            where=f"download.{key}",
            next=f"download.exclude leaves files out; for a name that begins with it: \\{pattern}",
        )
    # pathspec 1.1 takes a final `**/` for all files; for git it means folders only.
    pattern = re.sub(r"(^|/)\*\*/$", r"\1**/*/", pattern)
    try:
        return GitIgnoreSpec.from_lines([pattern])
    except (ValueError, re.error) as error:
        why = str(error).splitlines()[0]
        raise ConfigError(
            f"{pattern!r} is not a pattern", where=f"download.{key}", why=why
        ) from None


def _pattern(key: Key, path: Path) -> str:
    """Return the argument that sets `key` to the pattern of the ending of `path`.

    That is the last suffix with that of a compression, or the name if it has none.
    """
    ending = "".join(path.suffixes[-1 - is_compressed(path) :]) or path.name
    escaped = re.sub(r"([\\*?\[\] ])", r"\\\1", ending)
    return f'"download.{key}={[f"**/*{escaped}"]}"'
