"""What others do to a selection's folder, and what a killed command leaves there."""

from __future__ import annotations

import resource
from collections import Counter
from pathlib import Path

import pytest
from support.cleaned_corpus import CleanedCorpus, result_bytes
from support.planted_copies import json_lines, planted

from dtt.artifacts.selection_manifest import SelectionManifest
from dtt.base.errors import InUse
from dtt.base.files import exclusive
from dtt.clean import partitions, passes
from dtt.clean.passes import Part
from dtt.clean.steps import Steps
from dtt.data.corpus import units

TEXTS = planted(200, seed=5)
NEAR = "clean.near.threshold=0.8"


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CleanedCorpus:
    """A corpus of many small units, with many partitions."""
    monkeypatch.setattr(units, "MIN_UNIT_BYTES", 5000)
    monkeypatch.setattr(units, "MAX_UNIT_BYTES", 5000)
    monkeypatch.setattr(partitions, "PARTITION_ENTRIES", 100)
    files = {f"{i:03d}.jsonl": json_lines(TEXTS[i : i + 5]) for i in range(0, len(TEXTS), 5)}
    return CleanedCorpus(tmp_path, files)


def test_few_files_are_open_at_a_time(corpus: CleanedCorpus) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    now = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (now + 40, hard))
    try:
        folder = corpus.clean("clean.exact=true")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(list(folder.glob(".work/exact-*.json"))) == 2
    assert len(list(folder.glob(".work/unit-*.json"))) >= 40


def test_four_times_the_units_and_partitions_open_four_times_the_files(
    tmp_path: Path, corpus: CleanedCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    array = Steps.array

    def counted(self: Steps, name: str, ending: str, dtype: object) -> object:
        opened.append(ending)
        return array(self, name, ending, dtype)

    monkeypatch.setattr(Steps, "array", counted)
    corpus.clean(NEAR)
    many = Counter(opened)
    opened.clear()
    quarter = TEXTS[: len(TEXTS) // 4]
    files = {f"{i:03d}.jsonl": json_lines(quarter[i : i + 5]) for i in range(0, len(quarter), 5)}
    CleanedCorpus(tmp_path / "quarter", files).clean(NEAR)
    few = Counter(opened)
    for ending in ("exact", "keys", "pairs", "earlier"):
        assert 0 < many[ending] <= 6 * few[ending], ending  # the sizes of units differ


def test_parts_and_the_whole_command_do_not_meet(corpus: CleanedCorpus) -> None:
    folder = corpus.clean(NEAR, part=Part(0, 2))
    with (
        exclusive(folder, "dtt clean", name=".lock-1-of-2"),
        pytest.raises(InUse, match="is in use"),
    ):
        corpus.clean(NEAR)
    corpus.clean(NEAR, part=Part(1, 2))
    corpus.clean(NEAR)


@pytest.mark.parametrize("killed_before", ["write_page", "write_atomically"])
def test_a_kill_near_the_end_leaves_neither_an_old_page_nor_large_files(
    corpus: CleanedCorpus, monkeypatch: pytest.MonkeyPatch, killed_before: str
) -> None:
    folder = corpus.clean(NEAR)
    expected = result_bytes(folder)
    removed = next(folder.glob("*.removed.parquet"))
    removed.unlink()  # so that it is made again
    (folder / "report.html").write_text("an earlier page")

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(passes, killed_before, killed)
        with pytest.raises(KeyboardInterrupt):
            corpus.clean(NEAR)
    corpus.clean(NEAR)
    assert result_bytes(folder) == expected
    assert not list(folder.glob(".work/shingles-*"))


def test_an_unreadable_selection_of_another_user_is_passed_over(corpus: CleanedCorpus) -> None:
    other = corpus.clean(NEAR)
    for marker in other.glob(".work/*.json"):
        marker.unlink()
        marker.mkdir()  # like a missing permission, an OSError also for root
    own = corpus.clean("clean.near.threshold=0.7")
    assert own != other
    assert SelectionManifest.read(own).units
