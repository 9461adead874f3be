"""All passes of `dtt clean`, by any number of ranks; the result does not depend on their number.

Pass 1 (`clean/unit_pass.py`) reads each unit once: filters, hits of n-grams of tasks, an exact key,
and keys of MinHash bands, sorted. Passes 2 and 3 (`clean/pairs.py`) find groups of equal keys and
compare the shingles of candidate pairs exactly. One process then walks through the documents in
order: one is removed if an earlier kept document is its twin. Each result is a step with a marker,
and a rerun after a kill continues with those that are finished (`clean/steps.py`); one fingerprint
of texts and settings says whether they are of the same selection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
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
from dtt.data.corpus.documents import check_columns
from dtt.data.corpus.selection import selected, selection_folder, selection_parts
from dtt.data.corpus.units import Corpus
from dtt.mesh.comm import Comm


class Part(NamedTuple):
    """A share of pass 1: the units whose number is `number` modulo `of`."""

    number: int
    of: int


class Cleaned(NamedTuple):
    """The result of `clean`, available on rank 0."""

    folder: Path
    manifest: SelectionManifest | None
    """None after a part, which makes no selection."""
    units: int
    """Number of units that this run read; 0 if everything was finished before."""
    problems: tuple[str, ...] = ()
    """`file:line: why` of some documents that cannot be read."""
    unread: int = 0
    """Number of documents that cannot be read, which have no number."""


def clean(cfg: RunConfig, comm: Comm, part: Part | None = None) -> Cleaned | None:
    """Write the selection of the corpus of `cfg`; collective, rank 0 gets the result.

    With `part`, only do pass 1 for a share of the units. Raises ConfigError without a section
    `clean`, InputError for an empty corpus, and DamagedError if the corpus has changed.
    """
    section = section_of(cfg)
    corpus = Corpus(cfg.corpus_dir, comm=comm)
    out = selection_folder(section, corpus.manifest, cfg.corpus_dir)
    first = comm.rank == 0
    with _locked(out, part) if first else nullcontext():
        tasks = tasks_hash = None
        if section.decontaminate is not None:
            tasks = open_task_ngrams(section.decontaminate, cfg.eval.data)
            tasks_hash = tasks.sha256
        key = selection_parts(section, corpus.manifest)
        finished = _finished(cfg, out, key, tasks_hash) if first and part is None else None
        if comm.broadcast(finished is not None):
            if finished is not None and not (out / FILENAME).exists():
                tidy(out)
                write_page(corpus, out, finished)
            return Cleaned(out, finished, 0) if first else None
        filters = make_filters(section)  # before the key of the steps, with a version of py3langid
        if first and tasks is not None:
            for name, count in tasks.unmatched.items():
                log.info("%s: %d questions are too short to be looked for", name, count)
        units = _place_units(section, corpus, comm)
        steps = Steps(out, _key_of_steps(key, section, tasks_hash, units), comm)
        if first:
            check_columns(corpus, columns_of(filters))
        if first and part is None:
            for name in (SelectionManifest.filename, FILENAME):
                (out / name).unlink(missing_ok=True)
            tidy(out)
        comm.barrier()
        share = units if part is None else units[part.number :: part.of]
        done = _pass_one(cfg, share, filters, tasks, steps)
        if part is not None:
            return Cleaned(out, None, done) if first else None
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


@contextmanager
def _locked(out: Path, part: Part | None) -> Iterator[None]:
    """Lock a selection. Parts may run at the same time, but not together with the whole command."""
    patience = patience_of_step()
    with ExitStack() as locks:
        if part is not None:
            name = f".lock-{part.number}-of-{part.of}"
            locks.enter_context(exclusive(out, "dtt clean", patience, name=name))
            # Other parts take it as briefly. Never without end: the whole command would wait for
            # this part's lock meanwhile.
            with exclusive(out, "dtt clean", patience=10):
                pass
        else:
            locks.enter_context(exclusive(out, "dtt clean", patience))
            for path in sorted(out.glob(".lock-*-of-*")):
                locks.enter_context(exclusive(out, "dtt clean --part", patience, name=path.name))
        yield


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
        folder, selection = selected(named)
        other = Corpus(folder, comm=comm)
        size = other.unit_bytes() if selection is None else selection.manifest.unit_bytes
        for unit in other.units(size):
            placed.append(PlacedUnit(len(placed), other, unit, number, selection))
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
