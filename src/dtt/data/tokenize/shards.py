"""Encoding of units of work: each becomes one shard per split, and a marker once it is on disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import ParamSpec, Self, TypeVar

from dtt.artifacts.manifests import LostText, SplitCounts, TokenShard
from dtt.base.files import fsync_folder
from dtt.base.log import Advance
from dtt.config.data import TokenizeConfig
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.document_sampling import held_out
from dtt.data.corpus.units import Unit
from dtt.data.text.unit_encoder import D, EncodedPart, UnitEncoder
from dtt.data.token_file import TokenFileWriter
from dtt.data.tokenize.markers import (
    SPLITS,
    WORK,
    Split,
    UnitMarker,
    hashed_files,
    states,
    write_marker,
)
from dtt.data.tokenize.work_plan import Plan

T = TypeVar("T")
P = ParamSpec("P")

QUEUED = 8
"""Maximum number of encoded batches that wait for the disk: a few megabytes."""


def encode_units(
    plan: Plan,
    units: list[Unit],
    encoder: UnitEncoder[D],
    cfg: TokenizeConfig,
    cores: int,
    advance: Advance,
) -> int:
    """Write the shards of some units of `plan`, each with a marker after it; return bytes of text.

    `cores` is the number of cores of this rank alone. With more than one, documents are read and
    decoded ahead in a second thread; on a single core the threads would only alternate. Shards are
    written by another thread. `advance` is called with the bytes of each batch.

    The content of the shards depends only on the unit, the selection of the corpus, the tokenizer
    and `cfg.validation_fraction`. Memory use is a few batches, regardless of the size of files and
    units.
    """
    splits = SPLITS if cfg.validation_fraction else SPLITS[:1]
    stop = cfg.on_bad_document == "stop"
    text_bytes = 0
    with ExitStack() as files, ThreadPoolExecutor(1) as reader, BackgroundWriter(QUEUED) as disk:

        def read() -> Iterator[tuple[_UnitShards, list[D] | None]]:
            for unit in units:
                shards = _UnitShards(plan, unit.index, splits, encoder, stop)
                # Closed also if a later batch fails: half-written files must not look complete.
                files.enter_context(shards.open_files)
                for batch in encoder.read(plan.corpus, unit, shards.bad):
                    yield shards, batch
                yield shards, None

        for shards, batch in ahead(read(), reader) if cores > 1 else read():
            if batch is None:
                disk.do(shards.finish)
                continue
            # Bytes decide about the split, before encoding: the split must not depend on the
            # tokenizer.
            contents = [encoder.content(document) for document in batch]
            divided = _divided(batch, contents, cfg.validation_fraction)
            for split, documents in divided.items():
                part = encoder.encode(documents, shards.refused)
                text_bytes += part.text_bytes
                disk.do(shards.append, split, part)
            shards.empty += contents.count(b"")
            shards.blank += sum(map(bytes.isspace, contents))
            advance(sum(map(len, contents)))
    return text_bytes


def _divided(
    batch: list[D], contents: list[bytes], validation_fraction: float
) -> dict[Split, list[D]]:
    """Return the documents of each split, by a hash of their contents; empty ones are left out."""
    # An empty document would be an end-of-document token alone.
    documents = [pair for pair in zip(batch, contents, strict=True) if pair[1]]
    if not validation_fraction:
        return {"train": [document for document, _ in documents]}
    divided: dict[Split, list[D]] = {"train": [], "validation": []}
    for document, content in documents:
        split: Split = "validation" if held_out(content, validation_fraction) else "train"
        divided[split].append(document)
    return divided


class _UnitShards:
    """The shards of one unit, written to temporary files until they are complete."""

    def __init__(
        self,
        plan: Plan,
        unit: int,
        splits: tuple[Split, ...],
        encoder: UnitEncoder[D],
        stop: bool,
    ) -> None:
        self.bad = BadDocuments(stop=stop)
        """Documents that could not be read."""
        self.refused = BadDocuments(stop=stop, what="a row is refused")
        """Rows that the encoder refused. Separate, because the reader may be one batch ahead."""
        self._plan, self._unit = plan, unit
        (plan.out / WORK).mkdir(parents=True, exist_ok=True)
        self._asides = {split: plan.out / WORK / f"{unit:05d}.{split}" for split in splits}
        self.open_files = ExitStack()
        """Closes the writers that are still open when it is left."""
        self._writers = {
            split: self.open_files.enter_context(
                TokenFileWriter(aside, encoder.vocab_size, has_mask=encoder.has_mask)
            )
            for split, aside in self._asides.items()
        }
        self._counts = dict.fromkeys(splits, SplitCounts())
        self.empty = self.blank = 0
        """Documents without any text, and with white space only."""
        self.lost = LostText()

    def append(self, split: Split, part: EncodedPart) -> None:
        self._writers[split].append(part.ids, part.lengths, part.mask)
        self._counts[split] += part.counts
        self.lost += part.lost or LostText()

    def finish(self) -> None:
        """Move the shards to their final paths, then write the marker."""
        # Writers flush and close first, so that the hashes are those of complete files.
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
                mask_sha256=written.mask_sha256,
            )
            # A unit may have no held-out document; then there is no file.
            _put(self._asides[split], self._plan.out / stem, shard, keep=written.sequences > 0)
            if written.sequences:
                shards.append(shard)
        # Before the marker: after a power failure, a marker must not name missing files.
        fsync_folder(self._plan.out)
        marker = UnitMarker(
            key=self._plan.key.fingerprint,
            shards=tuple(shards),
            skipped=self.bad.count,
            refused=dict(self.refused.reasons),
            unread=dict(self.refused.unread),
            replaced=self.bad.replaced,
            nulls=self.refused.nulls,
            empty=self.empty,
            blank=self.blank,
            lost_bytes=self.bad.lost_bytes,
            lost=self.lost if self.lost.of else None,
            problems=(*self.bad.examples, *self.refused.examples),
        )
        out = self._plan.out
        made = [path for s in shards for path, _ in hashed_files(out / s.stem, s)]
        write_marker(out, self._unit, marker, states(made))


def _put(aside: Path, stem: Path, shard: TokenShard, *, keep: bool) -> None:
    names = zip(hashed_files(aside, shard), hashed_files(stem, shard), strict=True)
    for (old, _), (new, _) in names:
        if keep:
            old.replace(new)
        else:
            old.unlink()


def ahead(items: Iterator[T], reader: Executor) -> Iterator[T]:
    """Yield `items`; `reader` computes each while the caller uses the previous one.

    No item may be None.
    """
    # None marks the end, because StopIteration cannot pass through a future.
    coming = reader.submit(next, items, None)
    while (item := coming.result()) is not None:
        coming = reader.submit(next, items, None)
        yield item


class BackgroundWriter:
    """A background thread that executes actions in order.

    After an error no further action is executed, and a later call of `do` raises the error. Leaving
    the context manager waits for all actions; on an exception, actions that have not started are
    dropped.
    """

    def __init__(self, depth: int) -> None:
        """Allow `depth` unfinished actions; with more, `do` blocks until the oldest is done."""
        self._depth = depth
        self._thread = ThreadPoolExecutor(1)
        self._waiting: deque[Future[None]] = deque()
        self._failed = False

    def do(self, action: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call `action` later, in the background thread."""
        # Bounds memory: a slow disk makes the encoder wait instead of collecting batches.
        self._finish(self._depth)
        self._waiting.append(self._thread.submit(self._try, partial(action, *args, **kwargs)))

    def _try(self, action: Callable[[], None]) -> None:
        # Actions after a failed one would write to a broken file.
        if self._failed:
            return
        try:
            action()
        # Also KeyboardInterrupt: the next action must not run.
        except BaseException:
            self._failed = True
            raise

    def _finish(self, left: int) -> None:
        while len(self._waiting) > left:
            self._waiting.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is None:
                self._finish(0)
        finally:
            # Waits for the action in progress, drops the others.
            self._thread.shutdown(cancel_futures=True)
