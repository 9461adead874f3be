"""Tokenization of a corpus by any number of ranks; the result does not depend on their number.

The ranks agree on a plan: the tokenizer, the units and which of them are finished. Each rank
encodes its share of the units, one at a time: a unit becomes one shard per split, and a marker once
these are on disk. Rank 0 then collects the units' markers into the manifest. If the process is
killed at any moment, the same command resumes with the units that have no marker.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np

from dtt.artifacts.manifests import LostText, TokenShard, TokensManifest
from dtt.base.errors import DamagedError, InputError
from dtt.base.files import (
    check_space,
    exclusive,
    fsync_folder,
    patience_of_step,
    write_atomically,
)
from dtt.base.log import Advance, log, progress
from dtt.config.clean import CleanConfig
from dtt.config.data import Engine, TokenizeConfig, TokenizerConfig
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.document_sampling import held_out, nothing_usable
from dtt.data.corpus.units import Unit
from dtt.data.text.unencodable import check_lost
from dtt.data.text.unit_encoder import D, DocumentKind, EncodedPart, PlainText, UnitEncoder
from dtt.data.token_file import TokenFileWriter, token_dtype
from dtt.data.tokenize.markers import (
    SPLITS,
    WORK,
    Split,
    UnitMarker,
    hashed_files,
    marker_path,
    read_marker,
    states,
    write_marker,
)
from dtt.data.tokenize.work_plan import TOKENIZER, Plan, clear, make_plan
from dtt.mesh.comm import Comm

T = TypeVar("T")
P = ParamSpec("P")

BYTES_PER_TOKEN = 2.5
"""Cautious (low) estimate of bytes of text per token, to check the free disk space in advance."""


@dataclass(frozen=True)
class Tokenized:
    """The result of `tokenize`, available on rank 0."""

    manifest: TokensManifest
    problems: tuple[str, ...] = ()
    """`file:line: why` of some documents that were skipped."""
    units: int = 0
    """Number of units that this run encoded; 0 if everything was finished before."""
    text_bytes: int = 0
    """UTF-8 bytes of the text that all ranks encoded in this run."""
    engine: Engine | None = None
    """The engine that encoded them; None if nothing was encoded."""
    seconds: float = 0.0
    """Wall-clock time from the first unit to the manifest."""


def tokenize(
    cfg: TokenizeConfig,
    tokenizer: TokenizerConfig,
    corpus_folder: Path,
    out: Path,
    comm: Comm,
    *,
    kind: DocumentKind | None = None,
    clean: CleanConfig | None = None,
    overwrite: bool = False,
) -> Tokenized | None:
    """Write the token files of a corpus into `out`; collective, rank 0 gets the result.

    The documents are of `kind`, None means text, without those that `dtt clean` removed by `clean`.

    Raises InputError if the corpus or one of its splits has no documents, ConfigError if `out`
    contains the token files of a different corpus, tokenizer or options and `overwrite` is not
    given, and DamagedError for an unreadable document if `tokenize.on_bad_document` is `stop`.
    """
    # Before the tokenizer is loaded: its threads read the variables once.
    cores = _share_cores(comm)
    kind, first = kind or PlainText(cfg.engine), comm.rank == 0
    # One process per folder; rank 0 holds the lock for all its ranks.
    with exclusive(out, "dtt tokenize", patience_of_step()) if first else nullcontext():
        plan = make_plan(
            cfg, tokenizer, corpus_folder, out, comm, kind, clean=clean, overwrite=overwrite
        )
        if plan.complete:
            if not first:
                return None
            manifest = TokensManifest.read(out)
            found = map(partial(_marker, plan), plan.units if manifest.left_out else ())
            problems = tuple(problem for marker in found if marker for problem in marker.problems)
            _check_left_out(cfg, manifest, problems)
            return Tokenized(manifest, problems)
        encoder = kind.open(tokenizer, out / TOKENIZER, plan.key.key_parts)
        encoder.choose_engine(plan.corpus, plan.units, comm)
        one_core = encoder.engine == "gigatoken" or encoder.chat is not None
        if comm.size == 1 and cores > 1 and one_core and len(plan.pending) > 1:
            log.info("one process encodes on one core of %d: mpirun -n %d dtt …", cores, cores)
        if first:
            token_bytes = np.dtype(token_dtype(encoder.vocab_size)).itemsize + encoder.has_mask
            pending = sum(plan.units[index].text_bytes for index in plan.pending)
            check_space(out, int(pending / BYTES_PER_TOKEN * token_bytes), "the token files")
        start = time.monotonic()
        units = plan.share(comm.rank, comm.size)
        # Of rank 0 alone: all ranks have about as much to do.
        with progress("tokenizing", sum(u.text_bytes for u in units), shown=first) as advance:
            encoded = encode_units(plan, units, encoder, cfg, cores, advance)
        # A gather is also a barrier: all units have their markers after it.
        text_bytes = sum(comm.gather(encoded))
        done = None
        if first:
            manifest, problems = _finish(cfg, plan, encoder)
            took = time.monotonic() - start
            count, engine = len(plan.pending), encoder.engine
            done = Tokenized(manifest, problems, count, text_bytes, engine, took)
        comm.barrier()  # MPI may end rank 0 in the middle of its manifest when others exit
        return done


def _share_cores(comm: Comm) -> int:
    """Divide the available cores among the ranks that share them; return this rank's number.

    Without this, `tokenizers` would start a thread per core in every rank. Ranks that are bound to
    different cores do not share them.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = os.sched_getaffinity(0)
    else:
        cores = set(range(os.cpu_count() or 1))
    mine = [socket.gethostname(), sorted(cores)]
    threads = max(1, len(cores) // comm.gather(mine).count(mine))
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true" if threads > 1 else "false")
    return threads


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
    written: Future[None] | None = None
    with ExitStack() as files, ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as disk:

        def write(action: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
            nonlocal written
            # After an error nothing more is written, and a slow disk makes the encoder wait.
            if written is not None:
                written.result()
            written = disk.submit(action, *args, **kwargs)

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
                write(shards.finish)
                continue
            # Bytes decide about the split, before encoding: the split must not depend on the
            # tokenizer.
            contents = [encoder.content(document) for document in batch]
            divided = _divided(batch, contents, cfg.validation_fraction)
            for split, documents in divided.items():
                part = encoder.encode(documents, shards.refused)
                text_bytes += part.text_bytes
                write(shards.append, split, part)
            shards.empty += contents.count(b"")
            shards.blank += sum(map(bytes.isspace, contents))
            advance(sum(map(len, contents)))
        if written is not None:
            written.result()
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
        work = plan.out / WORK
        work.mkdir(parents=True, exist_ok=True)
        self._asides = {split: work / f"{unit:05d}.{split}" for split in splits}
        self.open_files = ExitStack()
        """Closes the writers that are still open when it is left."""
        self._writers = {
            split: self.open_files.enter_context(
                TokenFileWriter(aside, encoder.vocab_size, has_mask=encoder.has_mask)
            )
            for split, aside in self._asides.items()
        }
        self.empty = self.blank = 0
        """Documents without any text, and with white space only."""
        self.lost = LostText()

    def append(self, split: Split, part: EncodedPart) -> None:
        self._writers[split].append(part.ids, part.lengths, part.mask, part.text_bytes)
        self.lost += part.lost or LostText()

    def finish(self) -> None:
        """Move the shards to their final paths, then write the marker."""
        # Writers flush and close first, so that the hashes are those of complete files.
        with self.open_files:
            written = [w.close(s, f"{s}-{self._unit:05d}") for s, w in self._writers.items()]
        out = self._plan.out
        # A unit may have no held-out document; then there is no file.
        shards = [shard for shard in written if shard.counts.documents]
        for shard in written:
            _put(self._asides[shard.split], out / shard.stem, shard, keep=shard in shards)
        # Before the marker: after a power failure, a marker must not name missing files.
        fsync_folder(out)
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


def _finish(
    cfg: TokenizeConfig, plan: Plan, encoder: UnitEncoder[Any]
) -> tuple[TokensManifest, tuple[str, ...]]:
    """Write the manifest; return it and the locations of some unreadable documents."""
    corpus, markers = plan.corpus, list[UnitMarker]()
    for unit in plan.units:
        marker = _marker(plan, unit)
        if marker is None:
            raise DamagedError(
                "a finished unit is missing",
                where=marker_path(plan.out, unit.index),
                why="another process wrote to this folder or deleted from it",
                next="run the same command again",
            )
        markers.append(marker)
    lost = [marker.lost for marker in markers if marker.lost is not None]
    problems = tuple(problem for marker in markers for problem in marker.problems)
    refused = sum((Counter(marker.refused) for marker in markers), Counter())
    unread = sum((Counter(marker.unread) for marker in markers), Counter())
    manifest = TokensManifest(
        key=plan.key.fingerprint,
        key_parts=plan.key.key_parts,
        corpus=corpus.manifest.source,
        text=corpus.manifest.description(),
        tokenizer_sha256=plan.key.tokenizer_sha256,
        vocab_size=encoder.vocab_size,
        dtype=token_dtype(encoder.vocab_size),
        end_of_document=encoder.end_of_document,
        begin_of_document=encoder.begin_of_document,
        shards=tuple(shard for marker in markers for shard in marker.shards),
        skipped_documents=sum(marker.skipped for marker in markers),
        empty_documents=sum(marker.empty for marker in markers),
        blank_documents=sum(marker.blank for marker in markers),
        lost_bytes=sum(marker.lost_bytes for marker in markers),
        refused=dict(refused.most_common()),
        unread=dict(unread.most_common()),
        replaced_documents=sum(marker.replaced for marker in markers),
        nulls=sum(marker.nulls for marker in markers),
        lost=sum(lost, LostText()) if lost else None,
        chat=encoder.chat,
        pairs=encoder.pairs,
        selection=None if corpus.selection is None else corpus.selection.facts(),
    )
    check_lost(manifest.lost, plan.out / TOKENIZER)
    _check_left_out(cfg, manifest, problems)
    _check_splits(cfg, plan, manifest, problems)
    # Last: a folder with a manifest is complete.
    write_atomically(plan.out / TokensManifest.filename, manifest.dump())
    return manifest, problems


def _check_left_out(
    cfg: TokenizeConfig, manifest: TokensManifest, problems: tuple[str, ...]
) -> None:
    """Raise DamagedError if documents were left out but `tokenize.on_bad_document` is `stop`.

    An earlier run may have left them out under a different setting.
    """
    if manifest.left_out and cfg.on_bad_document == "stop":
        raise DamagedError(
            f"{manifest.left_out} documents cannot be read",
            where=problems[0] if problems else None,
            next="fix them, or skip them: tokenize.on_bad_document=skip",
        )


def _marker(plan: Plan, unit: Unit) -> UnitMarker | None:
    return read_marker(plan.out, unit.index, plan.key.fingerprint)


def _check_splits(
    cfg: TokenizeConfig, plan: Plan, manifest: TokensManifest, problems: tuple[str, ...]
) -> None:
    corpus = plan.corpus
    train, validation = (manifest.counts(split).documents for split in SPLITS)
    if manifest.blank_documents == train + validation:
        clear(plan.out)
        raise nothing_usable(
            corpus,
            manifest.left_out,
            problems,
            empty=manifest.empty_documents,
            blank=manifest.blank_documents,
            refused=bool(manifest.refused),
        )
    if train == 0 or (validation == 0 and cfg.validation_fraction > 0):
        clear(plan.out)  # the files are unusable for any other validation fraction
        enough = min(0.3, max(10 / (train + validation), 0.01))
        raise InputError(
            f"no document fell into the {'validation' if train else 'train'} split",
            where=corpus.folder,
            why=f"{train + validation} documents, of which "
            f"tokenize.validation_fraction={cfg.validation_fraction:g} are held out",
            next=(
                f"tokenize.validation_fraction={enough:.2g}, or 0 to hold out none"
                if train + validation > 1
                else "tokenize.validation_fraction=0 holds out none"
            )
            + (
                "; download.txt_documents=line makes more documents of text files"
                if corpus.manifest.file_format == "txt"
                else ""
            ),
        )
