"""The bytes of a selection do not depend on ranks, kills and damage; few files are open at once."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cleaned_corpus import CleanedCorpus, numbered, result_bytes
from support.corpora import json_lines
from support.planted_copies import planted
from support.running import TIMEOUT

from dtt.artifacts.selection_manifest import SelectionManifest
from dtt.base.errors import DamagedError, InUse
from dtt.base.files import exclusive
from dtt.clean import pairs, run, steps, unit_pass
from dtt.clean.steps import Steps
from dtt.data.corpus import units

TEXTS = planted(3000, seed=3)
NEAR = "clean.near.threshold=0.8"


@pytest.fixture
def corpus(tmp_path: Path) -> CleanedCorpus:
    """A corpus of four units in two files."""
    return CleanedCorpus(
        tmp_path, {"a.jsonl": json_lines(TEXTS[:2000]), "b.jsonl": json_lines(TEXTS[2000:])}
    )


def fresh(corpus: CleanedCorpus) -> dict[str, str]:
    """The bytes that one process writes; the selection is removed afterwards."""
    folder = corpus.clean()
    expected = result_bytes(folder)
    assert len(SelectionManifest.read(folder).units) > 2
    assert len(expected) > 3
    shutil.rmtree(folder)
    return expected


def command(corpus: CleanedCorpus, *options: str) -> list[str]:
    paths = (f"download.dataset={corpus.source}", f"download.out={corpus.folder}")
    return [sys.executable, "-m", "dtt.main", "clean", *paths, NEAR, *options]


def selection(corpus: CleanedCorpus) -> Path:
    (folder,) = corpus.folder.glob("selection-*")
    return folder


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_of_mpi_write_the_same_bytes(corpus: CleanedCorpus, ranks: int, mpirun: Any) -> None:
    expected = fresh(corpus)
    done = mpirun(ranks, *command(corpus, "--json")[1:])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["units_read"] == len(
        SelectionManifest.read(selection(corpus)).units
    )
    assert result_bytes(selection(corpus)) == expected


def test_tasks_of_srun_without_mpi_write_the_same_bytes(corpus: CleanedCorpus) -> None:
    expected = fresh(corpus)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3"}
    tasks = [
        subprocess.Popen(
            command(corpus),
            env=os.environ | slurm | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(3)
    ]  # fmt: skip
    results = [task.communicate(timeout=TIMEOUT) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0, 0], results
    assert [output.count("selection") > 0 for output, _ in results] == [True, False, False]
    assert result_bytes(selection(corpus)) == expected


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every group small: partitions, sorted runs, batches, merges and open files."""
    monkeypatch.setattr(pairs, "PARTITION_ENTRIES", 5000)
    monkeypatch.setattr(unit_pass, "RUN_ENTRIES", 5000)
    monkeypatch.setattr(unit_pass, "UNIT_BATCH_BYTES", 30_000)
    for module in (steps, pairs):
        monkeypatch.setattr(module, "OPEN_FILES", 2)


def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bytes(
    corpus: CleanedCorpus, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = fresh(corpus)
    request.getfixturevalue("small")
    written: Counter[str] = Counter()
    write = Steps.write

    def killed(self: Steps, name: str, *given: Any) -> None:
        if written[name] == 0 and written.total() % 5 == 4:
            written["killed"] += 1
            raise KeyboardInterrupt
        write(self, name, *given)
        written[name] += 1

    monkeypatch.setattr(Steps, "write", killed)
    while written.total() < 1000:
        with suppress(KeyboardInterrupt):
            assert result_bytes(corpus.clean()) == expected
            break
    assert written.pop("killed") > 9
    assert {*written.values()} == {1}  # nothing is done twice


@pytest.mark.slow
def test_after_kills_at_random_moments_a_rerun_gives_the_same_bytes(corpus: CleanedCorpus) -> None:
    expected = fresh(corpus)
    draw = random.Random(1)
    for _ in range(3):
        job = subprocess.Popen(command(corpus), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        end = time.monotonic() + TIMEOUT
        wanted = draw.randint(1, 50)  # files: all passes together write about sixty
        while time.monotonic() < end and job.poll() is None:
            if len(list(corpus.folder.glob("selection-*/.work/*"))) >= wanted:
                break
        job.send_signal(signal.SIGKILL)
        job.communicate(timeout=TIMEOUT)
    folder = corpus.clean()
    assert result_bytes(folder) == expected
    assert not list(folder.rglob("*.tmp"))


@pytest.mark.parametrize("damage", ["cut", "changed", "deleted", "marker"])
def test_a_damaged_file_of_a_step_is_made_again(corpus: CleanedCorpus, damage: str) -> None:
    expected = fresh(corpus)
    folder = corpus.clean()
    (folder / SelectionManifest.filename).unlink()
    (folder / ".00000.removed.parquet.0123abcd.tmp").touch()  # of a killed process
    path = max(folder.glob(".work/unit-*.keys"))
    match damage:
        case "cut":
            os.truncate(path, path.stat().st_size // 2)
        case "changed":
            keys = np.fromfile(path, np.uint64)
            keys[: len(keys) // 2] = 0
            keys.tofile(path)
        case "deleted":
            path.unlink()
        case "marker":
            path.with_suffix(".json").write_text("{")
    others = {p: p.stat().st_mtime_ns for p in folder.glob(".work/*.keys") if p != path}
    corpus.clean()
    assert result_bytes(folder) == expected
    assert {p: p.stat().st_mtime_ns for p in others} == others


def test_a_damaged_selection_is_made_again_and_a_sound_one_is_kept(corpus: CleanedCorpus) -> None:
    folder = corpus.clean()
    expected = result_bytes(folder)
    before = {path: path.stat().st_mtime_ns for path in folder.glob("[!.]*")}
    corpus.clean()
    assert {path: path.stat().st_mtime_ns for path in folder.glob("[!.]*")} == before
    max(folder.glob("*.removed.parquet")).write_bytes(b"")
    corpus.clean()
    assert result_bytes(folder) == expected


def test_a_file_that_changed_after_the_download_is_refused(corpus: CleanedCorpus) -> None:
    path = corpus.source / "b.jsonl"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"yes", b"noo"))
    with pytest.raises(DamagedError, match=r"b\.jsonl"):
        corpus.clean()
    path.write_bytes(content)  # with another time, but the content of the manifest
    assert numbered(corpus.clean())


# ---- many units ----------------------------------------------------------------------------------

UNITS, DOCUMENTS = 40, 5


def text(number: int) -> str:
    """Fifty words; the first documents of all units resemble each other or are equal."""
    unit, place = divmod(number, DOCUMENTS)
    draw = random.Random(number if place > 1 else place)
    words = ["".join(draw.choices("abcdefghij", k=6)) for _ in range(50)]
    return " ".join([f"{unit % 7:06}", *words] if place == 0 else words)


def corpus_of(folder: Path, count: int) -> CleanedCorpus:
    """A corpus of `count` units."""
    starts = range(0, count * DOCUMENTS, DOCUMENTS)
    lots = [json_lines([text(i + j) for j in range(DOCUMENTS)]) for i in starts]
    return CleanedCorpus(folder, {f"{i:04d}.jsonl": lot for i, lot in enumerate(lots)})


@pytest.fixture
def lots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CleanedCorpus:
    """A corpus of many small units, whose files are merged several times, with many partitions."""
    monkeypatch.setattr(units, "MIN_UNIT_BYTES", 2000)
    monkeypatch.setattr(units, "MAX_UNIT_BYTES", 2000)
    monkeypatch.setattr(pairs, "PARTITION_ENTRIES", 50)
    for module in (steps, pairs):
        monkeypatch.setattr(module, "OPEN_FILES", 6)
    return corpus_of(tmp_path, UNITS)


def test_few_files_are_open_at_a_time(lots: CleanedCorpus) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    now = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (now + 20, hard))
    try:
        folder = lots.clean()
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
    tmp_path: Path,
    lots: CleanedCorpus,
    opened: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quarter = corpus_of(tmp_path / "quarter", UNITS // 4)

    def opens(cleaned: CleanedCorpus) -> Counter[str]:
        opened.clear()
        shutil.rmtree(cleaned.clean())
        return opened.copy()

    few, many = opens(quarter), opens(lots)
    assert few.keys() == {"unit", "exact", "pairs", "merged", "shingles", "verified"}
    assert many.total() <= 4.2 * few.total(), (few, many)
    assert many["unit"] <= 4 * few["unit"]
    monkeypatch.setattr(pairs, "PARTITION_ENTRIES", 12)
    more = opens(lots)
    assert all(more[kind] == many[kind] for kind in ("unit", "shingles", "verified"))
    assert more["pairs"] <= 4.2 * many["pairs"]
    assert more.total() <= 4.2 * many.total()


def test_two_commands_do_not_make_one_selection(lots: CleanedCorpus) -> None:
    folder = lots.clean()
    with exclusive(folder, "dtt clean"), pytest.raises(InUse, match="is in use"):
        lots.clean()


@pytest.mark.parametrize("killed_before", ["write_page", "write_atomically"])
def test_a_kill_near_the_end_leaves_neither_an_old_page_nor_large_files(
    lots: CleanedCorpus, monkeypatch: pytest.MonkeyPatch, killed_before: str
) -> None:
    folder = lots.clean()
    expected = result_bytes(folder)
    removed = next(folder.glob("*.removed.parquet"))
    removed.unlink()  # so that it is made again
    (folder / "report.html").write_text("an earlier page")

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, killed_before, killed)
        with pytest.raises(KeyboardInterrupt):
            lots.clean()
    lots.clean()
    assert result_bytes(folder) == expected
    assert {path.name.split("-")[0] for path in folder.glob(".work/*")} == {"unit"}
