"""After a change, `dtt clean` redoes what depends on it, and the bytes are those of a fresh run."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from support.cleaned_corpus import CleanedCorpus, numbered, result_bytes
from support.planted_copies import json_lines

from dtt.clean import partitions, passes
from dtt.clean.verified_pairs import shingle_sets
from dtt.data.corpus import units

NEAR = "clean.near.threshold=0.8"
UNITS, DOCUMENTS = 6, 80


def text(seed: int) -> str:
    """Fifty words that no other text has."""
    draw = random.Random(seed)
    return " ".join("".join(draw.choices("abcdefghij", k=6)) for _ in range(50))


TEXTS = [text(seed) for seed in range(UNITS * DOCUMENTS)]
for copied, copy in ((10, 90), (350, 420)):  # units 0 and 1, 4 and 5
    TEXTS[copy] = f"{TEXTS[copied]} end"
TEXTS[95] = TEXTS[11]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Make each file a unit, and many partitions; hold the units that are read to be compared."""
    bound = len(json_lines(TEXTS)) // UNITS + 1000
    monkeypatch.setattr(units, "MIN_UNIT_BYTES", bound)
    monkeypatch.setattr(units, "MAX_UNIT_BYTES", bound)
    monkeypatch.setattr(partitions, "PARTITION_ENTRIES", 80)
    found: set[int] = set()

    def recorded(order: object, steps: object, near: object, place: int, count: int) -> None:
        found.add(place)
        shingle_sets(order, steps, near, place, count)  # type: ignore[arg-type]

    monkeypatch.setattr(passes, "shingle_sets", recorded)
    return found


def corpus_of(folder: Path, texts: list[str]) -> CleanedCorpus:
    starts = range(0, len(texts), DOCUMENTS)
    files = {f"{i:04d}.jsonl": json_lines(texts[i : i + DOCUMENTS]) for i in starts}
    return CleanedCorpus(folder, files)


def steps(folder: Path, kind: str) -> dict[str, Path]:
    """The finished steps of a pass, by name: a file of each."""
    found = (path.with_suffix("") for path in folder.glob(f".work/{kind}-*.json"))
    return {path.name: next(f for f in folder.glob(f".work/{path.name}.*") if f.suffix != ".json")
            for path in found}  # fmt: skip


def redone(first: Path, second: Path, kind: str) -> set[str]:
    """The steps of a pass that `second` did not take over from `first`."""
    before, after = steps(first, kind), steps(second, kind)
    return {
        name for name in after if name not in before or not before[name].samefile(after[name])
    }


CHANGES = {
    "to a text without twins": (250, text(1000), set(), set()),
    "to a near copy": (250, f"{TEXTS[170]} end", {3}, {2, 3}),
    "of the twin of another": (350, f"first {TEXTS[350]}", {5}, {4, 5}),
    "of a near copy to nothing": (420, "", {5}, set()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_one_changed_document_redoes_one_unit_and_the_ranges_of_its_keys(
    tmp_path: Path, compared: set[int], change: str
) -> None:
    first = corpus_of(tmp_path, TEXTS).clean(NEAR)
    assert compared == {0, 1, 4, 5}
    assert not steps(first, "shingles")
    assert len(steps(first, "unit")) == UNITS
    number, after, verified, read = CHANGES[change]
    texts = [*TEXTS]
    texts[number] = after
    compared.clear()
    corpus = corpus_of(tmp_path, texts)
    second = corpus.clean(NEAR)
    assert first != second
    assert len(redone(first, second, "unit")) == 1
    assert redone(first, second, "verified") == {f"verified-{place:05d}" for place in verified}
    assert compared == read
    # A key that goes and one that comes, in each band.
    assert len(redone(first, second, "exact")) <= 2 < len(steps(second, "exact"))
    assert 1 < len(redone(first, second, "pairs")) <= 2 * 19 < len(steps(second, "pairs"))
    expected = result_bytes(second)
    shutil.rmtree(first)
    shutil.rmtree(second)
    assert result_bytes(corpus.clean(NEAR)) == expected
    assert len(numbered(second)) in (2, 3, 4)
