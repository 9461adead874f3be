"""Documents in other languages are removed, by the identifier of an optional package."""

from __future__ import annotations

import sys
from collections import Counter
from importlib import metadata
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from support.cleaned_corpus import CleanedCorpus

from dtt.base.errors import ConfigError, EnvironmentUnfit
from dtt.clean.filters import SAMPLE, LanguageFilter
from dtt.clean.unit_pass import make_filters
from dtt.config.clean import CleanConfig, LanguageConfig

GERMAN = "Es war einmal ein König, der hatte drei Söhne und wusste nicht, wem er das Reich gab."
ENGLISH = "Once upon a time there was a king who had three sons, and he could not choose."


def test_documents_in_other_languages_are_removed_with_their_language() -> None:
    [english] = make_filters(CleanConfig(language=LanguageConfig(keep=("en",))))
    assert english(ENGLISH, {}) is None
    removed = english(GERMAN, {})
    assert removed is not None
    assert (removed.reason, removed.rule) == ("language", "de")
    assert removed.score is not None
    assert 0.65 < removed.score <= 1
    assert LanguageFilter(LanguageConfig(keep=("en", "de")))(GERMAN, {}) is None


def test_a_text_below_the_smallest_probability_is_removed() -> None:
    mixed = ENGLISH + " " + GERMAN
    removed = LanguageFilter(LanguageConfig(keep=("de", "en"), min_confidence=1.0))(mixed, {})
    assert removed is not None
    assert removed.score is not None
    assert removed.score < 1
    at_it = LanguageConfig(keep=("de", "en"), min_confidence=removed.score)
    assert LanguageFilter(at_it)(mixed, {}) is None


@pytest.mark.parametrize("text", ["", "12345", "\x00"])
def test_a_text_without_a_language_is_removed(text: str) -> None:
    assert LanguageFilter(LanguageConfig(keep=("en",)))(text, {}) is not None


def test_the_start_of_a_long_document_decides() -> None:
    german = GERMAN * (SAMPLE // len(GERMAN) + 1)
    removed = LanguageFilter(LanguageConfig(keep=("en",)))(german + ENGLISH * 1000, {})
    assert removed is not None
    assert removed.rule == "de"


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no language deu, xx") as refused:
        LanguageFilter(LanguageConfig(keep=("xx", "en", "deu")))
    assert " de," in str(refused.value)


def test_a_corpus_is_not_cleaned_without_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = CleanedCorpus(tmp_path, {"a.jsonl": b'{"text": "one two"}\n'})

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(EnvironmentUnfit, match=r"clean\.language requires py3langid") as refused:
        corpus.clean("clean.language.keep=[en]")
    assert "next:" in str(refused.value)


def test_documentation_in_ten_languages_is_told_apart(shared: Path) -> None:
    table = pq.read_table(shared / "data/multilingual/train-00000-of-00001.parquet")
    wrong = Counter[tuple[str, str]]()
    judges = {
        code: LanguageFilter(LanguageConfig(keep=(code,), min_confidence=0.65))
        for code in table["language"].unique().to_pylist()
    }
    for code, text in zip(table["language"].to_pylist(), table["text"].to_pylist(), strict=True):
        removed = judges[code](text, {})
        if removed is not None:
            wrong[code, removed.rule] += 1
    assert wrong.total() <= 12, wrong  # 1 %, among them pages of English names
