"""One tokenizer for several corpora, trained on all of them."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from itertools import chain
from pathlib import Path

from dtt.base.errors import ConfigError
from dtt.base.files import exclusive, write_atomically
from dtt.base.reading import read_small
from dtt.config.data import TrainedTokenizerConfig
from dtt.config.run import RunConfig
from dtt.data.corpus.selection import content_key
from dtt.data.corpus.usable import check_usable
from dtt.data.tokenize.markers import Identity
from dtt.data.tokenize.work_plan import (
    TOKENIZER,
    cut_corpus,
    differences,
    holds,
    tokenizer_key,
    trained,
)
from dtt.mesh.comm import Comm

WORK = ".tokenizer"
"""Subfolder with the record of what the tokenizer was trained on."""


def share_tokenizer(cfg: RunConfig, comm: Comm, *, overwrite: bool) -> None:
    """Train the tokenizer of `download.datasets` into `tokenize.out`, unless it is there.

    Collective. Does nothing for a given tokenizer. Raises InputError if a corpus has no documents,
    and ConfigError if the tokenizer there was trained on other text or with other settings, and
    `overwrite` is not given.
    """
    tokenizer, out = cfg.tokenizer, cfg.tokenize_dir
    if not cfg.download.datasets or not isinstance(tokenizer, TrainedTokenizerConfig):
        return
    cuts = [cut_corpus(c.tokenize, c.clean, c.corpus_dir, comm) for c in cfg.corpora]
    with exclusive(out, "dtt tokenize") if comm.rank == 0 else nullcontext():
        if comm.rank == 0:
            asked = {
                "corpora": {
                    one.download.label: cut.corpus.manifest.content_key()
                    for one, cut in zip(cfg.corpora, cuts, strict=True)
                },
                "tokenizer": tokenizer_key(tokenizer, None),
                "tokenize": {"validation_fraction": cfg.tokenize.validation_fraction},
            }
            there = None if overwrite else _read(out)
            removed = content_key(chain.from_iterable(cut.removals for cut in cuts))
            if there is not None and there.key_parts != asked:
                raise ConfigError(
                    "the folder contains the tokenizer of other text or settings",
                    where=out,
                    why="; ".join(differences(there.key_parts, asked)),
                    next="specify another folder: tokenize.out=FOLDER, or replace what is there: "
                    "--overwrite",
                )
            if (
                there is None
                or there.removed != removed  # trained on documents that are removed now
                or not holds(out / TOKENIZER, there.tokenizer_sha256)
            ):
                stop = cfg.tokenize.on_bad_document == "stop"
                for cut in cuts:
                    check_usable(cut.corpus, cut.units, stop_at_bad=stop)
                content = trained(tokenizer, cuts, cfg.tokenize.validation_fraction)
                write_atomically(out / TOKENIZER, content)
                digest = hashlib.sha256(content).hexdigest()
                record = Identity(key_parts=asked, tokenizer_sha256=digest, removed=removed)
                write_atomically(out / WORK / "identity.json", record.model_dump_json(indent=1))
        comm.barrier()


def _read(out: Path) -> Identity | None:
    try:
        return Identity.model_validate_json(read_small(out / WORK / "identity.json"))
    except (FileNotFoundError, ValueError):
        return None
