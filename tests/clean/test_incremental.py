"""After a change, `dtt clean` redoes what depends on it, and the bytes are those of a fresh run."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from support.cleaned_corpus import CleanedCorpus, numbered, result_bytes
from support.planted_copies import json_lines

from dtt.base.errors import InputError
from dtt.clean import partitions, passes
from dtt.clean.verified_pairs import shingle_sets
from dtt.data.corpus import units
from dtt.data.corpus.units import Corpus

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
    return {name for name in after if name not in before or not before[name].samefile(after[name])}


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


def test_changed_data_of_a_task_are_noticed(tmp_path: Path) -> None:
    question, task = tmp_path / "t.jsonl", tmp_path / "t.yaml"
    settings = ("clean.exact=true", f"clean.decontaminate.tasks=[{task}]")
    task.write_text(f'data: {{file: {question}}}\ntype: rolling\nanswer: "{{text}}"\n')
    corpus = corpus_of(tmp_path, TEXTS[:9])

    def removed(leaked: str) -> list[int]:
        question.write_text(json.dumps({"text": leaked, "other": TEXTS[7]}) + "\n")
        return list(numbered(corpus.clean(*settings)))

    assert removed(TEXTS[3]) == [3]
    before = {path: path.stat().st_mtime_ns for path in corpus.folder.glob("selection-*/[!.]*")}
    assert removed(TEXTS[3]) == [3]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert removed(TEXTS[5]) == [5]
    task.write_text(task.read_text().replace("{text}", "{other}"))
    assert removed(TEXTS[5]) == [7]
    assert len([*corpus.folder.glob("selection-*/.work/unit-*.json")]) == 1
    # Tokenizing finds it without the data of the task.
    question.unlink()
    cleaned = Corpus(corpus.folder, clean=corpus.config(*settings).clean)
    assert cleaned.selection is not None
    assert cleaned.selection.removed(0).tolist() == [7]


def test_documents_that_another_selection_removes_are_nobodys_twins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scored(scores: list[int]) -> CleanedCorpus:
        rows = [{"text": t, "score": s} for t, s in zip(TEXTS[:9], scores, strict=True)]
        lines = [json.dumps(row).encode() + b"\n" for row in rows]
        files = {f"{i}.jsonl": b"".join(lines[i : i + 3]) for i in (0, 3, 6)}
        return CleanedCorpus(tmp_path / "other", files)

    other = scored([1, 9, 9, 9, 1, 9, 9, 9, 1])
    with monkeypatch.context() as patch:
        patch.setattr(units, "MAX_UNIT_BYTES", 1500)  # three units
        kept = other.clean("clean.where=[{column: score, min: 3}]")
    own = corpus_of(tmp_path / "own", [TEXTS[8], TEXTS[7], f"{TEXTS[4]} end", f"{TEXTS[3]} end"])

    def twins(against: Path) -> tuple[Path, dict[int, tuple[str, int | None, int | None]]]:
        folder = own.clean(NEAR, f"clean.near.against=[{against}]")
        rows = {number: row for number, (row, _) in numbered(folder).items()}
        return folder, {n: (r.reason, r.twin_unit, r.twin) for n, r in rows.items()}

    whole, removed = twins(other.folder)
    assert removed == {
        0: ("exact", -1, 8), 1: ("exact", -1, 7), 2: ("near", -1, 4), 3: ("near", -1, 3)
    }  # fmt: skip
    selected, removed = twins(kept)
    assert removed == {1: ("exact", -1, 7), 3: ("near", -1, 3)}
    assert selected != whole
    assert Corpus(
        own.folder, clean=own.config(NEAR, f"clean.near.against=[{kept}]").clean
    ).selection
    with pytest.raises(InputError, match="no selection in"):
        twins(other.folder / "selection-00000000")
    scored([9] * 9)
    with pytest.raises(InputError, match="another version of the corpus"):
        twins(kept)
