"""A disk that is full, or fails for a moment: whatever file it hits, the run waits, tries again, or
ends with the file's name. The file system is a real one of a few megabytes, the errors are given by
the kernel (strace)."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.own_classes import NOTHING
from support.running import TIMEOUT, Dtt, in_this_process, wait_until

from dtt.artifacts.jobdir import JobDir
from dtt.base import reading
from dtt.base.errors import Diverged, ExitCode
from dtt.mesh import dist
from dtt.train import build
from dtt.train import run as train
from dtt.train.trainer import Trainer

STRACE = shutil.which("strace")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An empty file system of 24 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("this machine lets us mount no file system")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> Path:
    """Leave nothing free."""
    ballast = folder / "ballast"
    with ballast.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return ballast


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Return the lines of standard error up to the one that contains `text`."""
    assert process.stderr is not None
    said = ""
    while text not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    return said


def sizes(steps: int, **changes: object) -> dict[str, object]:
    return {"train__steps": steps, "train__eval_every": 0, "train__log_every": 20} | changes


def trained_to(job: JobDir) -> int:
    return job.last_step() or 0


OFTEN = """
import time
from types import SimpleNamespace
from dtt.base import reading
from dtt.checkpoint import saver

def look(_):
    with open("../looks", "a") as file:
        file.write("x")
    time.sleep(0.05)

reading.time = saver.time = SimpleNamespace(**vars(time) | {"sleep": look})
"""
"""Code of a user, with which dtt looks for space every 0.05 s, and says so in a file outside of the
full disk."""


@pytest.mark.slow
@pytest.mark.parametrize("on_full", ["wait", "stop"])
def test_a_disk_that_fills_up_in_the_middle_of_a_run(
    small_disk: Path, tiny: Callable[..., list[str]], on_full: str
) -> None:
    """`lead` and metrics.jsonl are hit first, then a checkpoint."""
    dtt, job = Dtt(small_disk), JobDir(small_disk / "jobs/t")
    looks = small_disk.parent / "looks"
    looks.touch()
    (small_disk / "mine.py").write_text(OFTEN + NOTHING)
    keys = sizes(200, checkpoint__every=50, checkpoint__on_full=on_full)
    process = dtt.start("train", *tiny(**keys, actions="[{type: mine.py:Nothing}]"))
    wait_until(lambda: job.lead.exists() and trained_to(job) > 0)
    ballast = fill(small_disk)
    if on_full == "stop":
        done = dtt.wait(process)
        assert done.returncode == ExitCode.IO, done.stderr
        assert "Traceback" not in done.stderr
        assert "jobs/t/" in done.stderr.split("dtt: ")[-1], "it names a file"
        assert "free" in done.stderr.split("dtt: ")[-1]
        ballast.unlink()
        dtt("train", "jobs/t")
        return
    said = read_until(process, "waits for space")
    enough = looks.stat().st_size + 9
    wait_until(lambda: looks.stat().st_size > enough, process)
    ballast.unlink()
    done = dtt.wait(process)
    assert done.returncode == 0, said + done.stderr
    assert "Traceback" not in said + done.stderr
    steps = [json.loads(line) for line in job.metrics.read_text().splitlines()]
    trained = [record["step"] for record in steps if record["kind"] == "train"]
    assert trained == list(range(1, 201))  # no line was lost
    assert not list(job.root.rglob(".*.tmp"))


def test_a_stop_request_ends_the_wait_for_space_at_the_start(
    small_disk: Path, tiny: Callable[..., list[str]]
) -> None:
    dtt = Dtt(small_disk)
    arguments = tiny(**sizes(8, checkpoint__on_full="wait"))
    (small_disk / "jobs/t").mkdir(parents=True)
    fill(small_disk)
    process = dtt.start("train", *arguments)
    read_until(process, "waiting for space")
    process.terminate()
    done = dtt.wait(process)
    assert done.returncode == ExitCode.PREEMPTED, done.stderr
    assert "stopped before the first step" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("owner", "name", "ends_with"),
    [(Trainer, "run", "metrics.jsonl"), (build, "build", "the loss is nan")],
    ids=["in a step", "before the first step"],
)
def test_a_run_that_fails_on_a_full_disk_ends_without_waiting_for_space(
    tmp_path: Path,
    tiny: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    ends_with: str,
) -> None:
    """The trackers are closed and the end is recorded after the failure."""

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def waits(_: float) -> None:
        pytest.fail("a failed run waits for space")

    def fail(*_: object) -> None:
        monkeypatch.setattr(os, "fsync", full)
        monkeypatch.setattr(reading, "time", SimpleNamespace(sleep=waits))
        raise Diverged("the loss is nan")

    monkeypatch.setattr(owner, name, fail)
    arguments = tiny(**sizes(8, checkpoint__on_full="wait"))
    with in_this_process(tmp_path), pytest.raises((Diverged, OSError), match=ends_with):
        train.run(None, arguments, [], None)


@pytest.mark.parametrize(
    ("on_full", "patience"), [("wait", timedelta(days=7)), ("stop", timedelta(minutes=30))]
)
def test_the_other_ranks_wait_for_days_for_rank_0_if_it_may_wait_for_space(
    tmp_path: Path,
    tiny: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    on_full: str,
    patience: timedelta,
) -> None:
    class Met(Exception):
        pass

    timeouts = []

    def start(_: object, __: str, timeout: timedelta = timedelta(minutes=30)) -> None:
        timeouts.append(timeout)
        raise Met

    monkeypatch.setattr(dist, "start", start)
    with in_this_process(tmp_path), pytest.raises(Met):
        train.run(None, tiny(**sizes(8, checkpoint__on_full=on_full)), [], None)
    assert timeouts == [patience]


TWO_PATHS = "rename,renameat,renameat2,link,linkat"
"""Calls that strace does not choose by their second path, so all are hit."""
RENAMED = [
    "config.yaml", "data.json", "tokenizer.json", "run_id", "env.json", "lead", "metrics.jsonl",
    "attempts/1/attempt.json",
]  # fmt: skip
WITHOUT_WAITING = """
from dtt.base import reading
reading.PATIENCE, reading.OUTAGE = (0.0, 0.0, 0.0), float("inf")
from dtt.main import main
main()
"""
"""dtt, whose retries depend on no time: a loaded machine can stop a thread of it for longer than an
outage may last, and the next failure would then be final."""
OPENED = ["metrics.jsonl", "overrides.txt", "attempts/1", "control"]
HIT: dict[str, tuple[list[str], list[str]]] = {
    TWO_PATHS: ([], RENAMED),
    "openat,mkdir": ([part for name in OPENED for part in ("-P", f"jobs/t/{name}")], OPENED),
}


@pytest.mark.slow
@pytest.mark.skipif(STRACE is None, reason="no strace")
@pytest.mark.parametrize("calls", HIT, ids=["rename and link", "open and mkdir"])
def test_one_input_output_error_of_each_small_file_ends_no_run(
    tmp_path: Path, tiny: Callable[..., list[str]], calls: str
) -> None:
    """Every second call of a name fails, so each that is tried again succeeds."""
    paths, names = HIT[calls]
    options = [*paths, "-e", f"trace={calls}", "-e", f"inject={calls}:error=EIO:when=1+2"]
    trace = tmp_path / "trace"
    command = [STRACE or "", "-f", "--seccomp-bpf", "-o", str(trace), *options, sys.executable]
    done = subprocess.run(
        [*command, "-c", WITHOUT_WAITING, "train", *tiny(**sizes(4))],
        cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    struck = [line for line in trace.read_text().splitlines() if "INJECTED" in line]
    assert [name for name in names if not any(f'"jobs/t/{name}"' in line for line in struck)] == []
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    job = JobDir(tmp_path / "jobs/t")
    record = job.exit_record(1)
    assert record is not None
    assert (record["code"], record["step"]) == (0, 4)
    assert [name for name in names if not (job.root / name).exists()] == []
