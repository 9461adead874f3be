"""Encoding of units of work: each becomes one shard per split, and a marker once it is on disk."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path
from typing import Literal, NamedTuple

from dtt.artifacts import SplitCounts, TokenShard
from dtt.data.corpus import Corpus, Unit
from dtt.data.documents import BadDocuments, read_batches
from dtt.data.encoder import Encoder
from dtt.data.gigatoken import Row
from dtt.data.markers import WORK, UnitMarker, write_marker
from dtt.data.prefetch import prefetch
from dtt.data.sampling import held_out
from dtt.data.threads import Behind, ahead
from dtt.data.tokenfile import TokenFileWriter, bin_path, idx_path
from dtt.runtime.files import fsync_folder

BATCHES_BEHIND = 8
"""Maximum number of encoded batches that wait for the disk: a few megabytes."""

Split = Literal["train", "validation"]


def aside_path(out: Path, unit: int, split: Split) -> Path:
    """Return the temporary path of a shard that is being written, without its suffix."""
    return out / WORK / f"{unit:05d}.{split}"


class Work(NamedTuple):
    """The work of one rank in numbers."""

    units: int = 0
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    """UTF-8 bytes of the documents."""
    seconds: float = 0.0
    """Wall-clock time from the rank's first unit to its last."""


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
    cores: int,
) -> Work:
    """Write the shards of each unit into `place`, then its marker into `out`.

    `place` is `out`, or a folder on this node's local disk. While a unit is encoded, the next one
    is prefetched into the page cache. `cores` is the number of cores of this rank alone. With more
    than one, documents are read and decoded ahead in a second thread; on a single core the threads
    would only alternate. Shards are written by another thread.

    The content of the shards depends only on the unit, the tokenizer and `validation_fraction`.
    Memory use is a few batches, regardless of the size of files and units.
    """
    splits: tuple[Split, ...] = ("train", "validation") if validation_fraction else ("train",)
    start = time.monotonic()
    total = SplitCounts()
    with ExitStack() as opened, ThreadPoolExecutor(1) as reader, Behind(BATCHES_BEHIND) as behind:

        def read() -> Iterator[tuple[_UnitShards, list[bytes] | None]]:
            for unit, coming in zip_longest(units, units[1:]):
                if coming is not None:
                    prefetch(corpus, coming)
                bad = BadDocuments(stop=stop_at_bad)
                shards = _UnitShards(out, place, unit, key, splits, encoder.vocab_size, bad)
                opened.enter_context(shards.open_files)
                for batch in read_batches(corpus, unit, bad):
                    yield shards, batch
                yield shards, None

        for shards, batch in ahead(read(), reader) if cores > 1 else read():
            if batch is None:
                behind.do(shards.finish)
                continue
            for split, documents in _divided(batch, validation_fraction).items():
                row = encoder.encode(documents)
                counts = SplitCounts(
                    documents=len(row.lengths),
                    tokens=len(row.ids),
                    bytes=sum(map(len, documents)),
                )
                total += counts
                behind.do(shards.append, split, row, counts)
            shards.empty += batch.count(b"")
            shards.blank += sum(map(bytes.isspace, batch))
    seconds = time.monotonic() - start
    return Work(len(units), total.documents, total.tokens, total.bytes, seconds)


def _divided(batch: list[bytes], validation_fraction: float) -> dict[Split, list[bytes]]:
    """Return the documents of each split; empty documents are left out."""
    documents = [document for document in batch if document]
    if not validation_fraction:
        return {"train": documents}
    divided: dict[Split, list[bytes]] = {"train": [], "validation": []}
    for document in documents:
        split: Split = "validation" if held_out(document, validation_fraction) else "train"
        divided[split].append(document)
    return divided


class _UnitShards:
    """The shards of one unit, written to temporary files until they are complete."""

    def __init__(
        self,
        out: Path,
        place: Path,
        unit: Unit,
        key: str,
        splits: tuple[Split, ...],
        vocab_size: int,
        bad: BadDocuments,
    ) -> None:
        self._bad = bad
        self._out, self._place, self._unit, self._key = out, place, unit.index, key
        self._host = None if place == out else socket.gethostname()
        (place / WORK).mkdir(parents=True, exist_ok=True)
        self._asides = {split: aside_path(place, unit.index, split) for split in splits}
        self.open_files = ExitStack()
        """Closes the writers that are still open when it is left."""
        self._writers = {
            split: self.open_files.enter_context(TokenFileWriter(aside, vocab_size))
            for split, aside in self._asides.items()
        }
        self._counts = dict.fromkeys(splits, SplitCounts())
        self.empty = self.blank = 0

    def append(self, split: Split, row: Row, counts: SplitCounts) -> None:
        self._writers[split].append(row.ids, row.lengths)
        self._counts[split] += counts

    def finish(self) -> None:
        """Move the shards to their final paths, then write the marker."""
        with self.open_files:
            files = {split: writer.close() for split, writer in self._writers.items()}
        shards: list[TokenShard] = []
        for split, written in files.items():
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
            skipped=self._bad.count,
            empty=self.empty,
            blank=self.blank,
            lost_bytes=self._bad.lost_bytes,
            problems=tuple(self._bad.examples),
        )
        write_marker(self._out, self._unit, self._place, marker)


def _put(aside: Path, stem: Path, *, keep: bool) -> None:
    for suffixed in (bin_path, idx_path):
        if keep:
            suffixed(aside).replace(suffixed(stem))
        else:
            suffixed(aside).unlink()
