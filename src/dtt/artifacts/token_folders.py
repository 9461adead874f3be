"""Sources of token files of a run, with the folders that patterns match, and files of shards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dtt.artifacts.manifests import TokenShard, TokensManifest
from dtt.base.errors import ConfigError, InputError
from dtt.config.run import RunConfig
from dtt.config.sources import AnySource, SourceConfig

INDEXES = (".idx", ".ds")
"""Endings of the files that mark a folder as token files of Megatron or datatrove. Files of bare
ids have no mark: any `.bin` or `.npy` below a folder would be one."""


class MatchedSource(SourceConfig):
    """A folder that a pattern in `data.sources` matches."""

    entry: str
    """Label of the entry with the pattern, to whose folders its weight belongs."""


def token_sources(cfg: RunConfig, home: Path = Path()) -> tuple[SourceConfig, ...]:
    """Return those of `all_sources` that are token files."""
    return tuple(s for s in all_sources(cfg, home) if isinstance(s, SourceConfig))


def all_sources(cfg: RunConfig, home: Path = Path()) -> tuple[AnySource, ...]:
    """Return the sources that `train` reads; a pattern is replaced by the folders it matches now.

    Their paths start from `home`, and those of a pattern are in the order of their names. Raises
    InputError for a pattern without folders, and ConfigError for two sources of one name.
    """
    found: list[AnySource] = []
    for source in cfg.sources:
        if not isinstance(source, SourceConfig):
            found.append(source)
        elif source.is_pattern:
            found += _matches(source, home)
        else:
            found.append(source.model_copy(update={"path": home / source.path}))
    known: dict[str, object] = {}
    for source in found:
        if source.label in known:
            raise ConfigError(
                f"two sources are called {source.label}",
                where="data.sources",
                why=f"{known[source.label]} and {source.place}",
                next="give each entry a name, which begins the names of all folders of a pattern",
            )
        known[source.label] = source.place
    return tuple(found)


def token_paths(cfg: RunConfig, home: Path = Path()) -> tuple[Path, ...]:
    """Return the paths of all token files that `train` reads, including held-out ones."""
    sources = all_sources(cfg, home)
    paths = [source.path for source in sources if isinstance(source, SourceConfig)]
    return (*paths, *(home / s.validation for s in sources if isinstance(s.validation, Path)))


def find_token_folders(root: Path) -> dict[str, Path]:
    """Return the token folders below `root`, and itself as `.`, by their path from it, sorted.

    Links are followed. Names with a leading dot are left out. Raises InputError for what cannot be
    read: a folder without permission, a link that leads nowhere, an incomplete token folder; and
    ConfigError for a folder that links give two names.
    """
    found = {path.relative_to(root).as_posix(): path for path in _token_folders(root)}
    real: dict[str, str] = {}
    for name in sorted(found):
        # Such as a link `latest`: its text would count twice.
        if (other := real.setdefault(os.path.realpath(found[name]), name)) != name:
            raise ConfigError(
                f"a token folder has two names below {root}: {other} and {name}",
                where=found[name],
                why="a link leads to it, so that its text would count twice",
                next="remove the link, or list the folders in data.sources",
            )
    return dict(sorted(found.items()))


def _matches(source: SourceConfig, home: Path) -> list[MatchedSource]:
    root = home / source.folder
    if not root.is_dir():
        raise _no_match(source, f"there is no folder {root}")
    folders = find_token_folders(root)
    if "." in folders:
        raise ConfigError(
            f"{source.path} is for folders of token folders",
            where=root,
            why="it is a token folder itself",
            next=f"data.sources=[{{path: {source.folder}}}], or move it one level down",
        )
    if not folders:
        raise _no_match(source, "no folder below it has a manifest of dtt, or .idx or .ds files")
    prefix = f"{source.name}/" if source.name else ""
    return [
        MatchedSource(path=path, name=prefix + name, weight=source.weight, entry=source.label)
        for name, path in folders.items()
    ]


def _no_match(source: SourceConfig, why: str) -> InputError:
    return InputError(
        f"no token folders match {source.path}",
        where="data.sources",
        why=why,
        next=f"`dtt tokenize tokenize.out={source.folder / 'NAME'}` writes one there; or specify "
        "another folder, data.sources=[{path: FOLDER/**}]",
    )


def _token_folders(folder: Path, above: tuple[str, ...] = ()) -> Iterator[Path]:
    """Yield `folder` and the folders below it that hold token files; `above` are its parents."""
    try:
        with os.scandir(folder) as entries:
            inside = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise InputError(f"cannot read {folder}", why=error.strerror) from None
    if _holds_tokens(folder, {entry.name for entry in inside}):
        yield folder
    here = (*above, os.path.realpath(folder))
    for entry in inside:
        # The type of an entry is known from the listing: no request to the file server for each
        # of ten thousand shards.
        if entry.is_symlink() and not os.path.exists(entry.path):  # noqa: PTH110
            raise InputError(
                "a link leads nowhere",
                where=entry.path,
                why=f"it leads to {os.readlink(entry.path)}",  # noqa: PTH115
                next="restore that, or remove the link to leave it out",
            )
        if entry.is_dir() and os.path.realpath(entry.path) not in here:  # no cycles
            yield from _token_folders(Path(entry.path), here)


def _holds_tokens(folder: Path, names: set[str]) -> bool:
    if TokensManifest.filename in names and TokensManifest.is_in(folder):
        return True
    # Without its manifest it would pass for a folder of Megatron, with a part of its shards.
    if (folder / TokensManifest.work).is_dir():
        raise InputError(
            "a token folder is not complete",
            where=folder,
            why="`dtt tokenize` has not finished, or is still running",
            next="run it to the end, or move the folder elsewhere",
        )
    return any(name.endswith(INDEXES) for name in names)


ID_BYTES = {"uint16": 2, "int32": 4}
"""Bytes of a token id by the dtype of token files."""


class ShardFile(NamedTuple):
    """A file of a shard, as the manifest records it."""

    path: Path
    bytes: int
    sha256: str


def files_of(stem: Path, shard: TokenShard, dtype: str) -> Iterator[ShardFile]:
    """Yield the files of a shard whose ids have `dtype`; `stem` is their path without suffix."""
    counts = shard.counts
    for suffix, size, sha256 in (
        (".bin", counts.tokens * ID_BYTES[dtype], shard.bin_sha256),
        (".idx", index_bytes(counts.documents, counts.documents + 1), shard.idx_sha256),
        (".mask", counts.tokens, shard.mask_sha256),
    ):
        if sha256 is not None:
            yield ShardFile(stem.with_name(stem.name + suffix), size, sha256)


def index_bytes(sequences: int, entries: int) -> int:
    """Return the size of an index file in bytes; dtt.data.token_file documents the format."""
    return 34 + 12 * sequences + 8 * entries
