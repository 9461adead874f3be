"""Duplicates are those that a comparison of all pairs finds."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cleaned_corpus import CleanedCorpus, numbered
from support.corpora import json_lines
from support.planted_copies import planted, similar_pairs

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


def test_the_same_document_with_other_white_space_is_removed_and_without_words_never(
    tmp_path: Path,
) -> None:
    texts = ["a  b", "a b", " a\nb ", "", "", "  ", "\n", "a c", "a b."]
    corpus = CleanedCorpus(tmp_path, {"a.jsonl": json_lines(texts)})
    removed = numbered(corpus.clean("clean.exact=true"))
    assert {number: twin for number, (_, twin) in removed.items()} == {1: 0, 2: 0}


def test_the_end_of_a_chain_stays_if_only_a_removed_document_resembles_it(tmp_path: Path) -> None:
    words = [f"w{i}" for i in range(100)]

    def changed(*places: int) -> str:
        return " ".join(f"x{i}" if i in places else word for i, word in enumerate(words))

    # A changed word changes five of 96 shingles: similarity 0.901; two of them 0.811, three 0.730.
    chain = [changed(), changed(20), changed(20, 40), changed(20, 40, 60), changed(20, 40, 60, 80)]
    corpus = CleanedCorpus(tmp_path, {"a.jsonl": json_lines(chain)})
    removed = numbered(corpus.clean("clean.near.threshold=0.8"))
    # 3 resembles 1 and 2, which are removed, but not 0; 4 resembles 3.
    assert {number: twin for number, (_, twin) in removed.items()} == {1: 0, 2: 0, 4: 3}


def test_a_copy_of_a_removed_document_names_the_kept_twin(tmp_path: Path) -> None:
    words = [f"w{i}" for i in range(100)]
    edited = " ".join(["other", *words[1:]])
    texts = [" ".join(words), edited, f"{edited}\n", "\t".join(edited.split())]
    corpus = CleanedCorpus(tmp_path, {"a.jsonl": json_lines(texts)})
    removed = numbered(corpus.clean("clean.near.threshold=0.8"))
    assert {number: twin for number, (_, twin) in removed.items()} == {1: 0, 2: 0, 3: 0}
    assert {row.reason for row, _ in removed.values()} == {"near"}
    assert len({row.score for row, _ in removed.values()}) == 1


@pytest.mark.parametrize("exact", ["true", "false"])
def test_more_copies_than_a_group_compares_do_not_hide_others(tmp_path: Path, exact: str) -> None:
    words = [f"w{i}" for i in range(100)]
    texts = [" ".join(words)] * 30 + [" ".join(["other", *words[1:]])]
    corpus = CleanedCorpus(tmp_path, {"a.jsonl": json_lines(texts)})
    removed = numbered(corpus.clean("clean.near.threshold=0.8", f"clean.exact={exact}"))
    assert sorted(removed) == list(range(1, 31))
    assert {twin for _, twin in removed.values()} == {0}


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
