"""Stopping on request: signals only set a request, and all ranks follow the largest."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from support.ranks import on_ranks

from dtt.artifacts.jobdir import JobDir
from dtt.base import files
from dtt.base.interrupts import STOP_SIGNALS
from dtt.base.ranks import Ranks
from dtt.jobs.stop import Request, Requests
from dtt.mesh.dist import World, start


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    job = JobDir(tmp_path / "job")
    job.begin_attempt()
    return job


@pytest.fixture
def alone() -> World:
    return start(Ranks(), "cpu")


def listening(job: JobDir) -> Requests:
    requests = Requests()
    requests.watch(job)
    return requests


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_only_sets_a_request_that_persists(
    job: JobDir, alone: World, number: signal.Signals
) -> None:
    requests = listening(job)
    assert requests.agreed(alone, 7).request is Request.NONE
    for _ in range(1 if number is signal.SIGINT else 3):  # a second SIGINT is obeyed at once
        os.kill(os.getpid(), number)
    assert requests.reason == number.name
    assert requests.agreed(alone, 7).request is Request.STOP
    assert requests.agreed(alone, 7).request is Request.STOP


def test_a_second_interrupt_ends_the_process_at_once(job: JobDir) -> None:
    listening(job)
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_save_file_is_obeyed_once_and_removed(job: JobDir, alone: World) -> None:
    requests = listening(job)
    job.save.touch()
    assert requests.agreed(alone, 7).request is Request.SAVE
    assert not job.save.exists()
    heard = json.loads(job.acknowledged.read_text())
    assert (heard["request"], heard["by"], heard["step"]) == ("save", "control/save", 7)
    assert requests.agreed(alone, 7).request is Request.NONE


def test_an_acknowledgement_that_finds_no_space_is_a_warning(
    job: JobDir, alone: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(files, "replacing", full)
    requests = listening(job)
    job.save.touch()
    assert requests.agreed(alone, 7).request is Request.SAVE
    assert "could not be acknowledged" in caplog.text
    assert not job.save.exists()


def test_a_stop_file_is_obeyed_and_removed_after_the_save(job: JobDir, alone: World) -> None:
    requests = listening(job)
    job.stop.write_text("alice: dtt job stop\n")
    job.save.touch()
    assert requests.agreed(alone, 7).request is Request.STOP
    assert requests.reason == "alice: dtt job stop"
    assert requests.stop_wanted(alone)
    assert job.stop.exists()
    requests.forget(alone)
    assert not job.stop.exists()
    assert not job.save.exists()


def test_a_failed_save_outranks_every_request(job: JobDir, alone: World) -> None:
    requests = listening(job)
    os.kill(os.getpid(), signal.SIGTERM)
    assert requests.agreed(alone, 7, failed=True).request is Request.FAILED


def wish(world: World, folder: Path, save: bool, signalled: int | None) -> tuple[int, str, int]:
    job = JobDir(folder)
    requests = listening(job)
    if save and world.first:
        job.save.touch()
    if world.rank == signalled:
        os.kill(os.getpid(), signal.SIGTERM)
    agreed = requests.agreed(world, 7, end=90 if world.first and save else 0)
    return int(agreed.request), requests.reason, agreed.end


@pytest.mark.parametrize(
    ("save", "signalled", "expected"),
    [
        (False, None, [(0, "", 0), (0, "", 0)]),
        (True, None, [(2, "", 90), (2, "", 90)]),
        (True, 1, [(3, "SIGTERM", 90), (3, "SIGTERM", 90)]),
        (False, 0, [(3, "SIGTERM", 0), (3, "SIGTERM", 0)]),
    ],
)
def test_all_ranks_agree_on_the_largest_request_and_the_end_that_rank_0_proposes(
    job: JobDir, save: bool, signalled: int | None, expected: list[tuple[int, str, int]]
) -> None:
    assert on_ranks(2, wish, job.root, save, signalled) == expected
