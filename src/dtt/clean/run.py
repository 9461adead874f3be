"""`dtt clean`: make the selection of a corpus, by any number of ranks; none changes the result.

Pass 1 (`clean/unit_pass.py`) reads each unit once: filters, hits of n-grams of tasks, an exact key,
and keys of MinHash bands, sorted. Passes 2 and 3 (`clean/pairs.py`) find groups of equal keys and
compare the shingles of candidate pairs exactly. One process then walks through the documents in
order: one is removed if an earlier kept document is its twin. Each result is a step with a marker,
and a rerun after a kill continues with those that are finished (`clean/steps.py`); one fingerprint
of texts and settings says whether they are of the same selection.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from dtt.artifacts.manifest import fingerprint
from dtt.artifacts.selection_manifest import SelectionManifest, removals_name
from dtt.base.errors import ConfigError, DamagedError, InputError
from dtt.base.files import (
    exclusive,
    has_sha256,
    patience_of_step,
    sha256_file,
    write_atomically,
)
from dtt.base.log import log, progress
from dtt.base.malloc import keep_freed_memory
from dtt.base.ranks import Ranks
from dtt.clean.contamination import TaskNgrams, open_task_ngrams
from dtt.clean.filters import Filter
from dtt.clean.linear_pass import write_units
from dtt.clean.pairs import FIRST_FEW, PARTITION_ENTRIES, DocumentOrder, find_pairs
from dtt.clean.selection_page import FILENAME, write_page
from dtt.clean.steps import OPEN_FILES, Steps, have_unread, tidy
from dtt.clean.unit_pass import PlacedUnit, columns_of, make_filters, pass_one
from dtt.config.clean import CleanConfig
from dtt.config.run import RunConfig
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.described import read_corpus
from dtt.data.corpus.documents import check_columns
from dtt.data.corpus.selection import selection_folder, selection_parts
from dtt.data.corpus.units import Corpus
from dtt.mesh.comm import Comm, open_comm

NAMES = {
    "exact": "exact duplicates",
    "near": "near duplicates",
    "contaminated": "contaminated",
    "rules": "rules",
    "language": "other languages",
    "where": "conditions",
}


class Cleaned(NamedTuple):
    """The result of `clean`, available on rank 0."""

    folder: Path
    manifest: SelectionManifest
    units: int
    """Number of units that this run read; 0 if everything was finished before."""
    problems: tuple[str, ...] = ()
    """`file:line: why` of some documents that cannot be read."""
    unread: int = 0
    """Number of documents that cannot be read, which have no number."""


def run(cfg: RunConfig, *, as_json: bool = False) -> None:
    """Write the selection of each corpus; rank 0 prints a report, as JSON if `as_json` is set."""
    section = section_of(cfg)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # An eighth less time for long documents, and a tenth more memory: each batch has such arrays.
    keep_freed_memory()
    folders = [selection_folder(section, read_corpus(c), c.corpus_dir) for c in cfg.corpora]
    comm = open_comm(Ranks.detect(), folders[0] / SelectionManifest.work)
    facts = []
    for one in cfg.corpora:
        result = clean(one, comm)
        if result is None:
            continue
        for problem in result.problems[:5]:
            log.warning("skipped %s", problem)
        if result.unread > len(result.problems[:5]):
            log.warning("skipped %d unreadable documents", result.unread)
        if not result.units:
            log.info("already done: %s is complete for this corpus", result.folder)
        facts.append(_facts(result))
        if not as_json:
            print(_report(facts[-1], one))
    comm.close()
    if as_json and facts:
        print(json.dumps(facts if cfg.download.datasets else facts[0]))


def clean(cfg: RunConfig, comm: Comm) -> Cleaned | None:
    """Write the selection of the corpus of `cfg`; collective, rank 0 gets the result.

    Raises ConfigError without a section `clean`, InputError for an empty corpus, and DamagedError
    if the corpus has changed.
    """
    section = section_of(cfg)
    corpus = Corpus(cfg.corpus_dir, comm=comm)
    out = selection_folder(section, corpus.manifest, cfg.corpus_dir)
    first = comm.rank == 0
    with exclusive(out, "dtt clean", patience_of_step()) if first else nullcontext():
        tasks = tasks_hash = None
        if section.decontaminate is not None:
            tasks = open_task_ngrams(section.decontaminate, cfg.eval.data)
            tasks_hash = tasks.sha256
        key = selection_parts(section, corpus.manifest)
        finished = _finished(cfg, out, key, tasks_hash) if first else None
        if comm.broadcast(finished is not None):
            if finished is None:
                return None  # another rank than the first
            if not (out / FILENAME).exists():
                tidy(out)
                write_page(corpus, out, finished)
            return Cleaned(out, finished, 0)
        filters = make_filters(section)  # before the key of the steps, with a version of py3langid
        if first and tasks is not None:
            for name, count in tasks.unmatched.items():
                log.info("%s: %d questions are too short to be looked for", name, count)
        units = _place_units(section, corpus, comm)
        steps = Steps(out, _key_of_steps(key, section, tasks_hash, units), comm)
        if first:
            check_columns(corpus, columns_of(filters))
            for name in (SelectionManifest.filename, FILENAME):
                (out / name).unlink(missing_ok=True)
            tidy(out)
        comm.barrier()
        done = _pass_one(cfg, units, filters, tasks, steps)
        order = DocumentOrder(units, steps)
        copies = find_pairs(section.near, order, steps)
        if not first:
            # Ranks must not exit before rank 0 has written the manifest, or MPI may end it.
            comm.barrier()
            return None
        removed = write_units(order, steps, copies, out, tasks, near=section.near is not None)
        manifest = SelectionManifest(
            key=fingerprint(key),
            key_parts=key,
            tasks=tasks_hash,
            unit_bytes=corpus.unit_bytes(),
            units=tuple(removed),
        )
        # Before the manifest: with it, the folder is complete, and is not tidied again.
        tidy(out, {unit.step for unit in order.units})
        write_atomically(out / SelectionManifest.filename, manifest.dump())
        write_page(corpus, out, manifest)
        comm.barrier()
        problems = tuple(line for facts in order.facts for line in facts["problems"])
        return Cleaned(out, manifest, done, problems, sum(f["unread"] for f in order.facts))


def section_of(cfg: RunConfig) -> CleanConfig:
    """Return the section `clean`; raise ConfigError without one, and for conversations."""
    if cfg.data.has_conversations:
        raise ConfigError(
            "dtt clean selects documents of text, not conversations",
            where="data.type",
            why=f"data.type={cfg.data.type}, and the rules and duplicates are those of texts",
            next="leave out this step and the section `clean`; dtt tokenize refuses or leaves out "
            "rows that cannot be trained",
        )
    if cfg.clean is None:
        raise ConfigError(
            "the configuration has no section `clean`",
            why="no document would be left out",
            next="clean.exact=true leaves out exact duplicates; docs/config.md has the other keys",
        )
    return cfg.clean


def _key_of_steps(
    key: dict[str, Any], section: CleanConfig, tasks: str | None, units: list[PlacedUnit]
) -> str:
    """Return a fingerprint of everything that determines the files of the steps.

    `key` has the settings and the texts of all corpora. Constants are added because another version
    of dtt may use what this one has left behind; that of py3langid may have another model.
    """
    language = None if section.language is None else metadata.version("py3langid")
    sizes = [placed.unit.text_bytes for placed in units]
    constants = [FIRST_FEW, PARTITION_ENTRIES, OPEN_FILES]
    return fingerprint([key, tasks, language, sizes, constants])


def _finished(
    cfg: RunConfig, out: Path, key: dict[str, Any], tasks: str | None
) -> SelectionManifest | None:
    """Return the manifest if the selection is complete, of these tasks, and its files are sound."""
    try:
        manifest = SelectionManifest.read(out)
    except (InputError, DamagedError):
        return None
    if manifest.key_parts != key:
        return None
    if manifest.tasks != tasks:
        log.info("made again, as tasks of clean.decontaminate have changed: %s", out)
        return None
    for index, unit in enumerate(manifest.units):
        path = out / removals_name(index)
        if unit.sha256 is not None and not has_sha256(path, unit.sha256):
            log.info("made again, as it is damaged or missing: %s", path)
            return None
    if cfg.tokenize.on_bad_document == "stop" and have_unread(out):
        return None  # it was made with `skip`: pass 1 reads these units again, and stops
    return manifest


def _place_units(section: CleanConfig, corpus: Corpus, comm: Comm) -> list[PlacedUnit]:
    """Return the units of all corpora in their order.

    Raises InputError for an empty corpus, and DamagedError if one has changed.
    """
    placed: list[PlacedUnit] = []
    for number, named in enumerate(section.near.against if section.near else ()):
        other = Corpus(named, comm=comm)
        for unit in other.units(other.unit_bytes()):
            placed.append(PlacedUnit(len(placed), other, unit, number))
    own = corpus.units(corpus.unit_bytes())
    if not own:
        raise InputError("the corpus contains no documents", where=corpus.folder)
    placed += [PlacedUnit(i, corpus, unit) for i, unit in enumerate(own, len(placed))]
    # Only files with another modification time are hashed, such as those of a copied corpus.
    corpora = {id(unit.corpus): unit.corpus for unit in placed}.values()
    files = [(one, i) for one in corpora for i in range(len(one.manifest.files))]
    for one, i in files[comm.rank :: comm.size]:
        record, path = one.manifest.files[i], one.path(i)
        if path.stat().st_mtime_ns != record.mtime_ns and sha256_file(path) != record.sha256:
            raise DamagedError(
                "a file of the corpus has changed",
                where=path,
                why="its content is not that of the manifest",
                next="run dtt download again, and then the same command",
            )
    return placed


def _pass_one(
    cfg: RunConfig,
    units: Sequence[PlacedUnit],
    filters: Sequence[Filter],
    tasks: TaskNgrams | None,
    steps: Steps,
) -> int:
    """Do pass 1 for the units that are not finished; return their number; collective."""
    section, comm, done = section_of(cfg), steps.comm, 0
    mine = units[comm.rank :: comm.size]
    stop = cfg.tokenize.on_bad_document == "stop"
    total = sum(placed.unit.text_bytes for placed in mine)
    with progress("reading", total, shown=comm.rank == 0) as advance:
        for placed in mine:
            done_before = steps.done(placed.step)
            if not done_before or (stop and steps.facts(placed.step)["unread"]):
                # What `near.against` names stays, so nothing judges it.
                judges, of = (filters, tasks) if placed.other is None else ((), None)
                bad = BadDocuments(stop=stop)
                pass_one(section, placed, judges, of, steps, bad)
                done += 1
            advance(placed.unit.text_bytes)
    counts: list[int] = comm.gather(done)
    return sum(counts)


def _facts(result: Cleaned) -> dict[str, Any]:
    units = result.manifest.units
    removed = sum((Counter(unit.removed) for unit in units), Counter[str]())
    documents, size = sum(unit.documents for unit in units), sum(unit.bytes for unit in units)
    return {
        "selection": str(result.folder),
        "units_read": result.units,
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
