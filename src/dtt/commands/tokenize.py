"""`dtt tokenize`: a corpus into token files, on one process or under mpirun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from dtt.config.run import RunConfig
from dtt.runtime.comm import open_comm
from dtt.runtime.log import log
from dtt.runtime.ranks import Ranks

if TYPE_CHECKING:
    from dtt.data.encode import Tokenized


def run(cfg: RunConfig, *, overwrite: bool = False, as_json: bool = False) -> None:
    """Make the token files; the first rank prints a report, as JSON for scripts if asked."""
    from dtt.data.encode import tokenize

    comm = open_comm(Ranks.detect())
    out = cfg.tokenize_dir
    result = tokenize(cfg.tokenize, cfg.tokenizer, cfg.corpus_dir, out, comm, overwrite=overwrite)
    if result is not None:
        if not result.units:
            log.info("already done: %s is complete for this corpus, tokenizer and options", out)
        for problem in result.problems[:5]:
            log.warning("skipped %s", problem)
        print(json.dumps(_facts(out, result)) if as_json else _report(out, result))


def _facts(out: Path, result: Tokenized) -> dict[str, object]:
    manifest = result.manifest
    splits = {split: manifest.counts(split) for split in ("train", "validation")}
    files = [path for s in manifest.shards for path in out.glob(f"{s.stem}.*")]
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
            }
            for split, counts in splits.items()
        },
        "skipped_documents": manifest.skipped_documents,
        "empty_documents": manifest.empty_documents,
        "file_bytes": sum(path.stat().st_size for path in files),
        "seconds": round(result.seconds, 3),
        "mb_per_second": round(result.text_bytes / 1e6 / result.seconds, 3)
        if result.units
        else None,
    }


def _report(out: Path, result: Tokenized) -> str:
    manifest = result.manifest
    lines = [f"tokens      {out} ({manifest.dtype}, vocabulary of {manifest.vocab_size})"]
    for split in ("train", "validation"):
        counts = manifest.counts(split)
        if counts.documents:
            lines.append(
                f"{split:<11} {counts.documents:,} documents, {counts.tokens:,} tokens, "
                f"{counts.bytes / counts.tokens:.2f} bytes per token, "
                f"{sum(shard.split == split for shard in manifest.shards)} shards"
            )
    if manifest.skipped_documents or manifest.empty_documents:
        lines.append(
            f"left out    {manifest.skipped_documents} that cannot be read, "
            f"{manifest.empty_documents} empty"
        )
    if result.units:
        lines.append(
            f"speed       {result.text_bytes / 1e6:.1f} MB in {result.seconds:.1f} s: "
            f"{result.text_bytes / 1e6 / result.seconds:.2f} MB/s"
        )
    return "\n".join(lines)
