"""One tokenizer for several corpora, trained on all of them."""

from __future__ import annotations

from contextlib import nullcontext

from dtt.base.files import exclusive, has_sha256, patience_of_step
from dtt.config.data import TrainedTokenizerConfig
from dtt.config.run import RunConfig
from dtt.data.corpus.selection import removals_key
from dtt.data.corpus.usable import check_usable
from dtt.data.tokenize.work_plan import (
    TOKENIZER,
    TokensKey,
    divide,
    is_same,
    read_key,
    removed_key,
    tokenizer_key,
    trained,
    write_tokenizer,
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
    corpora = [divide(c.tokenize, c.clean, c.corpus_dir, comm)[:2] for c in cfg.corpora]
    patience = patience_of_step()
    with exclusive(out, "dtt tokenize", patience) if comm.rank == 0 else nullcontext():
        if comm.rank == 0:
            asked = TokensKey(
                key_parts={
                    "corpora": {
                        one.download.label: corpus.manifest.content_key()
                        for one, (corpus, _) in zip(cfg.corpora, corpora, strict=True)
                    },
                    "tokenizer": tokenizer_key(tokenizer, None),
                    "tokenize": {"validation_fraction": cfg.tokenize.validation_fraction},
                },
                tokenizer_sha256="",
                removed=removals_key(removed_key(corpus) for corpus, _ in corpora),
            )
            found = None if overwrite else read_key(out, WORK)
            # It was trained on documents that `dtt clean` may have removed since.
            kept = found is not None and is_same(found, asked, out, "the tokenizer")
            if found is None or not kept or not has_sha256(out / TOKENIZER, found.tokenizer_sha256):
                stop = cfg.tokenize.on_bad_document == "stop"
                for corpus, units in corpora:
                    check_usable(corpus, units, stop_at_bad=stop)
                content = trained(tokenizer, corpora, cfg.tokenize.validation_fraction)
                write_tokenizer(out, content, asked, WORK)
        comm.barrier()
