"""What others do to a selection's folder, and what a killed command leaves there."""

from __future__ import annotations

import random
import resource
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.cleaned_corpus import CleanedCorpus, result_bytes
from support.corpora import json_lines

from dtt.artifacts.selection_manifest import SelectionManifest
from dtt.base.errors import InUse
from dtt.base.files import exclusive
from dtt.clean import pairs, passes, steps
from dtt.clean.passes import Part
from dtt.data.corpus import units

UNITS, DOCUMENTS = 40, 5


def text(number: int) -> str:
    """Fifty words; the first documents of all units resemble each other or are equal."""
    unit, place = divmod(number, DOCUMENTS)
    draw = random.Random(number if place > 1 else place)
    words = ["".join(draw.choices("abcdefghij", k=6)) for _ in range(50)]
    return " ".join([f"{unit % 7:06}", *words] if place == 0 else words)


NEAR = "clean.near.threshold=0.8"


def corpus_of(folder: Path, count: int) -> CleanedCorpus:
    """A corpus of `count` units."""
    starts = range(0, count * DOCUMENTS, DOCUMENTS)
    lots = [json_lines([text(i + j) for j in range(DOCUMENTS)]) for i in starts]
    return CleanedCorpus(folder, {f"{i:04d}.jsonl": lot for i, lot in enumerate(lots)})


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CleanedCorpus:
    """A corpus of many small units, whose files are merged several times, with many partitions."""
    monkeypatch.setattr(units, "MIN_UNIT_BYTES", 2000)
    monkeypatch.setattr(units, "MAX_UNIT_BYTES", 2000)
    monkeypatch.setattr(pairs, "PARTITION_ENTRIES", 50)
    for module in (steps, pairs):
        monkeypatch.setattr(module, "OPEN_FILES", 6)
    return corpus_of(tmp_path, UNITS)


def test_few_files_are_open_at_a_time(corpus: CleanedCorpus) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    now = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (now + 20, hard))
    try:
        folder = corpus.clean(NEAR)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(SelectionManifest.read(folder).units) == UNITS


OPENED: Counter[str] = Counter()
"""Opens of files of steps, by kind. An audit hook cannot be removed, so all tests share one."""


@pytest.fixture(scope="module")
def opened() -> Counter[str]:
    """Count the opens of this process, through whatever function, from now on."""

    def count(event: str, given: tuple[object, ...]) -> None:
        if event == "open" and isinstance(given[0], (str, Path)):
            path = Path(given[0])
            if path.parent.name == SelectionManifest.work:
                OPENED[path.name.lstrip(".").split("-")[0]] += 1

    sys.addaudithook(count)
    return OPENED


def test_files_are_opened_in_proportion_to_units_and_partitions(
    tmp_path: Path, corpus: CleanedCorpus, opened: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quarter = corpus_of(tmp_path / "quarter", UNITS // 4)

    def opens(cleaned: CleanedCorpus) -> Counter[str]:
        opened.clear()
        shutil.rmtree(cleaned.clean(NEAR))
        return opened.copy()

    few, many = opens(quarter), opens(corpus)
    assert few.keys() == {"unit", "exact", "pairs", "merged", "shingles", "verified"}
    assert many.total() <= 4.2 * few.total(), (few, many)
    assert many["unit"] <= 4 * few["unit"]
    monkeypatch.setattr(pairs, "PARTITION_ENTRIES", 12)
    more = opens(corpus)
    assert all(more[kind] == many[kind] for kind in ("unit", "shingles", "verified"))
    assert more["pairs"] <= 4.2 * many["pairs"]
    assert more.total() <= 4.2 * many.total()


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
    assert {path.name.split("-")[0] for path in folder.glob(".work/*")} == {"unit"}
