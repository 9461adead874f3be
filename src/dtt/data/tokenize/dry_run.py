"""Dry run of `dtt tokenize`: reports which units it would reuse, and why; writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from dtt.config.data import TokenizeConfig, TokenizerConfig
from dtt.data.text.unit_encoder import DocumentKind, PlainText
from dtt.data.tokenize.verification import NOT_MADE, Fault, find_faults, sound_manifest
from dtt.data.tokenize.work_plan import (
    TOKENIZER,
    Identity,
    cut_corpus,
    differences,
    given_content,
    holds,
    key_parts,
    read_identity,
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
) -> Reuse | None:
    """Inspect `out` as `tokenize` would; collective, rank 0 gets the result."""
    kind = PlainText(cfg.engine) if kind is None else kind
    cut = cut_corpus(cfg, corpus_folder, comm)
    started, other = None, []
    if comm.rank == 0:
        started = read_identity(out)
        asked = key_parts(cfg, tokenizer, cut, given_content(tokenizer), kind, started)
        other = differences(started.key_parts, asked) if started else []
    key = comm.broadcast(started.key if started and not other else None)
    all_missing = dict.fromkeys(range(len(cut.units)), Fault(NOT_MADE))
    faults = (
        all_missing if key is None else find_faults(out, len(cut.units), key, comm, remember=False)
    )
    if comm.rank > 0:
        return None
    intact = started is not None and holds(out / TOKENIZER, started.tokenizer_sha256)
    complete = (
        key is not None
        and intact
        and sound_manifest(out) is not None
        and all(fault.intact for fault in faults.values())
    )
    return Reuse(len(cut.units), started, other, intact, faults, complete)
