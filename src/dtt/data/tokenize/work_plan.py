"""The plan of a tokenization run: the tokenizer, the units, and which of them are finished.

Several corpora have one tokenizer, which is trained on all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from dtt.artifacts.manifest import Record, fingerprint
from dtt.artifacts.manifests import CHAT_TEMPLATE, TokensManifest
from dtt.base.errors import ConfigError, InputError
from dtt.base.files import exclusive, has_sha256, patience_of_step, write_atomically
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
from dtt.config.layers import shown
from dtt.config.run import RunConfig
from dtt.data.corpus.document_sampling import HELD_OUT_BY, check_usable, tokenizer_sample
from dtt.data.corpus.selection import removals_key
from dtt.data.corpus.units import Corpus, Unit
from dtt.data.text.tokenizer import given_tokenizer, train_tokenizer
from dtt.data.text.unit_encoder import DocumentKind
from dtt.data.tokenize.markers import (
    LOST_MARKER,
    NOT_MADE,
    SPLITS,
    WORK,
    find_pending,
    marker_path,
    sound_manifest,
    unit_stems,
)
from dtt.mesh.comm import Comm

TOKENIZER = "tokenizer.json"
SHARED = ".tokenizer"
"""Subfolder with the record of what the tokenizer of several corpora was trained on."""
KEY = "identity.json"
"""Name of the file, in the work folder, with the key of token files that are being made."""
SPECIAL_TOKENS_IN_TEXT = "encoded as text"
REDONE_SHOWN = 10
"""Maximum number of units to encode again that are logged."""


class TokensKey(Record):
    """The content that a token folder is for. Recorded before its first unit."""

    key_parts: dict[str, Any]
    """Everything that determines the content of the token files, except for `removed`."""
    tokenizer_sha256: str
    removed: str | None = None
    """Hash of the numbers of all documents that the selection removes; None: it removes none."""

    @property
    def fingerprint(self) -> str:
        """Hash of the content, stored in the manifest and in the markers."""
        content = fingerprint([self.key_parts, self.tokenizer_sha256])
        # So that token files without a selection keep the key that earlier versions gave them.
        return content if self.removed is None else fingerprint([content, self.removed])


@dataclass(frozen=True)
class Plan:
    """The units to encode into `out`, independent of the number of ranks."""

    out: Path
    corpus: Corpus
    units: list[Unit]
    key: TokensKey
    pending: dict[int, str]
    """Why units are not finished, by their index."""
    complete: bool
    """True if the manifest exists and everything that it names is complete."""

    def share(self, rank: int, size: int) -> list[Unit]:
        """Return the pending units of one of `size` ranks, the largest first."""
        # By size: the loads of ranks then differ by no more than the largest unit.
        pending = sorted(
            (self.units[index] for index in self.pending),
            key=lambda unit: (-unit.text_bytes, unit.index),
        )
        return pending[rank::size]


def make_plan(
    cfg: TokenizeConfig,
    tokenizer: TokenizerConfig,
    corpus_folder: Path,
    out: Path,
    comm: Comm,
    kind: DocumentKind,
    *,
    clean: CleanConfig | None = None,
    overwrite: bool = False,
) -> Plan:
    """Return the plan for the token files in `out`, which then has its tokenizer; collective.

    With `overwrite`, existing token files are removed first. The documents of the corpus are of
    `kind`. What is left of unfinished units is removed.

    Raises ConfigError if `out` contains token files of a different corpus, tokenizer or options,
    and InputError if the corpus is empty.
    """
    found = None if overwrite else _shared(comm, read_key(out) if comm.rank == 0 else None)
    corpus, units, unit_bytes = _divide(cfg, clean, corpus_folder, comm)
    key = None
    if comm.rank == 0:
        if overwrite:
            clear(out)
        given = None
        if isinstance(tokenizer, GivenTokenizerConfig):
            given = given_tokenizer(tokenizer)
        encoding, files = kind.prepare(tokenizer, None if found is None else found.key_parts)
        key = _asked(cfg, tokenizer, corpus, unit_bytes, given, encoding)
        if found and _is_same(found, key, out, "token files"):
            key = found
        elif found:
            clear(out)
        if not has_sha256(out / TOKENIZER, key.tokenizer_sha256):
            if key is found:
                log.info("%s is missing or damaged: it is created again", out / TOKENIZER)
            content = given or _trained(tokenizer, [(corpus, units)], cfg)
            key = _write_tokenizer(out, content, key, WORK)
        for name, text in files.items():
            if not has_sha256(out / name, hashlib.sha256(text.encode()).hexdigest()):
                write_atomically(out / name, text)
    # If rank 0 raises, the others wait here until they are terminated.
    key = _shared(comm, key)
    assert key is not None
    return _checked(out, corpus, units, key, comm)


def _asked(
    cfg: TokenizeConfig,
    tokenizer: TokenizerConfig,
    corpus: Corpus,
    unit_bytes: int,
    given: bytes | None,
    encoding: dict[str, Any],
) -> TokensKey:
    """Return the key that the configuration asks for, without the hash of the tokenizer."""
    return TokensKey(
        key_parts={
            "corpus": {"sha256": corpus.manifest.content_key()},
            "tokenizer": _tokenizer_key(tokenizer, given),
            "tokenize": {
                "validation_fraction": cfg.validation_fraction,
                "unit_bytes": unit_bytes,
                "special_tokens_in_text": SPECIAL_TOKENS_IN_TEXT,
                "held_out_by": HELD_OUT_BY,
            },
            **encoding,
        },
        tokenizer_sha256="",  # not known before it is trained
        removed=_removed_key(corpus),
    )


def _checked(out: Path, corpus: Corpus, units: list[Unit], key: TokensKey, comm: Comm) -> Plan:
    """Return the plan, by the units that are finished; remove what is left of the others."""
    manifest = sound_manifest(out)
    if manifest is not None and manifest.key != key.fingerprint:
        manifest = None
    pending = find_pending(out, key.fingerprint, manifest, len(units), comm)
    selection = None if corpus.selection is None else corpus.selection.facts()
    complete = (
        manifest is not None
        and manifest.selection == selection
        and all(why == LOST_MARKER for why in pending.values())
    )
    # Rank 0 decides: the others may have read the folder a moment later.
    complete = comm.broadcast(complete)
    if comm.rank == 0 and not complete:
        _tidy(out, pending)
    comm.barrier()
    return Plan(out, corpus, units, key, {} if complete else pending, complete)


def _divide(
    cfg: TokenizeConfig, clean: CleanConfig | None, folder: Path, comm: Comm
) -> tuple[Corpus, list[Unit], int]:
    """Open a corpus and its selection; return it, its units and their size; collective.

    Raises InputError if the corpus is empty or has not been cleaned, and ConfigError if
    `tokenize.unit_bytes` is not the selection's.
    """
    corpus = Corpus(folder, comm=comm, clean=clean)
    if corpus.selection is not None and cfg.unit_bytes not in (None, corpus.unit_bytes()):
        raise ConfigError(
            f"tokenize.unit_bytes={cfg.unit_bytes} is not the size of the selection's units",
            where=corpus.selection.folder,
            why="a selection numbers documents by unit, so the units must be the same",
            next=f"tokenize.unit_bytes={corpus.unit_bytes()}, or omit it; token files in units of "
            "another size are replaced with --overwrite",
        )
    unit_bytes = cfg.unit_bytes or corpus.unit_bytes()
    units = corpus.units(unit_bytes)
    if not units and comm.rank == 0:
        raise InputError("the corpus contains no documents", where=folder)
    comm.barrier()  # if rank 0 raises, the others wait here until they are terminated
    return corpus, units, unit_bytes


def _removed_key(corpus: Corpus) -> str | None:
    """Return a hash of what the selection removes; None: nothing."""
    return None if corpus.selection is None else removals_key(corpus.selection.removals)


def clear(out: Path) -> None:
    """Remove everything that `tokenize` writes, the manifest first."""
    (out / TokensManifest.filename).unlink(missing_ok=True)
    work = (path for path in (out / WORK).glob("*") if path.name != RENDEZVOUS)
    for path in (*work, *_shard_files(out)):
        path.unlink(missing_ok=True)
    for name in (TOKENIZER, CHAT_TEMPLATE):
        (out / name).unlink(missing_ok=True)


def _shard_files(folder: Path) -> Iterator[Path]:
    for split in SPLITS:
        for suffix in ("bin", "idx", "mask"):
            yield from folder.glob(f"{split}-*.{suffix}")


def _is_same(found: TokensKey, asked: TokensKey, out: Path, what: str) -> bool:
    """Return True if the key `found` of `what` in `out` is the one asked for; log why it is not.

    Raises ConfigError for other text or settings.
    """
    if other := differences(found.key_parts, asked.key_parts):
        raise ConfigError(
            f"the folder contains {what} of other text or settings",
            where=out,
            why="; ".join(other),
            next="specify another folder: tokenize.out=FOLDER, or replace what is there: "
            "--overwrite",
        )
    # All of it, although some units may lose the same documents as before: another setting of
    # `clean` changes nearly all units, and a tokenizer that is trained on the documents as well.
    if found.removed != asked.removed:
        log.info("%s: made again, as `dtt clean` removes other documents now", what)
        return False
    return True


def _write_tokenizer(out: Path, content: bytes, asked: TokensKey, work: str) -> TokensKey:
    """Write a tokenizer, and then what it is for, into the folder `work` of `out`."""
    write_atomically(out / TOKENIZER, content)
    key = asked.model_copy(update={"tokenizer_sha256": hashlib.sha256(content).hexdigest()})
    write_atomically(out / work / KEY, key.model_dump_json(indent=1) + "\n")
    return key


def _tidy(out: Path, pending: dict[int, str]) -> None:
    """Remove leftovers of a killed run, and the markers and files of units to encode again."""
    for torn in [*out.glob(".*.tmp"), *(out / WORK).glob(".*.tmp")]:
        torn.unlink()
    (out / TokensManifest.filename).unlink(missing_ok=True)
    redone = {unit: why for unit, why in pending.items() if why != NOT_MADE}
    for unit in redone:
        marker_path(out, unit).unlink(missing_ok=True)
    stale = {stem for unit in pending for stem in unit_stems(unit)}
    for path in _shard_files(out):
        if path.stem in stale:
            path.unlink(missing_ok=True)
    for unit, why in islice(redone.items(), REDONE_SHOWN):
        log.info("unit %d will be encoded again: %s", unit, why)
    if len(redone) > REDONE_SHOWN:
        log.info("… and %d more", len(redone) - REDONE_SHOWN)


def _tokenizer_key(tokenizer: TokenizerConfig, given: bytes | None) -> dict[str, Any]:
    """Return the inputs that determine the tokenizer: its training options, or its sha256."""
    facts = tokenizer.model_dump(mode="json")
    if given is not None:
        del facts["path"], facts["revision"], facts["bos"]  # `kind` has the token that it leads to
        facts["sha256"] = hashlib.sha256(given).hexdigest()
    elif not facts["chat_tokens"]:
        del facts["chat_tokens"]  # so that earlier token files of text keep their key
    return facts


def read_key(out: Path, work: str = WORK) -> TokensKey | None:
    """Return the key of the token files in `out`, or None if `tokenize` has not started."""
    manifest = sound_manifest(out)
    if manifest is not None:
        return TokensKey(
            key_parts=manifest.key_parts,
            tokenizer_sha256=manifest.tokenizer_sha256,
            removed=None if manifest.selection is None else manifest.selection.content,
        )
    try:
        return TokensKey.model_validate_json(read_small(out / work / KEY))
    except (FileNotFoundError, ValueError):
        return None


def _shared(comm: Comm, key: TokensKey | None) -> TokensKey | None:
    """Return the `key` of rank 0; collective."""
    facts = comm.broadcast(None if key is None else key.model_dump())
    return None if facts is None else TokensKey.model_validate(facts)


def _trained(
    tokenizer: TokenizerConfig,
    corpora: Sequence[tuple[Corpus, list[Unit]]],
    cfg: TokenizeConfig,
) -> bytes:
    """Train a tokenizer on corpora, in proportion to their sizes; return its tokenizer.json.

    One rank calls this: 100 MB take half a minute, once, and all would need the same tokenizer.
    """
    assert isinstance(tokenizer, TrainedTokenizerConfig)
    for corpus, units in corpora:
        check_usable(corpus, units, stop_at_bad=cfg.on_bad_document == "stop")
    sizes = [sum(unit.text_bytes for unit in units) for _, units in corpora]
    total = min(tokenizer.train_bytes, sum(sizes))
    log.info("training a tokenizer of %d entries on %.1f MB", tokenizer.vocab_size, total / 1e6)
    with progress("reading for the tokenizer", total) as advance:
        parts = [
            # Rounded up, so that a corpus with an estimated size of 0 has a part.
            -(-tokenizer.train_bytes * max(size, 1) // max(sum(sizes), 1))
            for size in sizes
        ]
        samples = (
            tokenizer_sample(corpus, units, part, cfg.validation_fraction, advance)
            for (corpus, units), part in zip(corpora, parts, strict=True)
        )
        return train_tokenizer(tokenizer, chain.from_iterable(samples)).encode()


def differences(found: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    """Return a message for each entry in which two keys differ."""
    old, new = dict(_flat(found)), dict(_flat(asked))
    return [
        f"{key} is {shown(old.get(key))} there, {shown(new.get(key))} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def _flat(parts: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in parts.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def share_tokenizer(cfg: RunConfig, comm: Comm, *, overwrite: bool) -> None:
    """Train the tokenizer of `download.datasets` into `tokenize.out`, unless it is there.

    Collective. Does nothing for a given tokenizer. Raises InputError if a corpus has no documents,
    and ConfigError if the tokenizer there was trained on other text or with other settings, and
    `overwrite` is not given.
    """
    tokenizer, out = cfg.tokenizer, cfg.tokenize_dir
    if not cfg.download.datasets or not isinstance(tokenizer, TrainedTokenizerConfig):
        return
    corpora = [_divide(c.tokenize, c.clean, c.corpus_dir, comm)[:2] for c in cfg.corpora]
    with exclusive(out, "dtt tokenize", patience_of_step()) if comm.rank == 0 else nullcontext():
        if comm.rank == 0:
            asked = TokensKey(
                key_parts={
                    "corpora": {
                        one.download.label: corpus.manifest.content_key()
                        for one, (corpus, _) in zip(cfg.corpora, corpora, strict=True)
                    },
                    "tokenizer": _tokenizer_key(tokenizer, None),
                    "tokenize": {"validation_fraction": cfg.tokenize.validation_fraction},
                },
                tokenizer_sha256="",
                removed=removals_key(_removed_key(corpus) for corpus, _ in corpora),
            )
            found = None if overwrite else read_key(out, SHARED)
            # It was trained on documents that `dtt clean` may have removed since.
            kept = found is not None and _is_same(found, asked, out, "the tokenizer")
            if found is None or not kept or not has_sha256(out / TOKENIZER, found.tokenizer_sha256):
                _write_tokenizer(out, _trained(tokenizer, corpora, cfg.tokenize), asked, SHARED)
        comm.barrier()
