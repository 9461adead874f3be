"""A mixture as a folder: links to its token files, their statistics, and Megatron's list of them.

    FOLDER/NAME          link to the token folder of the source NAME
    FOLDER/mixture.json  share, tokens, files and bytes of each source
    FOLDER/mixture.txt   the same as a table
    FOLDER/megatron.txt  `WEIGHT PREFIX …` for Megatron's --data-path

`data.sources: [{path: FOLDER/**}]` has the same sources by the same names, so that each has the
same samples in the same order.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dtt.artifacts.manifest import manifest_text
from dtt.artifacts.token_folders import find_token_folders
from dtt.base.errors import ConfigError
from dtt.base.files import fsync_folder, named, write_atomically
from dtt.config.run import RunConfig
from dtt.config.sources import Source
from dtt.data.samples.dataset import Dataset
from dtt.data.samples.token_shards import HELD_OUT
from dtt.data.samples.token_source import TokenSource
from dtt.data.token_file import idx_path

FACTS, TABLE, MEGATRON = "mixture.json", "mixture.txt", "megatron.txt"

Content = dict[str, Path | str]
"""The links (their targets) and the text files (their content) of a folder, by relative path."""


def write_mixture(cfg: RunConfig, dataset: Dataset, folder: Path) -> tuple[dict[str, Any], str]:
    """Write the mixture of `cfg` into `folder`, unless it is there; return its facts and a report.

    `dataset` was opened from `cfg`. Raises ConfigError for a mixture that such a folder cannot
    express, and for a folder that holds something else.
    """
    sources = [source for source in dataset.sources if isinstance(source, TokenSource)]
    _check(cfg, sources, folder)
    weights = dataset.mixture.phases[0].weights
    shares = [float(weight / sum(weights)) for weight in weights]
    names = {source.name for source in sources}
    # A source within the folder of another is there already: a link would be written into that
    # folder, through its link.
    outermost = [s for s in sources if not any(str(p) in names for p in Path(s.name).parents)]
    links = {name: link for s in outermost for name, link in _links(s, folder)}
    facts = {"sources": [_facts(s, share) for s, share in zip(sources, shares, strict=True)]}
    table = "\n".join(_table(facts["sources"])) + "\n"
    content: Content = {
        **links,
        FACTS: manifest_text(facts),
        TABLE: table,
        MEGATRON: " ".join(_megatron(folder, sources, shares)) + "\n",
    }
    new = not folder.exists() or not any(folder.iterdir())
    if new:
        _write(content, folder, sources)
    else:
        _check_same(content, folder)
    state = "written" if new else "unchanged"
    return {"folder": str(folder), "state": state, **facts}, f"{table}{state}  {folder}"


def _check(cfg: RunConfig, sources: Sequence[TokenSource], folder: Path) -> None:
    """Raise ConfigError for a mixture or a folder that cannot be written."""
    own = [source.type for source in cfg.sources if isinstance(source, Source)]
    if not cfg.data.reads_token_files or own:
        raise ConfigError(
            "only a mixture of token files can be written",
            where=f"data.sources: type={own[0]}" if own else f"data.type={cfg.data.type}",
            next="dtt tokenize, and data.type=tokens",
        )
    if folder.name in ("", "..") or (folder.exists() and not folder.is_dir()):
        raise ConfigError(f"{folder} is not a new folder", next="--write FOLDER")
    if cfg.data.weights:
        raise ConfigError(
            "a mixture with changing weights cannot be written",
            where="data.weights",
            why="a folder has one share for each source",
            next="data.weights=[], or one folder for each list of weights",
        )
    for entry in cfg.token_sources:
        if entry.validation is not None:
            raise ConfigError(
                f"the held-out files of {entry.label} cannot be part of the folder",
                where="data.sources.validation",
                why="they lie apart from its token files",
                next="omit validation, and give it to the source in the run",
            )
        # Its links would be found as further sources, in every later run.
        if folder.resolve().is_relative_to(entry.folder.resolve()):
            raise ConfigError(
                f"{folder} lies among the token files of {entry.label}",
                where=entry.path,
                next="--write ANOTHER, outside of it",
            )
    for source in sources:
        _check_source(source)


def _check_source(source: TokenSource) -> None:
    files, name = source.files, source.name
    parts = name.split("/")
    if not name.isprintable() or parts[0] in (FACTS, TABLE, MEGATRON):
        why = "the name of the source cannot be that of a folder"
    elif any(not part or part.startswith(".") for part in parts):
        why = "the name of the source cannot be that of a folder that `FOLDER/**` finds"
    elif files.format not in ("dtt", "megatron"):
        why = f"its files are of the format {files.format}, which Megatron does not read"
    elif files.are_conversations:
        why = "it holds conversations, and Megatron's format has no loss masks"
    elif not files.path.is_dir() and HELD_OUT.search(files.shards[0].path.name):
        why = f"in a folder, {files.shards[0].path.name} would be taken for held-out text"
    else:
        return
    raise ConfigError(
        f"the source {name!r} cannot be written",
        where=files.path,
        why=why,
        next="name: another name for the source, or leave the source out of the mixture",
    )


def _links(source: TokenSource, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the relative paths and the targets of the links of a source, to its real path."""
    files, name = source.files, source.name
    if files.path.is_dir():
        # One link, not one for each file: after another `dtt tokenize`, the manifest and the files
        # that it names still belong together.
        targets = {name: files.path}
    else:
        [shard] = files.shards
        pair = (shard.path, idx_path(shard.path.with_suffix("")))
        targets = {f"{name}/{path.name}": path for path in pair}
    for inside, path in targets.items():
        # As seen from the folder of the link, which survives a move of both.
        seen_from = os.path.realpath((folder / inside).parent)
        yield inside, Path(os.path.relpath(os.path.realpath(path), seen_from))


def _facts(source: TokenSource, share: float) -> dict[str, Any]:
    shards = source.files.shards
    return {
        "name": source.name,
        "share": share,
        "tokens": source.tokens,
        "files": len(shards),
        "bytes": sum(shard.offset + shard.tokens * shard.id_bytes for shard in shards),
    }


def _table(sources: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table of the training files."""
    total = {key: sum(s[key] for s in sources) for key in ("share", "tokens", "files", "bytes")}
    rows = [*sources, {"name": "total", **total}]
    width = max(len(row["name"]) for row in rows)
    yield f"{'source':<{width}}  {'share':>8}  {'tokens':>17}  {'files':>7}  {'bytes':>19}"
    for row in rows:
        yield (
            f"{row['name']:<{width}}  {row['share']:>8.3%}  {row['tokens']:>17,}"
            f"  {row['files']:>7,}  {row['bytes']:>19,}"
        )


def _megatron(
    folder: Path, sources: Sequence[TokenSource], shares: Sequence[float]
) -> Iterator[str]:
    """Yield weights and prefixes in turn; the shards of a source share its weight by tokens."""
    for source, share in zip(sources, shares, strict=True):
        root = source.files.path
        total = sum(shard.tokens for shard in source.files.shards)
        for shard in source.files.shards:
            if shard.tokens:  # Megatron fails on an empty file
                stem = shard.path.with_suffix("")
                if not root.is_dir():
                    stem = folder / source.name / stem.name
                elif stem.is_relative_to(root):  # not on a node's own disk
                    stem = folder / source.name / stem.relative_to(root)
                yield f"{share * shard.tokens / total:.9g}"
                yield str(stem)


def _write(content: Content, folder: Path, sources: Sequence[TokenSource]) -> None:
    """Write all content beside the folder, check it, and rename it: a kill leaves no part of it."""
    aside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    try:
        with named(folder):
            for name, value in content.items():
                path = aside / name
                path.parent.mkdir(parents=True, exist_ok=True)
                if isinstance(value, Path):
                    path.symlink_to(value)
                else:
                    write_atomically(path, value)
            _check_found(aside, sources)
            aside.rename(folder)  # replaces an empty folder
            fsync_folder(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _check_found(folder: Path, sources: Sequence[TokenSource]) -> None:
    """Raise ConfigError unless `FOLDER/**` has the sources of the mixture, and no others."""
    found = find_token_folders(folder)
    odd = found.keys() ^ {source.name for source in sources}
    for source in sources:
        path = source.files.path
        if source.name in found and path.is_dir() and not path.samefile(found[source.name]):
            odd |= {source.name}
    if odd:
        raise ConfigError(
            "a folder of links would not have the sources of the mixture",
            where="data.sources",
            why=f"token folders within others: {', '.join(sorted(odd))}",
            next="keep each token folder outside of the others, and their names as well",
        )


def _check_same(content: Content, folder: Path) -> None:
    """Raise ConfigError unless `folder` has exactly this content."""
    names = {
        str(Path(parent, name).relative_to(folder))
        for parent, folders, files in os.walk(folder)
        for name in [*files, *(n for n in folders if Path(parent, n).is_symlink())]
    }
    odd = names ^ content.keys()
    # Read only if the names are those of the mixture: other files may be of any size and kind.
    for name, value in content.items() if not odd else ():
        path = folder / name
        if path.is_symlink():
            same = value == path.readlink()
        else:
            same = isinstance(value, str) and path.read_bytes() == value.encode()
        odd |= set() if same else {name}
    if odd:
        raise ConfigError(
            f"{folder} holds something else",
            why=f"not those of this mixture: {', '.join(sorted(odd)[:5])}",
            next="--write ANOTHER, or delete that folder: links and lists only, if dtt wrote it",
        )
