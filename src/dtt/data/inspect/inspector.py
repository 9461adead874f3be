"""Inspection of a path: format detection, reading and the report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dtt.artifacts.corpus import CorpusManifest
from dtt.artifacts.manifest import Manifest
from dtt.artifacts.manifests import CHAT_TEMPLATE, TokensManifest
from dtt.artifacts.shard_files import ShardFile, files_of
from dtt.base.errors import ConfigError, DamagedError, DttError, InputError
from dtt.base.files import sha256_file
from dtt.base.log import progress
from dtt.data.inspect import raw_text
from dtt.data.inspect.conversation_report import ConversationReport
from dtt.data.inspect.report import (
    Damages,
    InspectOptions,
    Report,
    damages,
    summary,
)
from dtt.data.inspect.token_ids import IdStatistics, count, places
from dtt.data.samples.token_shards import DocumentBounds, TokenFiles, open_files
from dtt.data.token_file import idx_path

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
TOKEN_FILES = (".bin", ".idx", ".ds", ".npy", ".mds")
KINDS = {
    "dtt": "token files of dtt",
    "megatron": "Megatron .bin/.idx",
    "datatrove": "datatrove .ds",
    "raw": "raw ids",
    "llm.c": "token files of llm.c",
    "numpy": "numpy arrays of ids",
}


def inspect_path(path: Path, options: InspectOptions) -> Report:
    """Report on a corpus, on text files, or on token files in any format that dtt reads.

    Raises InputError if `path` is none of these, ConfigError if `options` asks for hashes of files
    without a manifest.
    """
    made: type[Manifest] | None  # None for another program's manifest.json, too
    made = next((kind for kind in (TokensManifest, CorpusManifest) if kind.is_in(path)), None)
    if options.hashes and made is None:
        raise ConfigError(
            f"there are no checksums to verify {path} with",
            why="only folders that dtt made have a manifest with the sha256 of each file",
            next=f"dtt data inspect {path} --all reads everything, and checks what it can",
        )
    if made is CorpusManifest:
        return raw_text.inspect_documents(path, CorpusManifest.read(path), options)
    if made is TokensManifest or _has_token_files(path):
        return _inspect_tokens(path, options)
    return raw_text.inspect_documents(path, raw_text.describe(path), options)


def _has_token_files(path: Path) -> bool:
    if path.is_dir():
        return any(file.suffix in TOKEN_FILES for file in path.iterdir())
    return path.suffix in TOKEN_FILES or idx_path(path).is_file()


def _inspect_tokens(path: Path, options: InspectOptions) -> Report:
    # In a folder, a broken file is one finding among others; a single broken file is an error.
    broken: dict[Path, DttError] = {}
    taken = broken if path.is_dir() else None
    files = open_files(path, None, raw_dtype=options.dtype, end_of_document=None, broken=taken)
    manifest = files.manifest
    folder = files.path if files.path.is_dir() else files.path.parent
    tokenizer = _open_tokenizer(options.tokenizer, folder / TOKENIZER)
    decode = _decoder(tokenizer)
    vocab_size = None if manifest is None else manifest.vocab_size
    if vocab_size is None and tokenizer is not None:
        vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    statistics = IdStatistics(vocab_size, None if manifest is None else manifest.end_of_document)
    if manifest is None:
        damaged = {ids: _why(error) for ids, error in broken.items()}
        documents = _count(files, damaged) if files.has_index else None
    else:
        damaged = _damages(files, manifest, hashes=options.hashes)
        documents = sum(shard.counts.documents for shard in manifest.shards)
    _read(files, statistics, damaged, options)
    total = sum(shard.tokens for shard in files.shards)
    chat = None
    if files.are_conversations:
        broken_shards = {
            shard.path
            for shard in files.shards
            if damaged.keys() & {shard.path.with_suffix(s) for s in (".bin", ".idx", ".mask")}
        }
        chat = ConversationReport(files, broken_shards, tokenizer)
    paths = [path for shard in files.shards for path in _files_of(shard.path, files.format)]
    return Report(
        path=str(files.path),
        kind=KINDS[files.format],
        files=len(paths),
        file_bytes=sum(path.stat().st_size for path in paths),
        documents=documents,
        tokens=total,
        text_bytes=None if manifest is None else sum(s.counts.bytes for s in manifest.shards),
        facts={
            "dtype": " and ".join(sorted({np.dtype(s.dtype).name for s in files.shards})) or None,
            "vocab_size": vocab_size,
            "largest_id": statistics.largest,
            "end_of_document": statistics.end_facts(tokenizer) if chat is None else None,
        }
        | ({} if manifest is None else _facts(manifest))
        | ({} if chat is None else chat.facts()),
        read={"amount": statistics.tokens, "total": total, "unit": "tokens"},
        lengths=None if documents is None else summary(statistics.lengths, "tokens"),
        samples=(chat or statistics).samples(options.samples, decode),
        oddities=list((chat or statistics).oddities()),
        damaged=[f"{file}: {problem}" for file, problem in damaged.items()],
        verified=options.hashes,
    )


def _facts(manifest: TokensManifest) -> dict[str, object]:
    splits = dict.fromkeys(shard.split for shard in manifest.shards)
    return {
        "splits": {split: manifest.counts(split).model_dump() for split in splits},
        "skipped_documents": manifest.skipped_documents,
        "empty_documents": manifest.empty_documents,
        "removed": None if manifest.selection is None else manifest.selection.describe(),
        "source": manifest.corpus.model_dump(exclude_none=True),
        "key": manifest.key,
    }


def _files_of(ids: Path, file_format: str) -> list[Path]:
    """Return the file of ids and the files that belong to it, as far as they exist."""
    stem, name = ids.with_suffix("").name, ids.name
    beside = {
        "dtt": [f"{stem}.idx", f"{stem}.mask"],
        "megatron": [f"{stem}.idx"],
        "datatrove": [f"{name}.index", f"{name}.metadata"],
    }.get(file_format, [])
    return [path for path in (ids, *map(ids.with_name, beside)) if path.is_file()]


def _damages(files: TokenFiles, manifest: TokensManifest, *, hashes: bool) -> Damages:
    """Return the problems of the files in a manifest, by size and, with `hashes`, by content."""
    expected: list[ShardFile] = []
    for shard, record in zip(files.shards, manifest.shards, strict=True):
        expected += files_of(shard.path.with_suffix(""), record, manifest.dtype)
    found = damages(expected, hashes=hashes)
    beside = {TOKENIZER: manifest.tokenizer_sha256}
    if manifest.chat is not None:
        beside[CHAT_TEMPLATE] = manifest.chat.template_sha256
    for name, sha256 in beside.items():
        path = files.path / name
        if not path.is_file():
            found[path] = "missing"
        elif sha256_file(path) != sha256:
            found[path] = "not the one that made these ids"
    return found


def _count(files: TokenFiles, damaged: Damages) -> int:
    """Return the number of documents in all shards; add shards with a bad index to `damaged`."""
    documents = 0
    for shard in files.shards:
        try:
            documents += count(shard.documents())
        except (DamagedError, InputError) as error:
            damaged[shard.path] = _why(error)
    return documents


def _read(
    files: TokenFiles, statistics: IdStatistics, damaged: Damages, options: InspectOptions
) -> None:
    """Read parts of the files that are not `damaged`; add the problems found there to it."""
    chosen = list(places([shard.tokens for shard in files.shards], everything=options.everything))
    opened: tuple[int, DocumentBounds | None] | None = None
    with progress("reading", len(chosen), "places") as advance:
        for index, start, stop in chosen:
            shard = files.shards[index]
            if not {shard.path, idx_path(shard.path.with_suffix(""))} & damaged.keys():
                try:
                    if opened is None or opened[0] != index:
                        opened = index, shard.documents() if files.has_index else None
                    statistics.read(shard, opened[1], start, stop)
                except (DamagedError, InputError) as error:
                    damaged[shard.path] = _why(error)
            advance(1)


def _why(error: DttError) -> str:
    """Return an error as one line: its `why`, or else its first line."""
    lines = str(error).splitlines()
    return next((line.strip()[7:] for line in lines if line.startswith("  why:")), lines[0])


def _open_tokenizer(asked: Path | None, beside: Path) -> Tokenizer | None:
    """Open the requested tokenizer, or else the one next to the ids; None if there is neither."""
    if asked is None and not beside.is_file():
        return None
    from dtt.data.text.tokenizer import open_tokenizer  # slow to import

    return open_tokenizer(asked or beside)


def _decoder(tokenizer: Tokenizer | None) -> Callable[[list[int]], str]:
    """Return a function that decodes ids to text; without a tokenizer, it prints the numbers."""
    if tokenizer is None:
        return lambda ids: " ".join(map(str, ids))
    # `decode` fails on negative ids; it ignores ids above the vocabulary.
    return lambda ids: str(tokenizer.decode([i for i in ids if i >= 0], skip_special_tokens=False))
