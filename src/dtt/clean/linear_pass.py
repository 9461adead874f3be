"""The linear pass: which documents are removed, by which twin. One process does it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dtt.artifacts.selection_manifest import SelectionUnit, removals_name
from dtt.base.files import write_atomically
from dtt.base.log import log
from dtt.clean.contamination import MAX_DOCUMENTS, TaskNgrams
from dtt.clean.pairs import PAIR, SCORED, DocumentOrder, DocumentSet, Pairs, pairs_of_unit
from dtt.clean.removals import RemovedRow, decode, encode
from dtt.clean.steps import SortedFile, SortedFiles, Steps
from dtt.clean.unit_pass import HIT

ENGLISH = {
    "gopher.min_stop_words": 0,
    "gopher.min_words": 0,
    "gopher.min_mean_word_length": 0,
    "gopher.max_mean_word_length": 100_000,
    "c4.min_sentences": 0,
}
"""Limits that suit English, its words, spaces and full stops; with values that remove nothing."""


class Decisions:
    """Walks through the documents in order, with one bit for each.

    A document is removed if and only if it equals or resembles an earlier document that is kept,
    its twin. So in a chain A ~ B ~ C in which A and C differ, B is removed and C stays.
    """

    def __init__(
        self, order: DocumentOrder, steps: Steps, copies: SortedFiles, tasks: TaskNgrams | None
    ) -> None:
        """Prepare for the units of `order`, whose pairs are finished steps."""
        self._order, self._steps = order, steps
        self._tasks = tasks
        self._with_ngram = np.zeros(0 if tasks is None else len(tasks), np.int64)
        """Number of documents of the corpus that contain each n-gram of the tasks."""
        for placed in order.units[order.own :] if tasks is not None else ():
            hits = steps.array(placed.step, "hits", HIT)
            self._with_ngram += np.bincount(hits["ngram"], minlength=len(self._with_ngram))
        self.common, self.questions = 0, Counter[str]()
        """Documents that stay although they share n-grams with tasks, and these questions."""
        self._removed = DocumentSet(order)
        self._copied = DocumentSet(order)
        for pairs in copies.chunks(order.bounds):
            self._copied.add(pairs["earlier"])
        self._near: dict[int, tuple[int, float]] = {}
        """Twin and similarity of removed documents that have exact copies: those of the copies."""

    def unit(self, place: int, exact: Pairs, *, near: bool) -> list[RemovedRow]:
        """Return the removed documents of the next unit, sorted; `exact` are its exact copies."""
        steps = self._steps
        filtered = decode(steps.path(self._order.units[place].step, "filtered"))
        copies = dict(exact.tolist())
        similar: dict[int, list[tuple[int, float]]] = {}
        if near:
            pairs = steps.array(f"verified-{place:05d}", "pairs", SCORED)
            for later, earlier, score in pairs.tolist():
                similar.setdefault(later, []).append((earlier, score))
        # Before its copies and what resembles it: they are compared with documents that stay. (Its
        # exact copies have the same words, so they are contaminated, too.)
        contaminated = self._contaminated(place)
        gone = {place << 32 | row.document for row in contaminated}
        for number in gone:
            self._removed.add_one(number)
        rows = [*filtered, *contaminated]
        for number in sorted((copies.keys() | similar.keys()) - gone):
            row = self._judge(number, copies.get(number), similar.get(number, ()))
            if row is not None:
                self._removed.add_one(number)
                rows.append(row)
        return sorted(rows, key=lambda row: row.document)

    def _contaminated(self, place: int) -> list[RemovedRow]:
        """Return the documents of a unit that contain a part of a task."""
        step = self._order.units[place].step
        rows: list[RemovedRow] = []
        if self._tasks is None:
            return rows
        hits = self._steps.array(step, "hits", HIT)
        documents, starts = np.unique(hits["document"], return_index=True)
        several = np.split(hits["ngram"], starts)[1:]  # in front of the first there is none
        for document, ngrams in zip(documents.tolist(), several, strict=True):
            removal = self._tasks.removal(ngrams, self._with_ngram)
            if removal is not None:
                rows.append(RemovedRow(document, *removal))
            else:
                self.common += 1
                self.questions.update(self._tasks.questions(ngrams))
        return rows

    def _judge(
        self, number: int, first: int | None, similar: Sequence[tuple[int, float]]
    ) -> RemovedRow | None:
        """Return why a document is removed; None: it stays. `first` is the first of its copies."""
        document = number & (2**32 - 1)
        if first is not None and not self._removed.has(first):
            twin_unit, twin = self._order.twin(first)
            return RemovedRow(document, "exact", "", None, twin_unit, twin)
        if first is not None:
            near: tuple[int, float] | None = self._near[first]
        else:  # pairs ascend, so this is the earliest twin
            near = next((pair for pair in similar if not self._removed.has(pair[0])), None)
        if near is None:
            return None
        if self._copied.has(number):
            self._near[number] = near
        twin_unit, twin = self._order.twin(near[0])
        return RemovedRow(document, "near", "jaccard", near[1], twin_unit, twin)


def write_units(
    order: DocumentOrder,
    steps: Steps,
    copies: list[SortedFile],
    out: Path,
    tasks: TaskNgrams | None,
    *,
    near: bool,
) -> list[SelectionUnit]:
    """Write the file of each unit of the corpus; return what the manifest says of them."""
    pairs = SortedFiles(steps, copies, PAIR)
    decisions = Decisions(order, steps, pairs, tasks)
    units, rules = [], Counter[str]()
    for placed in order.units[order.own :]:
        exact = pairs_of_unit(pairs, placed.place)
        rows = decisions.unit(placed.place, exact, near=near)
        path = out / removals_name(placed.unit.index)
        digest = None
        rules.update(row.rule for row in rows if row.reason == "rules")
        if rows:
            content = encode(rows)
            digest = hashlib.sha256(content).hexdigest()
            write_atomically(path, content)
        else:
            path.unlink(missing_ok=True)
        sizes = steps.array(placed.step, "sizes", np.uint32)
        units.append(
            SelectionUnit(
                documents=len(sizes),
                bytes=int(sizes.sum(dtype=np.int64)),
                removed=dict(sorted(Counter(row.reason for row in rows).items())),
                removed_bytes=int(sizes[[row.document for row in rows]].sum(dtype=np.int64)),
                sha256=digest,
            )
        )
    documents = sum(unit.documents for unit in units)
    if decisions.common:
        questions = ", ".join(f"{name} ({n:,})" for name, n in decisions.questions.most_common(5))
        log.warning(
            "%s documents share n-grams with tasks and stay, as more than %d documents contain "
            "each of these: idioms, or questions that were copied often: %s; the latter must be "
            "removed from the dataset itself, and results of these questions do not count",
            f"{decisions.common:,}", MAX_DOCUMENTS, questions,
        )  # fmt: skip
    if rules.total() * 2 > documents:
        log.warning("%s", _strict_rules(rules, documents))
    return units


def _strict_rules(rules: Counter[str], documents: int) -> str:
    """Return the warning that quality rules remove more than half of the documents."""
    counts = ", ".join(f"{rule} ({n:,})" for rule, n in rules.most_common(5))
    found = f"quality rules remove {rules.total():,} of {documents:,} documents: {counts}"
    foreign = [rule for rule, _ in rules.most_common() if rule in ENGLISH]
    if not foreign:
        return f"{found}; clean.limits changes single limits"
    rule, limit = foreign[0].split(".")
    return (
        f"{found}; {', '.join(foreign)} assume English: for another language set other limits, "
        f"such as clean.limits={{{rule}: {{{limit}: {ENGLISH[foreign[0]]}}}}}"
    )
