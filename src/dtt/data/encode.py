"""Tokenize a corpus with any number of ranks, so that the result does not tell how many.

Rank 0 plans: the tokenizer, the units, which of them are finished. The ranks encode their shares,
unit by unit. Rank 0 gathers what the markers say into the manifest. Killed at any moment, the same
command goes on with the units that have no marker.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dtt.artifacts import TokensManifest
from dtt.config.data import GivenTokenizerConfig, TokenizeConfig, TokenizerConfig
from dtt.data.corpus import Corpus, Unit
from dtt.data.documents import BadDocuments
from dtt.data.plan import TOKENIZER, Plan, clear, make_plan
from dtt.data.shards import UnitMarker, encode_unit, marker_path, read_marker
from dtt.data.tokenfile import token_dtype
from dtt.data.tokenizer import Encoder
from dtt.errors import DamagedError, InputError
from dtt.runtime.comm import Comm
from dtt.runtime.files import check_space, exclusive, write_atomically
from dtt.runtime.log import progress

BYTES_PER_TOKEN = 2.5
"""Cautious, to see beforehand whether the token files have room."""


@dataclass(frozen=True)
class Tokenized:
    """What rank 0 knows at the end."""

    manifest: TokensManifest
    problems: tuple[str, ...] = ()
    """`file:line: why` of some documents that were skipped."""
    units: int = 0
    """Units that this run encoded; none when all was done before."""
    text_bytes: int = 0
    """UTF-8 bytes that this run encoded …"""
    seconds: float = 0.0
    """… in so much time, tokenizer training left out."""


def tokenize(
    cfg: TokenizeConfig,
    tokenizer: TokenizerConfig,
    corpus_folder: Path,
    out: Path,
    comm: Comm,
    *,
    overwrite: bool = False,
) -> Tokenized | None:
    """Write the token files of a corpus into `out`; every rank calls this, rank 0 gets the result.

    Raises InputError for a corpus without documents or a split without any, ConfigError when
    `out` holds something else and `overwrite` is not given, DamagedError for a document that
    cannot be read where the configuration says `stop`.
    """
    _share_cores(comm)
    first = comm.rank == 0
    with exclusive(out, "dtt tokenize") if first else nullcontext():
        corpus = Corpus(corpus_folder)
        plan = comm.broadcast(
            make_plan(cfg, tokenizer, corpus, out, overwrite=overwrite) if first else None
        )
        assert plan is not None
        if plan.complete:
            return Tokenized(TokensManifest.read(out)) if first else None
        encoder = _open_encoder(tokenizer, out)
        if first:
            _check_space(out, plan, encoder)
        start = time.monotonic()
        with _progress_of_all(out, plan.pending, shown=first):
            for unit in plan.share(comm.rank, comm.size):
                encode_unit(
                    corpus,
                    unit,
                    encoder,
                    out,
                    key=plan.begun.key,
                    validation_fraction=cfg.validation_fraction,
                    bad=BadDocuments(stop=cfg.on_bad_document == "stop"),
                )
            comm.barrier()
        seconds = time.monotonic() - start
        result = _finish(cfg, corpus, out, plan, encoder, seconds) if first else None
        comm.barrier()
        return result


def _share_cores(comm: Comm) -> None:
    """Give each rank its part of the cores that it may use: `tokenizers` would take them all.

    Ranks that are bound to cores of their own share them with nobody.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = frozenset(os.sched_getaffinity(0))
    else:
        cores = frozenset(range(os.cpu_count() or 1))
    mine = (socket.gethostname(), cores)
    threads = max(1, len(cores) // comm.gather(mine).count(mine))
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true" if threads > 1 else "false")


def _open_encoder(tokenizer: TokenizerConfig, out: Path) -> Encoder:
    path = out / TOKENIZER
    if isinstance(tokenizer, GivenTokenizerConfig):
        return Encoder(path.read_bytes(), tokenizer.end_of_document, tokenizer.path)
    return Encoder(path.read_bytes(), tokenizer.special_tokens[0], path)


def _check_space(out: Path, plan: Plan, encoder: Encoder) -> None:
    text_bytes = sum(unit.text_bytes for unit in plan.pending)
    token_bytes = np.dtype(token_dtype(encoder.vocab_size)).itemsize
    check_space(out, int(text_bytes / BYTES_PER_TOKEN * token_bytes), "the token files")


@contextmanager
def _progress_of_all(out: Path, units: list[Unit], *, shown: bool) -> Iterator[None]:
    """Show how many of `units` all ranks together have finished, by looking at their markers."""
    stop = threading.Event()

    def watch() -> None:
        missing = {marker_path(out, unit.index): unit.text_bytes for unit in units}
        with progress("tokenizing", sum(missing.values())) as advance:
            while not stop.wait(0.5):
                for path in [path for path in missing if path.exists()]:
                    advance(missing.pop(path))

    watcher = threading.Thread(target=watch, daemon=True)
    if shown:
        watcher.start()
    try:
        yield
    finally:
        stop.set()
        if shown:
            watcher.join()


def _finish(
    cfg: TokenizeConfig, corpus: Corpus, out: Path, plan: Plan, encoder: Encoder, seconds: float
) -> Tokenized:
    markers = _all_markers(out, plan)
    problems = tuple(problem for marker in markers for problem in marker.problems)
    skipped = sum(marker.skipped for marker in markers)
    if skipped and cfg.on_bad_document == "stop":
        raise DamagedError(
            f"{skipped} documents cannot be read",
            where=problems[0],
            next="mend them, or leave them out: tokenize.on_bad_document=skip",
        )
    manifest = TokensManifest(
        key=plan.begun.key,
        key_parts=plan.begun.key_parts,
        corpus=corpus.manifest.source,
        tokenizer_sha256=plan.begun.tokenizer_sha256,
        vocab_size=encoder.vocab_size,
        dtype=token_dtype(encoder.vocab_size),
        end_of_document=encoder.end_of_document,
        shards=tuple(shard for marker in markers for shard in marker.shards),
        skipped_documents=skipped,
        empty_documents=sum(marker.empty for marker in markers),
    )
    _check_splits(cfg, corpus, out, manifest, problems)
    write_atomically(out / TokensManifest.filename, manifest.dump())
    made = {unit.index for unit in plan.pending}
    return Tokenized(
        manifest,
        problems,
        units=len(made),
        text_bytes=sum(
            shard.counts.bytes
            for unit, marker in zip(plan.units, markers, strict=True)
            if unit.index in made
            for shard in marker.shards
        ),
        seconds=seconds,
    )


def _all_markers(out: Path, plan: Plan) -> list[UnitMarker]:
    markers = []
    for unit in plan.units:
        marker = read_marker(out, unit.index, plan.begun.key)
        if marker is None:
            raise DamagedError(
                "a finished unit has vanished",
                where=marker_path(out, unit.index),
                why="something else wrote or deleted in this folder",
                next="run the same command again",
            )
        markers.append(marker)
    return markers


def _check_splits(
    cfg: TokenizeConfig,
    corpus: Corpus,
    out: Path,
    manifest: TokensManifest,
    problems: tuple[str, ...],
) -> None:
    train, validation = (manifest.counts(split).documents for split in ("train", "validation"))
    if train + validation == 0:
        clear(out)
        raise InputError(
            "the corpus holds no documents",
            where=corpus.folder,
            why=f"{manifest.skipped_documents} could not be read, such as {problems[0]}"
            if problems
            else "all of its files are empty",
            next="dtt download -d DATASET",
        )
    if train == 0 or (validation == 0 and cfg.validation_fraction > 0):
        clear(out)  # what is there serves no other fraction
        enough = min(0.3, max(10 / (train + validation), 0.01))
        raise InputError(
            f"no document fell into the {'validation' if train else 'train'} split",
            where=corpus.folder,
            why=f"{train + validation} documents, of which "
            f"tokenize.validation_fraction={cfg.validation_fraction:g} are held out",
            next=f"tokenize.validation_fraction={enough:.2g}, or 0 to hold out none"
            + (
                "; download.txt_documents=line makes more documents of text files"
                if corpus.manifest.file_format == "txt"
                else ""
            ),
        )
