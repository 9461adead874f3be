"""Stopping on request: signals only leave a wish, and all ranks follow the largest."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import on_ranks

from dtt.runtime.dist import World, start
from dtt.runtime.jobdir import JobDir
from dtt.runtime.ranks import Ranks
from dtt.train.stop import Request, Requests

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
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


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_does_nothing_but_leave_a_wish_that_lasts(
    job: JobDir, alone: World, number: signal.Signals
) -> None:
    requests = listening(job)
    assert requests.agreed(alone, 7) is Request.NONE
    os.kill(os.getpid(), number)
    assert requests.reason == number.name
    assert requests.agreed(alone, 7) is Request.STOP
    assert requests.agreed(alone, 7) is Request.STOP


def test_a_second_interrupt_ends_at_once(job: JobDir) -> None:
    listening(job)
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_second_sigterm_is_no_haste(job: JobDir, alone: World) -> None:
    requests = listening(job)
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGTERM)
    assert requests.agreed(alone, 7) is Request.STOP


def test_a_touched_save_is_followed_once_and_removed(job: JobDir, alone: World) -> None:
    requests = listening(job)
    job.save.touch()
    assert requests.agreed(alone, 7) is Request.SAVE
    assert not job.save.exists()
    heard = json.loads(job.acknowledged.read_text())
    assert (heard["request"], heard["by"], heard["step"]) == ("save", "control/save", 7)
    assert requests.agreed(alone, 7) is Request.NONE


def test_a_touched_stop_is_followed_and_forgotten_once_all_is_saved(
    job: JobDir, alone: World
) -> None:
    requests = listening(job)
    job.stop.write_text("alice: dtt job stop\n")
    job.save.touch()
    assert requests.agreed(alone, 7) is Request.STOP
    assert requests.reason == "alice: dtt job stop"
    assert requests.stop_wanted(alone)
    assert job.stop.exists()
    requests.forget(alone)
    assert not job.stop.exists()
    assert not job.save.exists()


def test_a_failed_save_outweighs_every_wish(job: JobDir, alone: World) -> None:
    requests = listening(job)
    os.kill(os.getpid(), signal.SIGTERM)
    assert requests.agreed(alone, 7, failed=True) is Request.FAILED


def wish(world: World, folder: Path, save: bool, signalled: int | None) -> tuple[int, str, int]:
    job = JobDir(folder)
    requests = listening(job)
    if save and world.first:
        job.save.touch()
    if world.rank == signalled:
        os.kill(os.getpid(), signal.SIGTERM)
    request = requests.agreed(world, 7, end=90 if world.first and save else 0)
    return int(request), requests.reason, requests.end


@pytest.mark.parametrize(
    ("save", "signalled", "expected"),
    [
        (False, None, [(0, "", 0), (0, "", 0)]),
        (True, None, [(2, "", 90), (2, "", 90)]),
        (True, 1, [(3, "SIGTERM", 90), (3, "SIGTERM", 90)]),
        (False, 0, [(3, "SIGTERM", 0), (3, "SIGTERM", 0)]),
    ],
)
def test_the_largest_wish_of_two_ranks_and_the_end_the_first_wants_are_everyones(
    job: JobDir, save: bool, signalled: int | None, expected: list[tuple[int, str, int]]
) -> None:
    assert on_ranks(2, wish, job.root, save, signalled) == expected
