"""One unit of work: documents in, a shard per split out, and a marker when all is on the disk."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

from dtt.artifacts import SplitCounts, TokenShard
from dtt.data.corpus import Corpus, Unit
from dtt.data.documents import BadDocuments, batches, read_unit
from dtt.data.encoder import Encoder
from dtt.data.markers import WORK, UnitMarker, write_marker
from dtt.data.sampling import held_out
from dtt.data.threads import Behind, ahead
from dtt.data.tokenfile import TokenFileWriter, Tokens, bin_path, idx_path
from dtt.runtime.files import fsync_folder

BATCH_CHARACTERS = 2**20
BATCHES_BEHIND = 16
"""Encoded, and waiting for the disk: a few megabytes."""

Split = Literal["train", "validation"]


def aside_path(out: Path, unit: int, split: Split) -> Path:
    """Where a shard lies that is being written, without its suffix."""
    return out / WORK / f"{unit:05d}.{split}"


class Work(NamedTuple):
    """What one rank did."""

    units: int = 0
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    """UTF-8."""
    seconds: float = 0.0
    """From its first unit to its last."""


def encode_units(
    corpus: Corpus,
    units: list[Unit],
    encoder: Encoder,
    out: Path,
    place: Path,
    *,
    key: str,
    validation_fraction: float,
    stop_at_bad: bool,
) -> Work:
    """Write the shards of each unit into `place`, then its marker into `out`.

    `place` is `out`, or a folder on this node's own disk.
    The bytes depend on the unit, the tokenizer and `validation_fraction` alone. Memory is a few
    batches, however large files and units are.
    """
    splits: tuple[Split, ...] = ("train", "validation") if validation_fraction else ("train",)
    start = time.monotonic()
    total = SplitCounts()
    with ThreadPoolExecutor(1) as reader, Behind(BATCHES_BEHIND) as behind:
        for unit in units:
            bad = BadDocuments(stop=stop_at_bad)
            shards = _UnitShards(out, place, unit, key, splits, encoder.vocab_size)
            documents = read_unit(corpus, unit, bad)
            for batch in ahead(batches(documents, BATCH_CHARACTERS), reader):
                texts: dict[Split, list[str]] = {split: [] for split in splits}
                for text in filter(None, batch):
                    texts[_split(text, validation_fraction)].append(text)
                for split in splits:
                    ids, lengths = encoder.encode(texts[split])
                    counts = SplitCounts(
                        documents=len(lengths),
                        tokens=len(ids),
                        bytes=sum(map(_utf8_bytes, texts[split])),
                    )
                    total += counts
                    behind.do(shards.append, split, ids, lengths, counts)
                shards.empty += batch.count("")
            behind.do(shards.close, bad)
    seconds = time.monotonic() - start
    return Work(len(units), total.documents, total.tokens, total.bytes, seconds)


def _split(text: str, validation_fraction: float) -> Split:
    return "validation" if held_out(text, validation_fraction) else "train"


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


class _UnitShards:
    """The shards of one unit, written aside until they are whole."""

    def __init__(
        self,
        out: Path,
        place: Path,
        unit: Unit,
        key: str,
        splits: tuple[Split, ...],
        vocab_size: int,
    ) -> None:
        self._out, self._place, self._unit, self._key = out, place, unit.index, key
        self._host = None if place == out else socket.gethostname()
        (place / WORK).mkdir(parents=True, exist_ok=True)
        self._asides = {split: aside_path(place, unit.index, split) for split in splits}
        self._writers = {
            split: TokenFileWriter(aside, vocab_size) for split, aside in self._asides.items()
        }
        self._counts = dict.fromkeys(splits, SplitCounts())
        self.empty = 0

    def append(self, split: Split, ids: Tokens, lengths: Tokens, counts: SplitCounts) -> None:
        self._writers[split].append(ids, lengths)
        self._counts[split] += counts

    def close(self, bad: BadDocuments) -> None:
        """Put the shards into their places, then the marker."""
        shards: list[TokenShard] = []
        for split, writer in self._writers.items():
            with writer:
                written = writer.close()
            stem = f"{split}-{self._unit:05d}"
            shard = TokenShard(
                split=split,
                stem=stem,
                counts=self._counts[split],
                bin_sha256=written.bin_sha256,
                idx_sha256=written.idx_sha256,
                host=self._host,
                path=self._host and str(self._place / stem),
            )
            _put(self._asides[split], self._place / stem, keep=written.sequences > 0)
            if written.sequences:
                shards.append(shard)
        fsync_folder(self._place)
        marker = UnitMarker(
            key=self._key,
            shards=tuple(shards),
            skipped=bad.count,
            empty=self.empty,
            problems=tuple(bad.examples),
        )
        write_marker(self._out, self._unit, self._place, marker)


def _put(aside: Path, stem: Path, *, keep: bool) -> None:
    for suffixed in (bin_path, idx_path):
        if keep:
            suffixed(aside).replace(suffixed(stem))
        else:
            suffixed(aside).unlink()
