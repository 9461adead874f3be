"""Token files of any supported format, opened as a sequence of shards.

The format is detected from the files present:

    dtt          manifest.json, and the Megatron pairs that it names
    Megatron     NAME.bin and NAME.idx (datatrove's Megatron writer produces the same)
    datatrove    NAME.ds with the ids; NAME.ds.index with the end of each document in tokens, uint64
    raw, llm.c, numpy
                 any other file: ids, possibly after a header; see dtt.data.samples.raw_tokens

In folders that dtt did not write, a file whose name contains the word `val`, `valid` or
`validation` is held out, as is customary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from dtt.artifacts.manifest import fingerprint
from dtt.artifacts.manifests import TokenShard, TokensManifest
from dtt.base.errors import ConfigError, DamagedError, DttError, InputError
from dtt.data.samples.raw_tokens import (
    HEAD_BYTES,
    Header,
    RawFormat,
    check_width,
    read_header,
    refusal,
)
from dtt.data.token_file import TokenFile, Tokens, bin_path, idx_path, map_file, mask_path
from dtt.data.tokenize.markers import Split, changed_files

HELD_OUT = re.compile(r"(?:^|[^a-z])val(?:id|idation)?(?:[^a-z]|$)", re.IGNORECASE)
SCAN_TOKENS = 2**24
RAW = (".bin", ".npy")

Format = Literal["dtt", "megatron", "datatrove"] | RawFormat


@dataclass(frozen=True)
class DocumentEnds:
    """Document boundaries given by the end of each document (exclusive), in ascending order."""

    ends: npt.NDArray[np.int64] | npt.NDArray[np.uint64]

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.ends)

    def starts(self, first: int, stop: int) -> npt.NDArray[np.int64]:
        """See TokenFile."""
        before = self.ends[max(0, first - 1) : max(0, stop - 1)].astype(np.int64)
        # Document i starts where document i - 1 ends, so the ends are shifted by one.
        # The first document starts at 0, where no other one ends.
        return np.insert(before, 0, 0) if first == 0 else before

    def starting_after(self, token: int) -> int:
        """See TokenFile."""
        return int(self.ends.searchsorted(self.ends.dtype.type(token), side="right")) + 1

    def bounds(self) -> npt.NDArray[np.int64]:
        """See TokenFile."""
        return self.starts(0, len(self.ends) + 1)

    @classmethod
    def of(cls, ids: Path, header: Header, end_of_document: int | None) -> Self:
        """Scan a file of ids for `end_of_document`; if it is None, the file is one document."""
        tokens, dtype = header.tokens, np.dtype(header.dtype)
        found = [np.array([tokens], dtype=np.int64)]  # the last document may lack its end token
        # In parts: a file may be larger than the memory.
        for start in range(0, tokens, SCAN_TOKENS) if end_of_document is not None else ():
            offset = header.offset + start * dtype.itemsize
            part = np.fromfile(ids, dtype, SCAN_TOKENS, offset=offset)
            # A document ends behind its end token.
            found.append(start + 1 + np.flatnonzero(part == end_of_document))
        # The last token may be an end token, which gives its end twice.
        return cls(np.unique(np.concatenate(found)))


DocumentBounds = TokenFile | DocumentEnds
"""The document boundaries of one token file."""


def documents_in(documents: DocumentBounds, start: int, stop: int) -> tuple[int, Tokens]:
    """Return the document that contains token `start`, and where the documents up to `stop` start.

    The second value holds the first token of that document and of each later one that starts below
    `stop`. An empty document has the same first token as the document after it.
    """
    first = documents.starting_after(start) - 1
    return first, documents.starts(first, documents.starting_after(stop - 1))


def spans_in(
    documents: DocumentBounds, start: int, stop: int, place: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (document, offset in it, start, stop) of each document in tokens start … stop - 1.

    The last two are positions in a sample in which these tokens begin at `place`.
    """
    first, starts = documents_in(documents, start, stop)
    for document, (begin, end) in enumerate(pairwise([*starts.tolist(), stop]), first):
        at = max(begin, start)
        if at < end:
            yield document, at - begin, place + at - start, place + end - start


# Compared by identity: caches of open shards look them up for every piece of a sample.
@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """One file of token ids. The file need not be open."""

    path: Path
    tokens: int
    dtype: str
    """numpy dtype string, for example `<u2`."""
    version: str
    """Version string that changes whenever the document boundaries may have changed."""
    documents: Callable[[], DocumentBounds]
    """Function that opens the document boundaries."""
    offset: int = 0
    """Bytes before the first id, a multiple of the id width."""
    format: Format = "dtt"
    mask: Path | None = None
    """File with the loss mask, one byte per token; None if every token is a target."""
    to_verify: Callable[[], Iterable[tuple[Path, str]]] = tuple
    """Function that returns the files to verify, each with its sha256; none if it is unknown."""

    @property
    def id_bytes(self) -> int:
        """Bytes per id."""
        return np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class TokenFiles:
    """A sequence of shards and the facts that hold for all of them."""

    path: Path
    format: Format
    shards: tuple[Shard, ...]
    key: str
    """Identity of the content, independent of its path.

    For files that dtt did not write, it covers only file names, token counts and dtypes."""
    manifest: TokensManifest | None
    bytes_per_token: float | None
    """UTF-8 bytes of text per token; None if unknown."""
    vocab_size: int | None
    """Largest id + 1; None if unknown."""
    end_of_document: int | None
    """Id that ends each document; None if the ids do not tell where documents end."""

    @property
    def has_index(self) -> bool:
        """True if an index stores the document boundaries; otherwise only the ids mark them."""
        return self.format in ("dtt", "megatron", "datatrove")

    @property
    def are_conversations(self) -> bool:
        """True if the files contain conversations with loss masks."""
        return self.manifest is not None and self.manifest.chat is not None

    @property
    def are_pairs(self) -> bool:
        """True if the files contain preference pairs of conversations."""
        return self.manifest is not None and self.manifest.pairs


def open_files(
    path: Path,
    split: Split | None,
    *,
    raw_dtype: str,
    end_of_document: int | None,
    vocab_size: int | None = None,
    broken: dict[Path, DttError] | None = None,
) -> TokenFiles:
    """Open the shards of a split, or of both splits (None), sorted by name.

    `raw_dtype` and `end_of_document` (None: unknown) describe raw ids, whose files store neither.
    A single file that dtt did not write belongs to the training split. The first raw ids are read,
    and must not look like those of another dtype; `vocab_size` (None: unknown) bounds them.

    Raises InputError if no known format is found or a file is missing, DamagedError if a file is
    inconsistent, and ConfigError if `raw_dtype` is wrong. If `broken` is given, such errors in
    shards that dtt did not write are stored there by path instead of being raised.
    """
    if TokensManifest.is_in(path):
        return _made_by_dtt(path, split)
    format_, found = _find(path)
    if path.is_dir():
        found = [x for x in found if split in (None, _split(x))]
    elif split == "validation":
        found = []
    shards = []
    for one in found:
        try:
            if format_ == "raw":
                shard = _raw(one, raw_dtype, end_of_document)
            else:
                shard = _megatron(one) if format_ == "megatron" else _datatrove(one)
            if shard.format == "raw":
                dtype = np.dtype(shard.dtype)
                ids = np.fromfile(shard.path, dtype, HEAD_BYTES // dtype.itemsize)
                check_width(shard.path, ids, vocab_size)
            shards.append(shard)
        except (ConfigError, DamagedError, InputError) as error:
            if broken is None:
                raise
            broken[bin_path(one) if format_ == "megatron" else one] = error
    examples = {shard.format: shard.path.name for shard in shards}
    if len(examples) > 1:
        raise InputError(
            "a folder holds token files of several formats",
            where=path,
            why=", ".join(f"{name} is {format_}" for format_, name in examples.items()),
            next="move those of one format to a separate folder, and specify that",
        )
    # Names and sizes only: hashing terabytes at every start is not affordable. Files of dtt have
    # hashes in their manifest.
    content = [(s.path.name, s.tokens, s.dtype) for s in shards]
    common: Format = next(iter(examples), format_)
    key = fingerprint(content)
    end = end_of_document if format_ == "raw" else None  # an index stores the boundaries
    return TokenFiles(path, common, tuple(shards), key, None, None, vocab_size, end)


def _find(path: Path) -> tuple[Literal["megatron", "datatrove", "raw"], list[Path]]:
    """Detect the format of files that dtt did not write; return it with pair stems or id files."""
    if path.is_dir():
        names = sorted(p.name for p in path.iterdir() if not p.name.startswith("."))
        if any(name.endswith(".idx") for name in names):
            # Both halves count, so that a lone half is reported instead of ignored.
            pairs = {n.removesuffix(".idx").removesuffix(".bin") for n in names if _half(n)}
            return "megatron", [path / name for name in sorted(pairs)]
        if any(name.endswith(".ds") for name in names):
            return "datatrove", [path / name for name in names if name.endswith(".ds")]
        if any(name.endswith(".mds") for name in names):
            raise refusal(path, "shards of MosaicML's streaming")
        if any(name.endswith(RAW) for name in names):
            return "raw", [path / name for name in names if name.endswith(RAW)]
    else:
        stem = path.with_suffix("") if _half(path.name) else path
        if idx_path(stem).is_file():
            return "megatron", [stem]
        if path.is_file():
            return ("datatrove" if path.suffix == ".ds" else "raw"), [path]
    raise InputError(
        "no token files there",
        where=path,
        why="it is a folder without a manifest of token files, and without .idx, .ds, .bin or .npy"
        if path.is_dir()
        else "there is no such file or folder, nor a pair of that name with .bin and .idx",
        next="`dtt tokenize` creates or finishes them; or specify a Megatron pair or a folder of"
        " pairs, datatrove's .ds files, or files of ids: raw, of llm.c, or of numpy.save",
    )


def _half(name: str) -> bool:
    return name.endswith((".bin", ".idx"))


def _split(path: Path) -> Split:
    return "validation" if HELD_OUT.search(path.name) else "train"


def _made_by_dtt(folder: Path, split: Split | None) -> TokenFiles:
    manifest = TokensManifest.read(folder)
    records = [record for record in manifest.shards if split in (None, record.split)]
    counts = [record.counts for record in records]
    tokens, text = sum(c.tokens for c in counts), sum(c.bytes for c in counts)
    dtype = np.dtype(manifest.dtype).newbyteorder("<").str
    return TokenFiles(
        folder,
        "dtt",
        tuple(_named(folder, dtype, record) for record in records),
        manifest.key,
        manifest,
        text / tokens if text else None,  # of ids that a class gives, no text is known
        manifest.vocab_size,
        manifest.end_of_document,
    )


def _named(folder: Path, dtype: str, record: TokenShard) -> Shard:
    """Return the shard that a manifest record describes, without accessing its files."""
    path = folder / f"{record.stem}.bin"
    masked = record.mask_sha256
    return Shard(
        path,
        record.counts.tokens,
        dtype,
        record.idx_sha256 + (f" {masked}" if masked else ""),
        lambda: TokenFile(path.with_suffix("")),
        mask=mask_path(path.with_suffix("")) if masked else None,
        to_verify=lambda: changed_files(folder, path.with_suffix(""), record),
    )


def _megatron(stem: Path) -> Shard:
    file = TokenFile(stem)
    return Shard(
        bin_path(stem),
        file.total,
        file.dtype.str,
        _version(idx_path(stem)),
        lambda: TokenFile(stem),
        format="megatron",
    )


def _datatrove(path: Path) -> Shard:
    index = path.with_name(path.name + ".index")
    try:
        ends = map_file(index).view("<u8")
    except FileNotFoundError:
        raise InputError(
            "the index of a token file is missing",
            where=index,
            next="keep it next to the .ds file (datatrove: save_index=True)",
        ) from None
    size, tokens = path.stat().st_size, int(ends[-1]) if len(ends) else 0
    dtypes = [d for d in ("<u2", "<u4") if tokens * np.dtype(d).itemsize == size]
    if not dtypes:
        raise DamagedError(
            "a token file and its index do not match",
            where=path,
            why=f"{size} bytes; the index ends at {tokens} tokens, of 2 or 4 bytes each",
        )
    return Shard(
        path,
        tokens,
        dtypes[0],
        _version(index),
        lambda: DocumentEnds(map_file(index).view("<u8")),
        format="datatrove",
    )


def _raw(path: Path, dtype: str, end_of_document: int | None) -> Shard:
    header = read_header(path, dtype)
    return Shard(
        path,
        header.tokens,
        header.dtype,
        f"{_version(path)} {end_of_document}",
        lambda: DocumentEnds.of(path, header, end_of_document),
        header.offset,
        header.format,
    )


def _version(path: Path) -> str:
    stat = path.stat()
    return f"{stat.st_size} {stat.st_mtime_ns}"
