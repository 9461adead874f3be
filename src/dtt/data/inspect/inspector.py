"""Inspection of a path: a corpus, files of text, or token ids in any format that training reads.

Of large data, a few evenly spread parts are read. A document of ids is counted in the part that
contains its end, so that long documents are sampled with the same probability as short ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dtt.artifacts.corpus import CorpusManifest
from dtt.artifacts.manifest import Manifest
from dtt.artifacts.manifests import CHAT_TEMPLATE, ChatFacts, TokensManifest
from dtt.artifacts.token_folders import ShardFile, files_of
from dtt.base.errors import ConfigError, DamagedError, DttError, InputError
from dtt.base.files import sha256_file
from dtt.base.log import progress
from dtt.data.inspect import raw_text
from dtt.data.inspect.report import (
    BEGIN,
    END,
    Damages,
    InspectOptions,
    Report,
    Sample,
    damages,
    spread,
    summary,
)
from dtt.data.samples.packing import read_mask
from dtt.data.samples.token_shards import DocumentBounds, Shard, TokenFiles, open_files
from dtt.data.token_file import Tokens, idx_path

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PLACE_TOKENS = 2**20
PLACES = 32
SHOWN_TOKENS = 64
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
    if path.is_dir():
        has_ids = any(file.suffix in TOKEN_FILES for file in path.iterdir())
    else:
        has_ids = path.suffix in TOKEN_FILES or idx_path(path).is_file()
    if made is TokensManifest or (made is None and has_ids):
        return _inspect_tokens(path, options)
    return raw_text.inspect_documents(path, options)


def _inspect_tokens(path: Path, options: InspectOptions) -> Report:
    # In a folder, a broken file is one finding among others; a single broken file is an error.
    broken: dict[Path, DttError] = {}
    taken = broken if path.is_dir() else None
    files = open_files(path, None, raw_dtype=options.dtype, end_of_document=None, broken=taken)
    manifest = files.manifest
    folder = files.path if files.path.is_dir() else files.path.parent
    tokenizer = _open_tokenizer(options.tokenizer, folder / TOKENIZER)
    decode = _decoder(tokenizer)
    vocab_size = files.vocab_size
    if vocab_size is None and tokenizer is not None:
        vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    statistics = IdStatistics(vocab_size, files.end_of_document)
    if manifest is None:
        damaged = {ids: _why(error) for ids, error in broken.items()}
        documents = _count(files, damaged) if files.has_index else None
    else:
        damaged = _damages(files, manifest, hashes=options.hashes)
        documents = sum(shard.counts.documents for shard in manifest.shards)
    _read(files, statistics, damaged, options)
    total = sum(shard.tokens for shard in files.shards)
    facts: dict[str, object] = {
        "dtype": " and ".join(sorted({np.dtype(s.dtype).name for s in files.shards})) or None,
        "vocab_size": vocab_size,
        "largest_id": statistics.largest,
    }
    if manifest is not None:
        facts |= _facts(manifest)
    if manifest is None or manifest.chat is None:
        shown = spread(statistics.beginnings, options.samples)
        samples = [{"where": where, "text": decode(ids)} for where, ids in shown]
        facts["end_of_document"] = statistics.end_facts(tokenizer)
        oddities = list(statistics.oddities())
    else:
        whole = [s for s in files.shards if s.tokens and not damaged.keys() & set(_files_of(s))]
        samples = [_conversation(shard, decode) for shard in spread(whole, options.samples)]
        facts |= _chat_facts(manifest, manifest.chat, decode)
        oddities = [f"refused rows: {n:,}: {why}" for why, n in manifest.refused.items()]
        if manifest.nulls:
            oddities.append(f"rows whose tools have keys with null: {manifest.nulls:,}")
    paths = [path for shard in files.shards for path in _files_of(shard) if path.is_file()]
    return Report(
        path=str(files.path),
        kind=KINDS[files.format],
        files=len(paths),
        file_bytes=sum(path.stat().st_size for path in paths),
        documents=documents,
        tokens=total,
        text_bytes=None if manifest is None else sum(s.counts.bytes for s in manifest.shards),
        facts=facts,
        read={"amount": statistics.tokens, "total": total, "unit": "tokens"},
        lengths=None if documents is None else summary(statistics.lengths, "tokens"),
        samples=samples,
        oddities=oddities,
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


def _chat_facts(
    manifest: TokensManifest, chat: ChatFacts, decode: Callable[[list[int]], str]
) -> dict[str, object]:
    trained = sum(shard.counts.trained or 0 for shard in manifest.shards)
    tokens = sum(shard.counts.tokens for shard in manifest.shards)
    return {
        "trained_tokens": f"{trained:,} ({trained / max(tokens, 1):.1%})",
        "stop_tokens": ", ".join(f"{decode([token])} ({token})" for token in chat.stop_tokens),
        "template": chat.template_sha256[:16],
        "refused": sum(manifest.refused.values()) or None,
        "keys not used": manifest.unread or None,
    }


def _conversation(shard: Shard, decode: Callable[[list[int]], str]) -> Sample:
    """Return the text of the first conversation of a shard, its targets between BEGIN and END."""
    length = int(shard.documents().bounds()[1])
    ids, mask = _ids(shard, 0, length), read_mask(shard)[:length] != 0
    text = ""
    for first, last in pairwise([0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), length]):
        part = decode(ids[first:last].tolist())
        text += f"{BEGIN}{part}{END}" if mask[first] else part
    where = f"{shard.path.name}, conversation 0: {length} tokens, {int(mask.sum())} trained"
    return {"where": where, "text": text}


def _files_of(shard: Shard) -> list[Path]:
    """Return the file of ids, and where the files lie that may belong to it."""
    ids, name = shard.path, shard.path.name
    beside = [ids.with_suffix(".idx"), ids.with_suffix(".mask")]
    beside += [ids.with_name(f"{name}.index"), ids.with_name(f"{name}.metadata")]
    return [ids, *beside]


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
            documents += len(shard.documents())
        except (DamagedError, InputError) as error:
            damaged[shard.path] = _why(error)
    return documents


def _read(
    files: TokenFiles, statistics: IdStatistics, damaged: Damages, options: InspectOptions
) -> None:
    """Read parts of the files that are not `damaged`; add the problems found there to it."""
    chosen = places([shard.tokens for shard in files.shards], everything=options.everything)
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


def places(sizes: list[int], *, everything: bool) -> list[tuple[int, int, int]]:
    """Return (file, start, stop) of the tokens to read, given the number of tokens in each file."""
    if everything or sum(sizes) <= PLACES * PLACE_TOKENS:
        return [
            (file, start, min(start + PLACE_TOKENS, size))
            for file, size in enumerate(sizes)
            for start in range(0, max(size, 1), PLACE_TOKENS)
        ]
    # Counted in tokens, not in files: a place costs the same in one large file and in many small.
    ends = np.cumsum(sizes, dtype=np.int64)
    found = []
    for first in np.linspace(0, int(ends[-1]) - PLACE_TOKENS, PLACES).astype(np.int64).tolist():
        file = int(np.searchsorted(ends, first, side="right"))
        start = first - int(ends[file]) + sizes[file]
        found.append((file, start, min(start + PLACE_TOKENS, sizes[file])))
    return found


@dataclass
class IdStatistics:
    """Running statistics of the ids read so far."""

    vocab_size: int | None
    end: int | None
    """Id that ends documents; None if unknown."""
    tokens: int = 0
    largest: int | None = None
    outside: int = 0
    """Number of ids that are negative or not below `vocab_size`."""
    measured: list[Tokens] = field(default_factory=list)
    """Lengths of documents."""
    last: Counter[int] = field(default_factory=Counter)
    """Number of documents by their last id."""
    beginnings: list[tuple[str, list[int]]] = field(default_factory=list)
    """Location and first ids of one document per part."""

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[documents]: tokens of each document."""
        return np.concatenate([np.empty(0, dtype=np.int64), *self.measured])

    def read(self, shard: Shard, documents: DocumentBounds | None, start: int, stop: int) -> None:
        """Read tokens start … stop - 1 of a shard, and count the documents that end there.

        `documents` is None if the document boundaries are unknown; then no documents are counted.
        Raises DamagedError if the shard is too short, or its documents are not contiguous.
        """
        ids = _ids(shard, start, stop)
        self.tokens += len(ids)
        if len(ids):
            self.largest = max(self.largest or 0, int(ids.max()))
        if self.vocab_size is not None:
            self.outside += int(((ids < 0) | (ids >= self.vocab_size)).sum())
        if documents is None:
            where = f"{shard.path.name}, token {start}"
            self.beginnings.append((where, ids[:SHOWN_TOKENS].tolist()))
            return
        # A document ends where the next one starts.
        first = documents.starting_after(start) - 1 if start else 0
        last = len(documents) if stop == shard.tokens else documents.starting_after(stop) - 1
        if last > first:
            self._documents(shard, first, documents.starts(first, last + 1), start, ids)

    def _documents(self, shard: Shard, first: int, starts: Tokens, at: int, ids: Tokens) -> None:
        """Count the documents from `first` on.

        `starts` holds their first tokens, then the end of the last one. `ids` are the shard's ids
        from token `at` on and contain the last id of each document.
        """
        lengths = np.diff(starts)
        if lengths.min() < 0 or not at <= starts[1] <= starts[-1] <= at + len(ids):
            raise DamagedError(
                "the index does not match its ids",
                where=shard.path,
                why=f"documents {first} … {first + len(lengths) - 1} do not follow one another",
            )
        self.measured.append(lengths)
        filled = np.flatnonzero(lengths)
        values, counts = np.unique(ids[starts[filled + 1] - 1 - at], return_counts=True)
        self.last.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        if filled.size:
            shown = int(filled[-1])
            begin, end = int(starts[shown]), int(starts[shown + 1])
            where = f"{shard.path.name}, document {first + shown}"
            beginning = _ids(shard, begin, min(end, begin + SHOWN_TOKENS))
            self.beginnings.append((where, beginning.tolist()))

    def end_facts(self, tokenizer: Tokenizer | None = None) -> dict[str, Any] | None:
        """Return the id that ends documents, its token, and how many documents end with it.

        If that id is unknown, it is the most frequent last id; None if that ends no more than half
        of the documents.
        """
        total = self.last.total()
        if not total:
            return None
        end = self.last.most_common(1)[0][0] if self.end is None else self.end
        if self.end is None and 2 * self.last[end] <= total:
            return None
        token = None if tokenizer is None else tokenizer.id_to_token(end)
        return {"id": end, "token": token, "documents": self.last[end], "of": total}

    def oddities(self) -> Iterator[str]:
        """Yield a line for each anomaly in the ids and documents."""
        if self.outside:
            yield f"ids outside the vocabulary of {self.vocab_size:,}: {self.outside:,}"
        if empty := int((self.lengths == 0).sum()):
            yield f"empty documents: {empty:,}"
        found = self.end_facts()
        if found is None and self.last:
            yield "no id ends most documents: training cannot tell where they end"
        elif found is not None and (unended := found["of"] - found["documents"]):
            yield f"documents that do not end with id {found['id']}: {unended:,}"


def _ids(shard: Shard, start: int, stop: int) -> Tokens:
    """Return tokens start … stop - 1 of a shard.

    Reads the file sequentially: the memory map of training is tuned for scattered access.
    """
    dtype = np.dtype(shard.dtype)
    offset = shard.offset + start * dtype.itemsize
    ids: Tokens = np.fromfile(shard.path, dtype=dtype, count=stop - start, offset=offset)
    if len(ids) < stop - start:
        raise DamagedError(
            "a token file is shorter than it should be",
            where=shard.path,
            why=f"{start + len(ids)} tokens, the index says {shard.tokens}",
        )
    return ids
