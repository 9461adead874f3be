"""The bytes of a selection do not depend on ranks, parts, kills and damage."""

from __future__ import annotations

import importlib.util
import json
import os
import random
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
from dtt.base.errors import DamagedError
from dtt.clean import pairs, steps, unit_pass
from dtt.clean.passes import Part
from dtt.clean.steps import Steps

TEXTS = planted(3000, seed=3)
NEAR = "clean.near.threshold=0.8"
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


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


needs_mpirun = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None,
    reason="no mpirun or no mpi4py: pip install -e '.[mpich]'",
)


@needs_mpirun
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_of_mpi_write_the_same_bytes(corpus: CleanedCorpus, ranks: int) -> None:
    expected = fresh(corpus)
    job = [str(MPIRUN), "-n", str(ranks), *command(corpus, "--json")]
    done = subprocess.run(job, capture_output=True, text=True, timeout=TIMEOUT)
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


def test_parts_are_found_by_the_passes_after_them(corpus: CleanedCorpus) -> None:
    expected = fresh(corpus)
    folder = corpus.clean(part=Part(1, 2))
    assert not SelectionManifest.exists(folder)
    corpus.clean(part=Part(0, 2))
    finished = {path: path.stat().st_mtime_ns for path in folder.glob(".work/unit-*")}
    corpus.clean()
    assert result_bytes(folder) == expected
    assert {path: path.stat().st_mtime_ns for path in folder.glob(".work/unit-*")} == finished


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every group small: partitions, sorted runs, batches, merges and open files."""
    monkeypatch.setattr(pairs, "PARTITION_ENTRIES", 5000)
    monkeypatch.setattr(unit_pass, "RUN_ENTRIES", 5000)
    monkeypatch.setattr(unit_pass, "UNIT_BATCH_BYTES", 30_000)
    for module in (steps, pairs):
        monkeypatch.setattr(module, "OPEN_FILES", 2)


def test_no_size_of_a_group_changes_anything(
    corpus: CleanedCorpus, request: pytest.FixtureRequest
) -> None:
    expected = fresh(corpus)
    request.getfixturevalue("small")
    assert result_bytes(corpus.clean()) == expected


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
