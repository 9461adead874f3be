"""Duplicates are those that a comparison of all pairs finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.cleaned_corpus import CleanedCorpus, numbered
from support.corpora import json_lines
from support.planted_copies import planted, similar_pairs

from dtt.base.errors import ConfigError

TEXTS = planted(2500)


@pytest.mark.parametrize("threshold", [0.8, 0.5])
def test_every_removal_has_a_kept_twin_and_hardly_a_similar_pair_stays(
    tmp_path: Path, threshold: float
) -> None:
    corpus = CleanedCorpus(tmp_path, {"a.jsonl": json_lines(TEXTS)})
    folder = corpus.clean(f"clean.near.threshold={threshold}")
    removed = numbered(folder)
    pairs = similar_pairs(TEXTS)
    similar = {pair: score for pair, score in pairs.items() if score >= threshold}
    reasons = {row.reason for row, _ in removed.values()}
    assert reasons == {"exact", "near"}
    for number, (row, twin) in removed.items():
        assert twin is not None
        assert twin < number
        assert twin not in removed
        if row.reason == "exact":
            assert TEXTS[twin].split() == TEXTS[number].split() != []
        else:
            assert row.score == pairs[twin, number] >= threshold
    # Two of a similar pair stay only if they were never compared.
    both_kept = [pair for pair in similar if not removed.keys() & set(pair)]
    assert len(both_kept) <= 0.01 * len(similar)
    assert len(similar) > 500


WORDS = [f"w{i}" for i in range(100)]


def changed(*places: int) -> str:
    """Each changed word changes five of 96 shingles: similarity 0.901; two of them 0.811, three
    0.730."""
    return " ".join(f"x{i}" if i in places else word for i, word in enumerate(WORDS))


NEAR = "clean.near.threshold=0.8"
REMOVED: dict[str, tuple[list[str], tuple[str, ...], dict[int, tuple[str, int, Any]]]] = {
    "other white space, never without words": (
        ["a  b", "a b", " a\nb ", "", "", "  ", "\n", "a c", "a b."],
        ("clean.exact=true",),
        {1: ("exact", 0, None), 2: ("exact", 0, None)},
    ),
    # 3 resembles 1 and 2, which are removed, but not 0; 4 resembles 3.
    "a chain": (
        [changed(), changed(20), changed(20, 40), changed(20, 40, 60), changed(20, 40, 60, 80)],
        (NEAR,),
        {1: ("near", 0, 0.901), 2: ("near", 0, 0.811), 4: ("near", 3, 0.901)},
    ),
    "copies of a removed document": (
        [changed(), changed(0), f"{changed(0)}\n", "\t".join(changed(0).split())],
        (NEAR,),
        dict.fromkeys((1, 2, 3), ("near", 0, 0.979)),
    ),
    "more copies than a group compares": (
        [changed()] * 30 + [changed(0)],
        (NEAR, "clean.exact=true"),
        dict.fromkeys(range(1, 30), ("exact", 0, None)) | {30: ("near", 0, 0.979)},
    ),
    "more similar texts than a group compares": (
        [changed()] * 30 + [changed(0)],
        (NEAR, "clean.exact=false"),
        dict.fromkeys(range(1, 30), ("near", 0, 1.0)) | {30: ("near", 0, 0.979)},
    ),
}


@pytest.mark.parametrize(("texts", "settings", "expected"), REMOVED.values(), ids=REMOVED)
def test_each_duplicate_names_its_kept_twin_and_their_similarity(
    tmp_path: Path,
    texts: list[str],
    settings: tuple[str, ...],
    expected: dict[int, tuple[str, int, float | None]],
) -> None:
    corpus = CleanedCorpus(tmp_path, {"a.jsonl": json_lines(texts)})
    removed = numbered(corpus.clean(*settings))
    assert {
        number: (row.reason, twin, row.score and round(row.score, 3))
        for number, (row, twin) in removed.items()
    } == expected


def test_what_another_corpus_has_is_removed_and_the_other_corpus_stays(tmp_path: Path) -> None:
    others = planted(300, seed=1)
    other = CleanedCorpus(tmp_path / "other", {"a.jsonl": json_lines(others)})
    words = others[3].split()
    texts = [
        "quite another text",
        others[3],
        " ".join(["edited", *words[1:]]),
        "quite another text",
    ]
    corpus = CleanedCorpus(tmp_path / "own", {"a.jsonl": json_lines(texts)})
    before = sorted(other.folder.rglob("*"))
    folder = corpus.clean("clean.near.threshold=0.8", f"clean.near.against=[{other.folder}]")
    removed = {number: row for number, (row, _) in numbered(folder).items()}
    assert {n: (row.reason, row.twin_unit, row.twin) for n, row in removed.items()} == {
        1: ("exact", -1, others.index(others[3])),
        2: ("near", -1, others.index(others[3])),
        3: ("exact", 0, 0),
    }
    assert sorted(other.folder.rglob("*")) == before
    with pytest.raises(ConfigError, match=r"near\.against names a selection") as refused:
        corpus.clean(f"clean.near.against=[{folder}]")
    assert str(refused.value).endswith(str(folder.parent))
