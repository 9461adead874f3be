"""`dtt tokenize`: tokenize a corpus, in one process or in several under mpirun or srun."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from dtt.artifacts.manifests import TokensManifest
from dtt.artifacts.token_folders import files_of
from dtt.base.log import log
from dtt.base.malloc import keep_freed_memory
from dtt.base.ranks import Ranks
from dtt.base.terminal import Message
from dtt.config.run import RunConfig
from dtt.mesh.comm import Comm, open_comm

if TYPE_CHECKING:
    from dtt.artifacts.manifests import SplitCounts
    from dtt.data.text.unit_encoder import DocumentKind
    from dtt.data.tokenize.encode_corpus import Tokenized

NULLS = Message(
    """\
rows have keys with null in their tools or calls, which the chat template may print. `datasets` \
writes them to JSON lines, because all tools of a column have the keys of each of them.
  next:  write Parquet instead, Dataset.to_parquet, of which dtt drops them; or drop them yourself:
         jq -c 'del(..|nulls)' ROWS > NEW"""
)
REASONS = 10
"""Maximum number of reasons for refused rows that are printed."""


def run(cfg: RunConfig, *, overwrite: bool = False, as_json: bool = False) -> None:
    """Write the token files of each corpus; rank 0 prints a report, as JSON if `as_json` is set.

    With `overwrite`, replaces token files of a different corpus, tokenizer or options.
    """
    # numpy's OpenBLAS threads would spin on all cores, although there is no linear algebra here.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Freed memory is needed again at once for the next documents: do not return it to the system.
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")  # for Arrow's allocator, mimalloc
    keep_freed_memory()
    # A folder of token folders is none itself, but it may have their tokenizer.
    work = cfg.tokenize_dir / (".tokenizer" if cfg.download.datasets else TokensManifest.work)
    comm = open_comm(Ranks.detect(), work)  # before slow imports
    from dtt.data.corpus.described import read_corpus

    for one in cfg.corpora:
        read_corpus(one)
    if cfg.download.datasets:
        from dtt.data.tokenize.work_plan import share_tokenizer

        share_tokenizer(cfg, comm, overwrite=overwrite)
    facts = []
    for one in cfg.corpora:
        report = _tokenize(one, comm, overwrite=overwrite, as_json=as_json)
        facts.append(report)
        if comm.rank == 0 and not as_json:
            print(report)
    comm.close()
    if comm.rank == 0 and as_json:
        print(json.dumps(facts if cfg.download.datasets else facts[0]))


def _tokenize(
    cfg: RunConfig, comm: Comm, *, overwrite: bool, as_json: bool
) -> dict[str, object] | str:
    """Write the token files of one corpus; rank 0 returns the report, and warns of losses."""
    from dtt.data.tokenize.encode_corpus import tokenize

    out = cfg.tokenize_dir
    result = tokenize(
        cfg.tokenize,
        cfg.tokenizer,
        cfg.corpus_dir,
        out,
        comm,
        kind=_kind(cfg),
        clean=cfg.clean,
        overwrite=overwrite,
    )
    if result is None:
        return ""
    if not result.units:
        log.info("already done: %s is complete for this corpus, tokenizer and options", out)
    for problem in result.problems[:5]:
        log.warning("skipped %s", problem)
    if blank := result.manifest.blank_documents:
        log.warning("kept %d documents that contain only white space", blank)
    if replaced := result.manifest.replaced_documents:
        log.warning("replaced lone surrogates by U+FFFD in %d documents", replaced)
    if (lost := result.manifest.lost) is not None and lost.characters:
        log.warning("%s", lost.describe())
    if nulls := result.manifest.nulls:
        log.warning("%d %s", nulls, NULLS)
    return _facts(out, result) if as_json else _report(out, result)


def _kind(cfg: RunConfig) -> DocumentKind:
    """Return the kind of documents for `data.type`."""
    if not cfg.data.has_conversations:
        from dtt.data.text.unit_encoder import PlainText

        return PlainText(cfg.tokenize.engine)
    from dtt.data.conversations.row_encoder import Conversations

    return Conversations(cfg.chat, pairs=cfg.data.has_pairs, engine=cfg.tokenize.engine)


def _facts(out: Path, result: Tokenized) -> dict[str, object]:
    manifest = result.manifest
    splits = {split: manifest.counts(split) for split in ("train", "validation")}
    # From the manifest: a listing of the folder for each shard would take days for 100,000 of them.
    files = [f for s in manifest.shards for f in files_of(out / s.stem, s, manifest.dtype)]
    return {
        "tokens": str(out),
        "already_done": not result.units,
        "vocab_size": manifest.vocab_size,
        "dtype": manifest.dtype,
        "splits": {
            split: {
                "documents": counts.documents,
                "tokens": counts.tokens,
                "text_bytes": counts.bytes,
                "bytes_per_token": round(counts.bytes / max(counts.tokens, 1), 3),
                "shards": sum(shard.split == split for shard in manifest.shards),
                **({} if counts.trained is None else {"trained_tokens": counts.trained}),
            }
            for split, counts in splits.items()
        },
        "skipped_documents": manifest.skipped_documents,
        "refused_rows": manifest.refused,
        "removed_documents": manifest.selection and manifest.selection.removed,
        "empty_documents": manifest.empty_documents,
        "blank_documents": manifest.blank_documents,
        "lost_bytes": manifest.lost_bytes,
        "file_bytes": sum(file.bytes for file in files),
        "engine": result.engine,
        "seconds": round(result.seconds, 3),
        "mb_per_second": round(result.text_bytes / 1e6 / result.seconds, 3)
        if result.text_bytes
        else None,
    }


def _report(out: Path, result: Tokenized) -> str:
    manifest = result.manifest
    lines = [f"tokens      {out} ({manifest.dtype}, vocabulary of {manifest.vocab_size})"]
    for split in ("train", "validation"):
        counts = manifest.counts(split)
        if counts.documents:
            shards = sum(shard.split == split for shard in manifest.shards)
            lines.append(f"{split:<11} {_counts(counts)}, {shards} shards")
    if manifest.skipped_documents or manifest.empty_documents:
        lost = f" (about {manifest.lost_bytes:,} bytes lost)" if manifest.lost_bytes else ""
        lines.append(
            f"skipped     {manifest.skipped_documents} unreadable documents{lost}, "
            f"{manifest.empty_documents} empty"
        )
    if manifest.selection is not None:
        lines.append(f"removed     {manifest.selection.describe()}")
    rows = "documents" if manifest.chat is None else "rows"
    for why, count in list(manifest.refused.items())[:REASONS]:
        lines.append(f"refused     {count:,} {rows}: {why}")
    if len(manifest.refused) > REASONS:
        lines.append(f"            … and {len(manifest.refused) - REASONS} other reasons")
    if manifest.unread:
        keys = [f"{key} ({count:,})" for key, count in manifest.unread.items()]
        more = f" and {len(keys) - REASONS} others" if len(keys) > REASONS else ""
        lines.append(f"not used    keys of rows: {', '.join(keys[:REASONS])}{more}")
    if result.units:
        size = result.text_bytes / 1e6
        lines.append(
            f"speed       {size:.1f} MB in {result.seconds:.2f} s: "
            f"{size / result.seconds:.1f} MB/s; engine {result.engine}"
        )
    return "\n".join(lines)


def _counts(counts: SplitCounts) -> str:
    if counts.trained is None:
        return (
            f"{counts.documents:,} documents, {counts.tokens:,} tokens, "
            f"{counts.bytes / counts.tokens:.2f} bytes per token"
        )
    return (
        f"{counts.documents:,} conversations, {counts.tokens:,} tokens, "
        f"{counts.trained:,} of them trained ({counts.trained / counts.tokens:.1%})"
    )
