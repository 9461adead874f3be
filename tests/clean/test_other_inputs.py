"""Data of tasks and other corpora, on which a selection depends, too."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from support.cleaned_corpus import CleanedCorpus, numbered
from support.corpora import json_lines

from dtt.base.errors import InputError
from dtt.data.corpus import units
from dtt.data.corpus.units import Corpus

NEAR = "clean.near.threshold=0.8"


def text(seed: int) -> str:
    """Fifty words that no other text has."""
    draw = random.Random(seed)
    return " ".join("".join(draw.choices("abcdefghij", k=6)) for _ in range(50))


TEXTS = [text(seed) for seed in range(9)]


def corpus_of(folder: Path, texts: list[str]) -> CleanedCorpus:
    return CleanedCorpus(folder, {"a.jsonl": json_lines(texts)})


def test_changed_data_of_a_task_are_noticed(tmp_path: Path) -> None:
    question, task = tmp_path / "t.jsonl", tmp_path / "t.yaml"
    settings = ("clean.exact=true", f"clean.decontaminate.tasks=[{task}]")
    task.write_text(f'data: {{file: {question}}}\ntype: rolling\nanswer: "{{text}}"\n')
    corpus = corpus_of(tmp_path, TEXTS)

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
        rows = [{"text": t, "score": s} for t, s in zip(TEXTS, scores, strict=True)]
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
