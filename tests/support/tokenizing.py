"""Corpora tokenized in this process, with options that make several units of a small corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dtt.artifacts.manifests import TokensManifest
from dtt.config.clean import CleanConfig
from dtt.config.data import TokenizeConfig, TokenizerConfig, TrainedTokenizerConfig
from dtt.data.text.unit_encoder import DocumentKind, PlainText
from dtt.data.tokenize.encode_corpus import Tokenized, tokenize
from dtt.data.tokenize.work_plan import Plan, make_plan
from dtt.mesh.comm import Serial
from support.token_files import read_documents

BPE = TrainedTokenizerConfig(vocab_size=300)
UNIT_BYTES = 20_000
OPTIONS = {"validation_fraction": 0.1, "unit_bytes": UNIT_BYTES}


def run(
    corpus: Path,
    out: Path,
    tokenizer: TokenizerConfig = BPE,
    *,
    kind: DocumentKind | None = None,
    clean: CleanConfig | None = None,
    overwrite: bool = False,
    **options: Any,
) -> Tokenized:
    """Tokenize the corpus in a folder as one rank."""
    cfg = TokenizeConfig(**(OPTIONS | options))
    more: dict[str, Any] = {"kind": kind, "clean": clean, "overwrite": overwrite}
    result = tokenize(cfg, tokenizer, corpus, out, Serial(), **more)
    assert result is not None
    return result


def ask(
    corpus: Path,
    out: Path,
    tokenizer: TokenizerConfig = BPE,
    clean: CleanConfig | None = None,
    **options: Any,
) -> Plan:
    """Return the plan of `run`, which encodes nothing."""
    cfg = TokenizeConfig(**(OPTIONS | options))
    return make_plan(cfg, tokenizer, corpus, out, Serial(), PlainText(cfg.engine), clean=clean)


def documents(folder: Path) -> dict[str, list[list[int]]]:
    """The ids of the documents of each split, in order."""
    found: dict[str, list[list[int]]] = {"train": [], "validation": []}
    for shard in TokensManifest.read(folder).shards:
        found[shard.split] += [ids.tolist() for ids in read_documents(folder / shard.stem)]
    return found
