"""Dry run of `dtt tokenize`: reports which units it would reuse, and why; writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from dtt.config.clean import CleanConfig
from dtt.config.data import TokenizeConfig, TokenizerConfig
from dtt.data.corpus.selection import content_key
from dtt.data.text.unit_encoder import DocumentKind, PlainText
from dtt.data.tokenize.markers import Identity
from dtt.data.tokenize.verification import NOT_MADE, Fault, find_faults
from dtt.data.tokenize.work_plan import (
    REDONE,
    RETRAINED,
    TOKENIZER,
    Cut,
    cut_corpus,
    given_content,
    holds,
    is_complete,
    key_parts,
    refusals,
    shared_identity,
)
from dtt.mesh.comm import Comm

SHOWN = 20
"""Maximum number of damaged units that are listed."""
TITLES = {"corpus": "corpus", "tokenizer": "tokenizer", "tokenize": "options", "chat": "chat"}


@dataclass(frozen=True)
class Reuse:
    """The reusable content of a folder of token files."""

    units: int
    """Number of units of the corpus."""
    identity: Identity | None
    """That of the token files in the folder; None if `dtt tokenize` has not been started there."""
    differences: list[str]
    """Differences between the folder's key and the requested one; if any, nothing is reusable."""
    tokenizer_intact: bool
    """True if tokenizer.json has the recorded sha256."""
    faults: dict[int, Fault]
    """The units that are not finished, by index."""
    removal: str | None
    """A line about the removed documents; None: none are, and none were."""
    complete: bool
    """True if the manifest, the tokenizer and all units are complete."""

    @property
    def pending(self) -> int:
        """The number of units that would be encoded."""
        return 0 if self.complete else len(self.faults)

    def lines(self) -> Iterator[str]:
        """Yield a human-readable report, line by line."""
        if self.identity is None:
            yield "nothing has been created there yet"
        else:
            for part, title in TITLES.items():
                other = [line for line in self.differences if line.startswith(f"{part}.")]
                if other or part in self.identity.key_parts:
                    yield f"{title:<12}{'; '.join(other) or 'as before'}"
        if self.removal is not None:
            yield f"selection   {self.removal}"
        if self.differences:
            yield (
                "next        refused: --overwrite replaces everything, tokenize.out=FOLDER writes "
                "elsewhere"
            )
            return
        if self.identity is not None and not self.tokenizer_intact:
            yield f"            {TOKENIZER} is missing or damaged: it will be created again"
        damaged = {unit: fault for unit, fault in self.faults.items() if fault.why != NOT_MADE}
        if not self.complete:
            for unit, fault in islice(damaged.items(), SHOWN):
                yield f"unit {unit:<7}{fault.why}"
            if len(damaged) > SHOWN:
                yield f"            … and {len(damaged) - SHOWN} more"
        yield f"units       {self.units - self.pending} of {self.units} are finished and kept"
        if self.complete:
            yield "next        nothing to do"
        elif not self.pending:
            yield "next        only the manifest is missing"
        else:
            yield f"next        units that would be created: {self.pending}"


def explain(
    cfg: TokenizeConfig,
    tokenizer: TokenizerConfig,
    corpus_folder: Path,
    out: Path,
    comm: Comm,
    kind: DocumentKind | None = None,
    clean: CleanConfig | None = None,
) -> Reuse | None:
    """Inspect `out` as `tokenize` would; collective, rank 0 gets the result."""
    kind = PlainText(cfg.engine) if kind is None else kind
    started = shared_identity(out, comm)
    cut = cut_corpus(cfg, clean, corpus_folder, comm, started)
    other, kept = list[str](), False
    if comm.rank == 0 and started is not None:
        asked = key_parts(cfg, tokenizer, cut, given_content(tokenizer), kind, started)
        other, kept = refusals(cfg, started, asked), started.key_parts == asked
    reused = started if comm.broadcast(kept) else None
    faults, complete, removed = _all_missing(cut), False, content_key(cut.removals)
    intact = started is not None and holds(out / TOKENIZER, started.tokenizer_sha256)
    if reused is not None:
        identity = reused.model_copy(update={"removed": removed})
        faults = find_faults(out, identity, cut.removals, comm, remember=False)
        complete = intact and is_complete(out, identity, cut, faults)
    if comm.rank > 0:
        return None
    trained = given_content(tokenizer) is None
    removal = _removal(cut, started, removed, trained=trained)
    return Reuse(len(cut.units), started, other, intact, faults, removal, complete)


def _all_missing(cut: Cut) -> dict[int, Fault]:
    return dict.fromkeys(range(len(cut.units)), Fault(NOT_MADE))


def _removal(
    cut: Cut, started: Identity | None, removed: str | None, *, trained: bool
) -> str | None:
    """Return a line about the documents that the selection removes."""
    selection = cut.corpus.selection
    count = 0 if selection is None else sum(selection.facts().removed.values())
    if started is not None and started.removed != removed:
        return (
            f"removes {count:,} documents, others than before: {RETRAINED if trained else REDONE}"
        )
    return None if selection is None else f"removes {count:,} documents"
