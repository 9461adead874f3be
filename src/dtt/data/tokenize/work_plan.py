"""The plan of a tokenization run: the tokenizer, the units, and which of them are finished."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from dtt.artifacts.manifest import fingerprint
from dtt.artifacts.manifests import CHAT_TEMPLATE, TokensManifest
from dtt.base.errors import ConfigError, InputError
from dtt.base.files import sha256_file, write_atomically
from dtt.base.log import log, progress
from dtt.base.reading import read_small
from dtt.base.rendezvous import RENDEZVOUS
from dtt.config.clean import CleanConfig
from dtt.config.data import (
    GivenTokenizerConfig,
    TokenizeConfig,
    TokenizerConfig,
    TrainedTokenizerConfig,
)
from dtt.config.source import shown
from dtt.data.corpus.document_sampling import HELD_OUT_BY, tokenizer_sample
from dtt.data.corpus.selection import content_key
from dtt.data.corpus.units import Corpus, Unit
from dtt.data.corpus.usable import check_usable
from dtt.data.text.tokenizer import given_tokenizer, train_tokenizer
from dtt.data.text.unit_encoder import DocumentKind
from dtt.data.tokenize.markers import WORK, Identity, marker_path
from dtt.data.tokenize.verification import NOT_MADE, Fault, find_faults, sound_manifest
from dtt.mesh.comm import Comm

TOKENIZER = "tokenizer.json"
SPECIAL_TOKENS_IN_TEXT = "encoded as text"
REDONE = "their units are encoded again"
RETRAINED = "the tokenizer is trained again; if it becomes another one, all units are encoded again"
SHOWN = 10
"""Maximum number of units to encode again that are logged."""


@dataclass(frozen=True)
class WorkPlan:
    """The units to encode, independent of the number of ranks."""

    identity: Identity
    units: list[Unit]
    pending: list[Unit]
    """Units that are not finished."""
    complete: bool
    """True if the manifest exists and everything that it names is complete."""

    def shares(self, size: int) -> list[list[Unit]]:
        """Return the units of each of `size` ranks.

        Units are assigned in decreasing order of size, each to the rank with the least work so far.
        """
        shares: list[list[Unit]] = [[] for _ in range(size)]
        loads = [(0, rank) for rank in range(size)]
        for unit in sorted(self.pending, key=lambda unit: (-unit.text_bytes, unit.index)):
            load, least = loads[0]
            shares[least].append(unit)
            heapq.heapreplace(loads, (load + unit.text_bytes, least))
        return shares


@dataclass(frozen=True)
class Cut:
    """A corpus divided into units, identical on all ranks."""

    corpus: Corpus
    unit_bytes: int
    units: list[Unit]

    @property
    def removals(self) -> list[str | None]:
        """The hash of what the selection removes from each unit; None: nothing."""
        selection = self.corpus.selection
        return [None] * len(self.units) if selection is None else selection.removals


def cut_corpus(
    cfg: TokenizeConfig,
    clean: CleanConfig | None,
    folder: Path,
    comm: Comm,
    there: Identity | None = None,
) -> Cut:
    """Open a corpus and its selection, if there is a section `clean`, and divide it; collective.

    Without `tokenize.unit_bytes` and a selection, the units are those of the token files `there`,
    which earlier versions of dtt may have made with another default.

    Raises InputError if the corpus is empty or has not been cleaned, and ConfigError if
    `tokenize.unit_bytes` is not the selection's.
    """
    corpus = Corpus(folder, comm=comm, clean=clean)
    if corpus.selection is not None and cfg.unit_bytes not in (None, corpus.unit_bytes()):
        raise ConfigError(
            f"tokenize.unit_bytes={cfg.unit_bytes} is not the size of the selection's units",
            where=corpus.selection.folder,
            why="a selection numbers documents by unit, so the units must be the same",
            next=f"tokenize.unit_bytes={corpus.unit_bytes()}, or omit it",
        )
    unit_bytes = cfg.unit_bytes or corpus.unit_bytes()
    if there is not None and cfg.unit_bytes is None and corpus.selection is None:
        unit_bytes = there.key_parts.get("tokenize", {}).get("unit_bytes", unit_bytes)
    units = corpus.units(unit_bytes)
    if not units and comm.rank == 0:
        raise InputError("the corpus contains no documents", where=folder)
    comm.barrier()  # if rank 0 raises, the others wait here until they are terminated
    return Cut(corpus, unit_bytes, units)


def make_work_plan(
    cfg: TokenizeConfig,
    tokenizer: TokenizerConfig,
    corpus_folder: Path,
    out: Path,
    comm: Comm,
    kind: DocumentKind,
    *,
    clean: CleanConfig | None = None,
    overwrite: bool = False,
) -> tuple[Corpus, WorkPlan]:
    """Prepare `out`, which then contains its tokenizer, and return the corpus and plan; collective.

    With `overwrite`, existing token files are removed first. If only the selection has changed, the
    units from which the same documents are removed are kept.

    Raises ConfigError if `out` contains token files of a different corpus, tokenizer or options,
    and InputError if the corpus is empty. The documents of the corpus are of `kind`.
    """
    there = None if overwrite else shared_identity(out, comm)
    cut = cut_corpus(cfg, clean, corpus_folder, comm, there)
    if overwrite:
        clear(cfg, out)
        comm.barrier()
    identity = _prepare(cfg, tokenizer, cut, out, comm, kind)
    faults = find_faults(out, identity, cut.removals, comm)
    complete = comm.broadcast(is_complete(out, identity, cut, faults))
    if complete:
        return cut.corpus, WorkPlan(identity, cut.units, [], complete=True)
    if comm.rank == 0:
        _tidy(out, faults)
    comm.barrier()
    pending = [unit for unit in cut.units if unit.index in faults]
    return cut.corpus, WorkPlan(identity, cut.units, pending, complete=False)


def is_complete(out: Path, identity: Identity, cut: Cut, faults: dict[int, Fault]) -> bool:
    """Return True if `out` has a manifest for this content, and all that it names is intact."""
    manifest, selection = sound_manifest(out), cut.corpus.selection
    return (
        manifest is not None
        and manifest.key == identity.folder_key
        and manifest.selection == (None if selection is None else selection.facts())
        and all(fault.intact for fault in faults.values())
    )


def local_folder(cfg: TokenizeConfig, out: Path) -> Path:
    """Return the folder for this node's shards: below `tokenize.local` if it is set, else `out`.

    The folder name below `tokenize.local` contains a hash of the full path of `out`, because
    several folders may be called `tokens`.
    """
    if cfg.local is None:
        return out
    return (cfg.local / f"{out.name}-{fingerprint(str(out.absolute()))[:8]}").absolute()


def clear(cfg: TokenizeConfig, out: Path) -> None:
    """Remove everything that `tokenize` writes, the manifest first.

    Several ranks may call this concurrently.
    """
    (out / TokensManifest.filename).unlink(missing_ok=True)
    for folder in {out, local_folder(cfg, out)}:
        work = (path for path in (folder / WORK).glob("*") if path.name != RENDEZVOUS)
        for path in (*work, *_shard_files(folder)):
            path.unlink(missing_ok=True)
    for name in (TOKENIZER, CHAT_TEMPLATE):
        (out / name).unlink(missing_ok=True)


def _shard_files(folder: Path) -> Iterator[Path]:
    for split in ("train", "validation"):
        for suffix in ("bin", "idx", "mask"):
            yield from folder.glob(f"{split}-*.{suffix}")


def _prepare(
    cfg: TokenizeConfig,
    tokenizer: TokenizerConfig,
    cut: Cut,
    out: Path,
    comm: Comm,
    kind: DocumentKind,
) -> Identity:
    """Return the identity of the token files in `out`, after its tokenizer is in place; collective.

    Trains or copies the tokenizer if it is missing or damaged. Raises ConfigError if `out` is for
    different content.
    """
    identity, content, asked, removed = None, None, {}, content_key(cut.removals)
    if comm.rank == 0:
        content = given_content(tokenizer)
        identity = read_identity(out)
        asked = key_parts(cfg, tokenizer, cut, content, kind, identity)
        if identity is not None and (refused := refusals(cfg, identity, asked)):
            raise ConfigError(
                "the folder contains token files of other text or settings",
                where=out,
                why="; ".join(refused),
                next="specify another folder: tokenize.out=FOLDER, or replace what is there: "
                "--overwrite",
            )
        if identity is not None and identity.key_parts != asked:
            log.info("encoded again: the selection divides the corpus into other units")
            clear(cfg, out)
            identity = None
        elif identity is not None and identity.removed != removed:
            log.info(
                "other documents are removed now: %s", RETRAINED if content is None else REDONE
            )
            # First: it names the tokenizer and the files that are replaced.
            (out / TokensManifest.filename).unlink(missing_ok=True)
            identity = None
        elif identity is not None and not holds(out / TOKENIZER, identity.tokenizer_sha256):
            identity = None
    # If rank 0 raises, the others wait in the next collective until they are terminated.
    if comm.rank == 0 and identity is None:
        if content is None:
            assert not isinstance(tokenizer, GivenTokenizerConfig)
            stop = cfg.on_bad_document == "stop"
            check_usable(cut.corpus, cut.units, stop_at_bad=stop)
            # On one rank: 100 MB take half a minute, once, and any number of ranks would need
            # the same tokenizer.
            content = trained(tokenizer, [cut], cfg.validation_fraction)
        write_atomically(out / TOKENIZER, content)
        digest = hashlib.sha256(content).hexdigest()
        identity = Identity(key_parts=asked, tokenizer_sha256=digest, removed=removed)
        write_atomically(_identity_path(out), identity.model_dump_json(indent=1) + "\n")
    for name, text in kind.files().items() if comm.rank == 0 else ():
        if not holds(out / name, hashlib.sha256(text.encode()).hexdigest()):
            write_atomically(out / name, text)
    return Identity.model_validate(comm.broadcast(identity.model_dump() if identity else None))


def _tidy(out: Path, faults: dict[int, Fault]) -> None:
    """Remove leftovers of a killed run, and the markers and files of units to encode again.

    The files must be removed because the new ones may be written elsewhere, to a node's local disk.
    """
    for torn in [*out.glob(".*.tmp"), *(out / WORK).glob(".*.tmp")]:
        torn.unlink()
    (out / TokensManifest.filename).unlink(missing_ok=True)
    redone = {unit: fault for unit, fault in faults.items() if fault.why != NOT_MADE}
    for unit in redone:
        marker_path(out, unit).unlink(missing_ok=True)
    stale = {f"{split}-{unit:05d}" for unit in faults for split in ("train", "validation")}
    for path in _shard_files(out):
        if path.stem in stale:
            path.unlink(missing_ok=True)
    for unit, fault in islice(redone.items(), SHOWN):
        log.info("unit %d will be encoded again: %s", unit, fault.why)
    if len(redone) > SHOWN:
        log.info("… and %d more", len(redone) - SHOWN)


def given_content(tokenizer: TokenizerConfig) -> bytes | None:
    """Return the content of the given tokenizer.json, or None if the tokenizer is to be trained."""
    return given_tokenizer(tokenizer) if isinstance(tokenizer, GivenTokenizerConfig) else None


def key_parts(
    cfg: TokenizeConfig,
    tokenizer: TokenizerConfig,
    cut: Cut,
    given: bytes | None,
    kind: DocumentKind,
    there: Identity | None,
) -> dict[str, Any]:
    """Return everything that determines the content of token files, by name.

    `there` is the identity of the token files in the folder.
    """
    return {
        "corpus": {"sha256": cut.corpus.manifest.content_key()},
        "tokenizer": tokenizer_key(tokenizer, given),
        "tokenize": {
            "validation_fraction": cfg.validation_fraction,
            "unit_bytes": cut.unit_bytes,
            "special_tokens_in_text": SPECIAL_TOKENS_IN_TEXT,
            "held_out_by": HELD_OUT_BY,
        },
        **kind.key_parts(tokenizer, None if there is None else there.key_parts),
    }


def tokenizer_key(tokenizer: TokenizerConfig, given: bytes | None) -> dict[str, Any]:
    """Return the inputs that determine the tokenizer: its training options, or its sha256."""
    facts = tokenizer.model_dump(mode="json")
    if given is not None:
        del facts["path"], facts["revision"], facts["bos"]  # `kind` has the token that it leads to
        facts["sha256"] = hashlib.sha256(given).hexdigest()
    elif not facts["chat_tokens"]:
        del facts["chat_tokens"]  # so that earlier token files of text keep their key
    return facts


def _identity_path(out: Path) -> Path:
    return out / WORK / "identity.json"


def read_identity(out: Path) -> Identity | None:
    """Return the identity of the token files in `out`, or None if `tokenize` has not started."""
    manifest = sound_manifest(out)
    if manifest is not None:
        return Identity(
            key_parts=manifest.key_parts,
            tokenizer_sha256=manifest.tokenizer_sha256,
            removed=None if manifest.selection is None else manifest.selection.content,
        )
    try:
        return Identity.model_validate_json(read_small(_identity_path(out)))
    except (FileNotFoundError, ValueError):
        return None


def shared_identity(out: Path, comm: Comm) -> Identity | None:
    """Return what rank 0 reads with `read_identity`; collective."""
    there = read_identity(out) if comm.rank == 0 else None
    facts = comm.broadcast(there.model_dump() if there else None)
    return None if facts is None else Identity.model_validate(facts)


def holds(path: Path, sha256: str) -> bool:
    """Return True if the file `path` exists and has this sha256."""
    return path.is_file() and sha256_file(path) == sha256


def trained(
    tokenizer: TrainedTokenizerConfig, cuts: Sequence[Cut], validation_fraction: float
) -> bytes:
    """Train a tokenizer on corpora, in proportion to their sizes; return its tokenizer.json."""
    sizes = [sum(unit.text_bytes for unit in cut.units) for cut in cuts]
    total = min(tokenizer.train_bytes, sum(sizes))
    log.info("training a tokenizer of %d entries on %.1f MB", tokenizer.vocab_size, total / 1e6)
    with progress("reading for the tokenizer", total) as advance:
        parts = [
            # Rounded up, so that a corpus with an estimated size of 0 has a part.
            -(-tokenizer.train_bytes * max(size, 1) // max(sum(sizes), 1))
            for size in sizes
        ]
        samples = (
            tokenizer_sample(cut.corpus, cut.units, part, validation_fraction, advance)
            for cut, part in zip(cuts, parts, strict=True)
        )
        return train_tokenizer(tokenizer, chain.from_iterable(samples)).encode()


def differences(there: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    """Return a message for each entry in which two keys differ."""
    old, new = dict(_flat(there)), dict(_flat(asked))
    return [
        f"{key} is {shown(old.get(key))} there, {shown(new.get(key))} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def refusals(cfg: TokenizeConfig, there: Identity, asked: dict[str, Any]) -> list[str]:
    """Return the differences for which token files are refused.

    They are encoded again instead if only the size of units differs, and nobody configured it.
    """
    found = differences(there.key_parts, asked)
    resized = all(line.startswith("tokenize.unit_bytes ") for line in found)
    return [] if resized and cfg.unit_bytes is None else found


def _flat(parts: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in parts.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
