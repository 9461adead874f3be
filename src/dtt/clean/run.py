"""`dtt clean`: make the selection of a corpus, in one process or in several ranks."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from typing import Any

from dtt.artifacts.selection_manifest import SelectionManifest
from dtt.base.errors import ConfigError
from dtt.base.log import log
from dtt.base.malloc import keep_freed_memory
from dtt.base.ranks import Ranks
from dtt.clean.passes import Cleaned, Part, clean, section_of
from dtt.clean.selection_page import FILENAME
from dtt.config.run import RunConfig
from dtt.data.corpus.described import read_corpus
from dtt.data.corpus.selection import selection_folder
from dtt.mesh.comm import open_comm

NAMES = {
    "exact": "exact duplicates",
    "near": "near duplicates",
    "contaminated": "contaminated",
    "rules": "rules",
    "language": "other languages",
    "where": "conditions",
}


def run(cfg: RunConfig, *, part: str | None = None, as_json: bool = False) -> None:
    """Write the selection of each corpus; rank 0 prints a report, as JSON if `as_json` is set.

    `part` is `i/n`: only read the units i, i + n, … of a corpus.
    """
    section, share = section_of(cfg), _part(part)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # An eighth less time for long documents, and a tenth more memory: each batch has such arrays.
    keep_freed_memory()
    folders = [selection_folder(section, read_corpus(c), c.corpus_dir) for c in cfg.corpora]
    comm = open_comm(Ranks.detect(), folders[0] / SelectionManifest.work)
    facts = []
    for one in cfg.corpora:
        result = clean(one, comm, share)
        if result is None:
            continue
        for problem in result.problems[:5]:
            log.warning("skipped %s", problem)
        if result.unread > len(result.problems[:5]):
            log.warning("skipped %d unreadable documents", result.unread)
        if result.manifest is not None and not result.units:
            log.info("already done: %s is complete for this corpus", result.folder)
        facts.append(_facts(result))
        if as_json:
            continue
        if result.manifest is not None:
            print(_report(facts[-1], one))
        else:
            print(f"part        {part}: {result.units} units read, in {result.folder}")
            print("next        once all parts are done: the same command without --part")
    comm.close()
    if as_json and facts:
        print(json.dumps(facts if cfg.download.datasets else facts[0]))


def _part(text: str | None) -> Part | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if found is None or not int(found[1]) < int(found[2]):
        raise ConfigError(
            f"--part {text} is not a part",
            why="it is i/n: parts 0/n to n-1/n read the corpus together",
            next="--part 0/4",
        )
    return Part(int(found[1]), int(found[2]))


def _facts(result: Cleaned) -> dict[str, Any]:
    facts: dict[str, Any] = {"selection": str(result.folder), "units_read": result.units}
    if result.manifest is None:
        return facts
    units = result.manifest.units
    removed = sum((Counter(unit.removed) for unit in units), Counter[str]())
    documents, size = sum(unit.documents for unit in units), sum(unit.bytes for unit in units)
    return facts | {
        "documents": documents,
        "kept_documents": documents - removed.total(),
        "text_bytes": size,
        "kept_bytes": size - sum(unit.removed_bytes for unit in units),
        "removed": dict(removed),
    }


def _report(facts: dict[str, Any], cfg: RunConfig) -> str:
    folder, documents, size = facts["selection"], facts["documents"], facts["text_bytes"]
    unit, scale = ("GB", 1e9) if size >= 1e9 else ("MB", 1e6)
    kept = f"{facts['kept_documents']:,} of {documents:,} documents kept"
    sizes = f"{facts['kept_bytes'] / scale:.2f} of {size / scale:.2f} {unit}"
    lines = [f"selection   {folder} ({kept}, {sizes})"]
    for reason, name in NAMES.items():
        if count := facts["removed"].get(reason):
            note = ""
            if reason == "near" and cfg.clean and cfg.clean.near:
                note = f"   (Jaccard ≥ {cfg.clean.near.threshold:g}; each has a kept twin)"
            lines.append(f"  {name:<18}{count:>10,}  {count / max(documents, 1):>7.2%}{note}")
    lines.append(f"report      {folder}/{FILENAME}")
    return "\n".join(lines)
