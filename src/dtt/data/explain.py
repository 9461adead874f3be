"""Dry run of `dtt tokenize`: reports which units it would reuse, and why; writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from dtt.config.data import TokenizeConfig, TokenizerConfig
from dtt.data.plan import (
    TOKENIZER,
    cut_corpus,
    differences,
    given_content,
    holds,
    key_parts,
    read_begun,
)
from dtt.data.verify import NOT_MADE, Fault, find_faults, sound_manifest
from dtt.runtime.comm import Comm

SHOWN = 20
"""Maximum number of damaged units that are listed."""
TITLES = {"corpus": "corpus", "tokenizer": "tokenizer", "tokenize": "options"}


@dataclass(frozen=True)
class Reuse:
    """The reusable content of a folder of token files."""

    units: int
    """Number of units of the corpus."""
    begun: bool
    """True if `dtt tokenize` has been started in the folder."""
    differences: list[str]
    """Differences between the folder's key and the requested one; if any, nothing is reusable."""
    tokenizer_whole: bool
    """True if tokenizer.json has the recorded sha256."""
    faults: dict[int, Fault]
    """The units that are not finished, by index."""
    complete: bool
    """True if the manifest, the tokenizer and all units are complete."""

    @property
    def pending(self) -> int:
        """The number of units that would be made."""
        return 0 if self.complete else len(self.faults)

    def lines(self) -> Iterator[str]:
        """Yield a report for people, line by line."""
        if not self.begun:
            yield "nothing was made there yet"
        for part in ("corpus", "tokenizer", "tokenize") if self.begun else ():
            other = [line for line in self.differences if line.startswith(f"{part}.")]
            yield f"{TITLES[part]:<12}{'; '.join(other) or 'as before'}"
        if self.differences:
            yield "next        refused: --overwrite makes all anew, tokenize.out=FOLDER elsewhere"
            return
        if self.begun and not self.tokenizer_whole:
            yield f"            {TOKENIZER} is missing or damaged: it is made anew"
        damaged = {unit: fault for unit, fault in self.faults.items() if fault.why != NOT_MADE}
        if not self.complete:
            for unit, fault in islice(damaged.items(), SHOWN):
                yield f"unit {unit:<7}{fault.why}"
            if len(damaged) > SHOWN:
                yield f"            … and {len(damaged) - SHOWN} more"
        yield f"units       {self.units - self.pending} of {self.units} are finished and kept"
        yield f"next        {self._next()}"

    def _next(self) -> str:
        if self.complete:
            return "nothing to do"
        if not self.pending:
            return "only the manifest is missing"
        return f"{self.pending} {'unit' if self.pending == 1 else 'units'} would be made"


def explain(
    cfg: TokenizeConfig, tokenizer: TokenizerConfig, corpus_folder: Path, out: Path, comm: Comm
) -> Reuse | None:
    """Inspect `out` as `tokenize` would; collective, rank 0 gets the result."""
    cut = cut_corpus(cfg, corpus_folder, comm)
    begun, other = None, []
    if comm.rank == 0:
        begun = read_begun(out)
        asked = key_parts(cfg, tokenizer, cut, given_content(tokenizer))
        other = differences(begun.key_parts, asked) if begun else []
    key = comm.broadcast(begun.key if begun and not other else None)
    all_missing = dict.fromkeys(range(len(cut.units)), Fault(NOT_MADE))
    faults = (
        all_missing if key is None else find_faults(out, len(cut.units), key, comm, remember=False)
    )
    if comm.rank > 0:
        return None
    whole = begun is not None and holds(out / TOKENIZER, begun.tokenizer_sha256)
    complete = (
        key is not None
        and whole
        and sound_manifest(out) is not None
        and all(fault.whole for fault in faults.values())
    )
    return Reuse(len(cut.units), begun is not None, other, whole, faults, complete)
