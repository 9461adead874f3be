"""A run that hangs is ended, and its culprit named; a slow run is left alone."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.ranks import on_ranks
from support.running import TIMEOUT, wait_until

from dtt.artifacts.jobdir import JobDir
from dtt.base.ranks import Ranks
from dtt.mesh.dist import World
from dtt.train.supervise.watchdog import REPORT, Report, Watchdog, judge

LIMIT = 2.0


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    job = JobDir(tmp_path / "job")
    job.begin_attempt()
    return job


def watch(job: JobDir, ranks: Ranks = Ranks(), **limits: Any) -> Watchdog:  # noqa: B008  frozen
    settings = {"attempt": 1, "hang_seconds": LIMIT, "interval": 0.05, "patience": 60.0} | limits
    return Watchdog(job, ranks, 100, **settings)


def heartbeat(job: JobDir) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(job.heartbeat.read_bytes())
    return record


def alarm(job: JobDir) -> Path:
    return job.attempt_dir(1) / "hang"


def ending(job: JobDir) -> dict[str, Any]:
    record = job.exit_record(1)
    assert record is not None
    return record


def reports(job: JobDir) -> dict[int, dict[str, Any]]:
    found = map(json.loads, (p.read_text() for p in job.attempt_dir(1).glob("stacks/*.json")))
    return {report["rank"]: report for report in found}


# ---- two real ranks, which exchange something in each step ---------------------------------------


def steps(world: World, folder: Path, stuck: Callable[[], object], **limits: float) -> None:
    """Train for three steps; in the fourth, rank 1 gets stuck and the other waits for it."""
    with watch(JobDir(folder), world.ranks, **limits) as dog, dog.phase("step"):
        dog.before_end = (folder / f"settled-{world.rank}").touch
        for step in range(1, 100):
            if step == 4 and world.rank == 1:
                stuck()
            world.barrier()
            dog.step(step)


def load_for_ever(world: World, folder: Path) -> None:
    steps(world, folder, threading.Event().wait)


def freeze(world: World, folder: Path) -> None:
    stop = partial(os.kill, os.getpid(), signal.SIGSTOP)
    steps(world, folder, stop, patience=1.0)


def test_a_rank_that_never_gets_its_data_is_named_with_the_line_it_is_in(job: JobDir) -> None:
    with pytest.raises(EOFError):  # the ranks have ended
        on_ranks(2, load_for_ever, job.root)
    record = ending(job)
    assert (record["code"], record["rank"], record["node"]) == (1, 1, os.uname().nodename)
    assert record["reason"].startswith("no progress for ")
    assert f": rank 1 ({record['node']}) is in " in record["reason"]
    assert "after step 3, and the others wait for it" in record["reason"]
    zero, one = (reports(job)[rank] for rank in (0, 1))
    assert (zero["waiting"], one["waiting"]) == (True, False)
    assert "dist.py" in zero["where"]
    assert (one["step"], one["phase"]) == (3, "step")
    for rank in ("00000", "00001"):
        stacks = (job.attempt_dir(1) / f"stacks/rank-{rank}.txt").read_text()
        assert (job.root / f"settled-{int(rank)}").exists()
        assert "in _watch" in stacks  # the watchdog's own thread …
        assert "in steps" in stacks  # … and the main one


def test_a_frozen_rank_is_reported_because_it_is_silent(job: JobDir) -> None:
    def bury() -> None:
        """End the stopped process, which is deaf, once the others have said what they think."""
        wait_until(lambda: job.exit_record(1))
        os.kill(json.loads((job.attempt_dir(1) / "ranks/00001.json").read_bytes())["pid"], 9)

    burial = threading.Thread(target=bury)
    burial.start()
    with pytest.raises(EOFError):
        on_ranks(2, freeze, job.root)
    burial.join()
    record = ending(job)
    assert (record["code"], record["rank"]) == (78, 1)
    assert f"rank 1 ({record['node']}) is silent: frozen, or gone" in record["reason"]
    assert reports(job).keys() == {0}
    assert not (job.root / "settled-0").exists(), "it waited for a save that cannot end"


def sample_alone(world: World, folder: Path) -> None:
    """Rank 0 samples until the other one has raised an alarm, and it has been withdrawn."""
    job = JobDir(folder)
    with watch(job, world.ranks) as dog, dog.phase("step"):
        for step in range(1, 5):
            world.barrier()
            dog.step(step)
        if world.first:
            with dog.phase("sample"):
                for seen in (True, False):
                    wait_until(lambda: alarm(job).exists() is seen)  # noqa: B023
        world.barrier()
        dog.step(5)


def test_a_rank_that_waits_for_an_untimed_phase_raises_no_alarm(job: JobDir) -> None:
    on_ranks(2, sample_alone, job.root)
    assert job.exit_record(1) is None
    assert reports(job) == {}
    assert not alarm(job).exists()


# ---- one rank ------------------------------------------------------------------------------------

PHASES = """
import sys
from pathlib import Path
from dtt.artifacts.jobdir import JobDir
from dtt.base.ranks import Ranks
from dtt.train.supervise.watchdog import Watchdog

def long():
    for _ in range(20):
        dog._check_progress(5.0)

dog = Watchdog(JobDir(Path(sys.argv[1])), Ranks(), 100, attempt=1, hang_seconds=60, interval=5)
long()
with dog.phase("step"):
    for step in (1, 2):
        long()
        dog.step(step)
    for phase in ("evaluate", "sample", "save"):
        with dog.phase(phase):
            long()
        dog.step(step := step + 1)
        print(phase, flush=True)
    with dog.phase("evaluate"):
        for _ in range(3):
            dog.beat()
    long()
"""
"""A watchdog whose thread has not started: it looks when `long` says that 100 s have passed."""


def test_only_later_steps_have_a_time_limit(job: JobDir) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PHASES, job.root],
        capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    assert run.returncode == 1
    assert run.stdout.split() == ["evaluate", "sample", "save"]
    assert (reports(job)[0]["phase"], reports(job)[0]["step"]) == ("step", 5)
    assert run.stderr.startswith("dtt: no progress for ")
    assert ending(job)["reason"] in run.stderr


def test_heartbeats_continue_while_the_main_thread_is_in_native_code(job: JobDir) -> None:
    native = ctypes.CDLL(None)
    times, awake = set(), threading.Event()

    def wake() -> None:
        """End the main thread's sleep after some beats."""
        wait_until(lambda: len(times) > 3 or times.add(heartbeat(job)["time"]))
        while not awake.wait(0.1):  # a signal before the sleep interrupts nothing
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with watch(job, hang_seconds=None):
            wait_until(job.heartbeat.exists)
            waker = threading.Thread(target=wake)
            waker.start()
            assert native.usleep(ctypes.c_uint(60_000_000)) == -1  # it was interrupted
            awake.set()
            waker.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(times) > 3


def test_the_heartbeat_records_what_the_run_does(job: JobDir) -> None:
    began = time.time()
    with watch(job, Ranks(0, 4), hang_seconds=0) as dog:
        wait_until(job.heartbeat.exists)
        assert (heartbeat(job)["phase"], heartbeat(job)["seconds_per_step"]) == ("start", None)
        with dog.phase("step"):
            for step in range(41, 46):
                dog.step(step)
            with dog.phase("evaluate"):
                wait_until(lambda: heartbeat(job)["phase"] == "evaluate")
            wait_until(lambda: heartbeat(job)["phase"] == "step")
    last = heartbeat(job)
    assert last.pop("phase") == "stop"
    assert began < last.pop("progress") <= last.pop("time") <= time.time()
    assert 0 < last.pop("seconds_per_step") < 60
    assert last == {
        "attempt": 1, "step": 45, "steps": 100, "world_size": 4,
        "node": os.uname().nodename, "pid": os.getpid(),
    }  # fmt: skip
    assert not list(job.root.glob(".heartbeat*"))


def test_only_rank_0_writes_a_heartbeat(job: JobDir) -> None:
    with watch(job, Ranks(1, 2)):
        pass
    assert not job.heartbeat.exists()


def test_a_failed_heartbeat_write_does_not_end_the_watchdog(job: JobDir) -> None:
    obstacle = job.heartbeat
    obstacle.mkdir()
    with watch(job, hang_seconds=None):
        wait_until(lambda: list(job.root.glob(".heartbeat.json.tmp")))
        obstacle.rmdir()
        wait_until(job.heartbeat.is_file)
    assert json.loads(job.heartbeat.read_text())["phase"] == "stop"


# ---- what counts ---------------------------------------------------------------------------------


def in_step(job: JobDir, **limits: Any) -> Watchdog:
    """A watchdog without its thread, in the fourth step."""
    dog = watch(job, **({"hang_seconds": 60.0, "interval": 5.0} | limits))
    dog._phase = "step"
    for step in (1, 2, 3):
        dog.step(step)
    dog._check_progress(5.0)
    assert not alarm(job).exists()
    return dog


def test_time_in_which_the_process_was_stopped_does_not_count(job: JobDir) -> None:
    dog = in_step(job)
    dog._check_progress(3600.0)  # the thread did not look for an hour, either
    assert not alarm(job).exists()
    for _ in range(10):
        dog._check_progress(5.0)
    assert not alarm(job).exists()
    dog._check_progress(5.0)
    assert alarm(job).exists()


def test_the_limit_grows_with_the_steps_and_not_with_what_lies_between_them(job: JobDir) -> None:
    dog = in_step(job)
    dog._recent.extend(50 * [10.0])
    for _ in range(40):
        dog._check_progress(5.0)
    assert not alarm(job).exists()  # after 200 s: 20 steps
    dog._check_progress(5.0)
    assert alarm(job).exists()


def test_work_between_two_steps_belongs_to_neither(
    job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    dog = watch(job)
    with dog.phase("step"):
        for step in range(1, 10):
            now[0] += 2.0
            with dog.phase("evaluate"):
                now[0] += 100.0
                with dog.phase("sample"):
                    now[0] += 50.0
            now[0] += 1.0
            dog.step(step)
    assert dog._typical() == pytest.approx(3.0)


@pytest.mark.parametrize("off", [None, 0, 0.0])
def test_switched_off_it_never_raises_an_alarm(job: JobDir, off: float | None) -> None:
    dog = in_step(job, hang_seconds=off)
    for _ in range(10_000):
        dog._check_progress(5.0)
    assert not alarm(job).exists()


def test_a_rank_that_progresses_again_withdraws_the_alarm(job: JobDir) -> None:
    dog = in_step(job, hang_seconds=1.0)
    dog._check_progress(5.0)
    assert alarm(job).exists()
    assert reports(job).keys() == {0}
    dog.step(4)
    dog._check_progress(5.0)
    assert not alarm(job).exists()
    assert not list(job.attempt_dir(1).glob("stacks/*"))


def report(rank: int, *, waiting: bool = False, step: int = 7, where: str = "a.py:1 (f)") -> Report:
    values = rank, f"n{rank // 2}", step, "step", 700.0, where, waiting
    return dict(zip(REPORT, values, strict=True))


@pytest.mark.parametrize(
    ("found", "culprit", "why"),
    [
        ([report(0), report(3)], 1, "rank 1 (n0), rank 2 (n1) is silent"),
        ([], 0, "rank 0 (n0), rank 1 (n0), rank 2 (n1), rank 3 (n1) is silent"),
        (
            [report(0, waiting=True), report(1, waiting=True), report(2), report(3, waiting=True)],
            2, "rank 2 (n1) is in a.py:1 (f) after step 7, and the others wait for it",
        ),
        (
            [report(0, step=8), report(1, waiting=True, step=6), report(2), report(3, step=8)],
            2, "rank 2 (n1) is in a.py:1 (f) after step 7, and the others wait for it",
        ),
        (
            [report(rank, waiting=True, step=7 - (rank == 3)) for rank in range(4)],
            3, "rank 3 (n1) is in a.py:1 (f) after step 6, and the others wait for it",
        ),
        (
            [report(rank, waiting=True) for rank in (3, 1, 0, 2)],
            0, "a.py:1 (f) after step 7: all wait for each other",
        ),
        ([report(rank) for rank in range(4)], 0, "rank 3 (n1) is in a.py:1 (f) after step 7"),
    ],
    ids=["silent", "all-silent", "busy", "busy-and-behind", "behind", "deadlock", "all-busy"],
)  # fmt: skip
def test_the_silent_are_blamed_before_the_busy_and_the_busy_before_the_waiting(
    found: list[Report], culprit: int, why: str
) -> None:
    rank, sentence = judge(found, 4, {rank: f"n{rank // 2}" for rank in range(4)})
    assert rank == culprit
    assert why in sentence


def test_of_many_culprits_the_first_are_reported() -> None:
    _, sentence = judge([report(0)], 100, dict.fromkeys(range(100), "n"))
    assert "rank 8 (n) and 91 more" in sentence
