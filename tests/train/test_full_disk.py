"""A disk that is full, or fails for a moment: whatever file it hits, the run waits, tries again, or
ends with the file's name. The file system is a real one of a few megabytes, the errors are given by
the kernel (strace)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from running import Dtt

from dtt.errors import ExitCode
from dtt.runtime.jobdir import JobDir

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


def wait_for(ready: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)


def sizes(steps: int, **changes: object) -> dict[str, object]:
    return {"train__steps": steps, "train__eval_every": 0, "train__log_every": 20} | changes


def trained_to(job: JobDir) -> int:
    return job.last_step() or 0


@pytest.mark.parametrize("on_full", ["wait", "stop"])
def test_a_disk_that_fills_up_in_the_middle_of_a_run(
    small_disk: Path, tiny: Callable[..., list[str]], on_full: str
) -> None:
    """`lead` and metrics.jsonl are hit first, then a checkpoint."""
    dtt, job = Dtt(small_disk), JobDir(small_disk / "jobs/t")
    keys = sizes(1200, checkpoint__every=100, checkpoint__on_full=on_full)
    process = dtt.start("train", *tiny(**keys))
    wait_for(lambda: job.lead.exists() and trained_to(job) > 0)
    ballast = fill(small_disk)
    if on_full == "stop":
        done = dtt.wait(process)
        assert done.returncode == ExitCode.IO, done.stderr
        assert "Traceback" not in done.stderr
        assert "jobs/t/" in done.stderr.split("dtt: ")[-1], "it names a file"
        assert "free" in done.stderr.split("dtt: ")[-1]
        ballast.unlink()
        dtt("train", "jobs/t", "train.steps=600", "--allow-change", "train.steps")
        return
    time.sleep(12)  # longer than it takes to look for space again
    assert process.poll() is None, process.communicate()
    ballast.unlink()
    done = dtt.wait(process)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "waits for space" in done.stderr
    steps = [json.loads(line) for line in job.metrics.read_text().splitlines()]
    trained = [record["step"] for record in steps if record["kind"] == "train"]
    assert trained == list(range(1, 1201))  # no line was lost
    assert not list(job.root.rglob(".*.tmp"))


def test_a_disk_that_is_full_when_a_run_starts_is_waited_for(
    small_disk: Path, tiny: Callable[..., list[str]]
) -> None:
    dtt, job = Dtt(small_disk), JobDir(small_disk / "jobs/t")
    arguments = tiny(**sizes(8, checkpoint__on_full="wait"))
    job.root.mkdir(parents=True)
    ballast = fill(small_disk)
    process = dtt.start("train", *arguments)
    assert process.stderr is not None
    said = ""
    while "waiting for space" not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    ballast.unlink()
    done = dtt.wait(process)
    assert done.returncode == 0, done.stderr
    assert job.exit_record(1) is not None


def test_a_stop_request_ends_the_wait_for_space_at_the_start(
    small_disk: Path, tiny: Callable[..., list[str]]
) -> None:
    dtt = Dtt(small_disk)
    arguments = tiny(**sizes(8, checkpoint__on_full="wait"))
    (small_disk / "jobs/t").mkdir(parents=True)
    fill(small_disk)
    process = dtt.start("train", *arguments)
    assert process.stderr is not None
    while "waiting for space" not in process.stderr.readline():
        assert process.poll() is None
    process.terminate()
    done = dtt.wait(process)
    assert done.returncode == ExitCode.PREEMPTED, done.stderr
    assert "stopped before the first step" in done.stderr
    assert "Traceback" not in done.stderr


ONCE = [
    ("config.yaml", "rename"), ("data.json", "rename"), ("tokenizer.json", "rename"),
    ("run_id", "rename"), ("env.json", "rename"), ("lead", "rename"), ("metrics.jsonl", "rename"),
    ("attempts/1/exit.json", "link"), ("metrics.jsonl", "openat"), ("overrides.txt", "openat"),
    ("attempts/1", "mkdir"), ("control", "mkdir"),
]  # fmt: skip
CALLS = {"rename": "rename,renameat,renameat2", "link": "link,linkat"}


def traced(
    folder: Path, options: list[str], arguments: list[str]
) -> tuple[subprocess.CompletedProcess[str], str]:
    """Train under strace; also returns what it wrote."""
    trace = folder / "trace"
    command = [STRACE or "", "-f", "--seccomp-bpf", "-o", str(trace), *options, sys.executable]
    done = subprocess.run(
        [*command, "-m", "dtt.main", "train", *arguments],
        cwd=folder, env=dict(os.environ), capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    return done, trace.read_text()


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., list[str]]
) -> list[str]:
    """The renames and links of a run, a line each."""
    folder = tmp_path_factory.mktemp("undisturbed")
    which = ",".join(CALLS.values())
    done, trace = traced(folder, ["-e", f"trace={which}"], tiny(**sizes(4)))
    assert done.returncode == 0, done.stderr
    return [line for line in trace.splitlines() if re.match(r"\d+ +(rename|link)", line)]


def injection(name: str, call: str, undisturbed: list[str]) -> list[str]:
    """Options of strace that fail the first such call for this file."""
    path = f"jobs/t/{name}"
    if call not in CALLS:
        strike = f"inject={call}:error=EIO:when=1"
        return ["-P", path, "-e", f"trace={call}", "-e", strike]
    # strace does not find calls by their second path: by how many of its thread come before.
    place = next(i for i, line in enumerate(undisturbed) if f'"{path}"' in line and call in line)
    thread, this = undisturbed[place].split("(")[0].split()
    before = [line.split("(")[0].split() for line in undisturbed[:place]]
    count = before.count([thread, this]) + 1
    return ["-e", f"trace={this}", "-e", f"inject={this}:error=EIO:when={count}"]


@pytest.mark.skipif(STRACE is None, reason="no strace")
@pytest.mark.parametrize(("name", "call"), ONCE)
def test_one_input_output_error_of_a_small_file_ends_no_run(
    tmp_path: Path,
    tiny: Callable[..., list[str]],
    undisturbed: list[str],
    name: str,
    call: str,
) -> None:
    done, trace = traced(tmp_path, injection(name, call, undisturbed), tiny(**sizes(4)))
    struck = [line for line in trace.splitlines() if "INJECTED" in line]
    assert f"jobs/t/{name}" in struck[0]
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    job = JobDir(tmp_path / "jobs/t")
    record = job.exit_record(1)
    assert record is not None
    assert (record["code"], record["step"]) == (0, 4)
    assert (job.root / name).exists()
