"""One unit of work: documents in, a shard per split out, and a marker when all is on the disk."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from dtt.artifacts import Record, SplitCounts, TokenShard
from dtt.data.corpus import Corpus, Unit
from dtt.data.documents import BadDocuments, batches, read_unit
from dtt.data.sampling import held_out
from dtt.data.tokenfile import TokenFile, TokenFileWriter, bin_path, idx_path
from dtt.data.tokenizer import Encoder
from dtt.errors import DamagedError, InputError
from dtt.runtime.files import fsync_folder, write_atomically

WORK = ".units"
"""Folder of markers and of shards that are being written."""
BATCH_CHARACTERS = 2**21

Split = Literal["train", "validation"]


class UnitMarker(Record):
    """Says that a unit is finished, and what it gave."""

    key: str
    """Of corpus, tokenizer and options: the marker is worth nothing to any other."""
    shards: tuple[TokenShard, ...]
    """One per split that got a document."""
    skipped: int
    empty: int
    problems: tuple[str, ...]
    """`file:line: why` of the first documents that were skipped."""


def marker_path(out: Path, unit: int) -> Path:
    """Where the marker of a unit lies."""
    return out / WORK / f"{unit:05d}.json"


def read_marker(out: Path, unit: int, key: str) -> UnitMarker | None:
    """What a unit gave, if it is finished for `key` and its shards are whole."""
    try:
        marker = UnitMarker.model_validate_json(marker_path(out, unit).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    whole = marker.key == key and all(is_whole(out, shard) for shard in marker.shards)
    return marker if whole else None


def is_whole(out: Path, shard: TokenShard) -> bool:
    """Whether the files of a shard are there and as long as they were written."""
    try:
        file = TokenFile(out / shard.stem)
    except (InputError, DamagedError):
        return False
    return (len(file), file.total) == (shard.counts.documents, shard.counts.tokens)


def encode_unit(
    corpus: Corpus,
    unit: Unit,
    encoder: Encoder,
    out: Path,
    *,
    key: str,
    validation_fraction: float,
    bad: BadDocuments,
) -> None:
    """Write the shards of `unit` into `out`, then its marker.

    The bytes depend on the unit, the tokenizer and `validation_fraction` alone.
    """
    splits: tuple[Split, ...] = ("train", "validation") if validation_fraction else ("train",)
    asides = {split: out / WORK / f"{unit.index:05d}.{split}" for split in splits}
    counts = dict.fromkeys(splits, SplitCounts())
    shards: list[TokenShard] = []
    empty = 0
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(TokenFileWriter(aside, encoder.vocab_size))
            for split, aside in asides.items()
        }
        for batch in batches(read_unit(corpus, unit, bad), BATCH_CHARACTERS):
            texts: dict[Split, list[str]] = {split: [] for split in splits}
            for text in filter(None, batch):
                texts["validation" if held_out(text, validation_fraction) else "train"].append(text)
            empty += batch.count("")
            for split in splits:
                ids, lengths = encoder.encode(texts[split])
                writers[split].append(ids, lengths)
                counts[split] += SplitCounts(
                    documents=len(lengths),
                    tokens=len(ids),
                    bytes=sum(len(text.encode()) for text in texts[split]),
                )
        for split, writer in writers.items():
            written = writer.close()
            shard = TokenShard(
                split=split,
                stem=f"{split}-{unit.index:05d}",
                counts=counts[split],
                bin_sha256=written.bin_sha256,
                idx_sha256=written.idx_sha256,
            )
            _put(asides[split], out / shard.stem, keep=written.sequences > 0)
            if written.sequences:
                shards.append(shard)
    fsync_folder(out)
    marker = UnitMarker(
        key=key, shards=tuple(shards), skipped=bad.count, empty=empty, problems=tuple(bad.examples)
    )
    write_atomically(marker_path(out, unit.index), marker.model_dump_json(indent=1) + "\n")


def _put(aside: Path, stem: Path, *, keep: bool) -> None:
    for suffixed in (bin_path, idx_path):
        if keep:
            suffixed(aside).replace(suffixed(stem))
        else:
            suffixed(aside).unlink()
