"""A disk that is full, or fails for a moment: whatever file it hits, the run tries again, or ends
with the file's name. The file system is a real one of a few megabytes, the errors are given by
the kernel (strace)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.running import TIMEOUT, Dtt, wait_until

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ExitCode
from dtt.track import jsonl

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


def sizes(steps: int, **changes: object) -> dict[str, object]:
    return {"train__steps": steps, "train__eval_every": 0, "train__log_every": 20} | changes


def trained_to(job: JobDir) -> int:
    return job.last_step() or 0


@pytest.mark.slow
def test_a_disk_that_fills_up_in_the_middle_of_a_run_ends_it_with_the_name_of_a_file(
    small_disk: Path, tiny: Callable[..., list[str]]
) -> None:
    """`lead` and metrics.jsonl are hit first, then a checkpoint."""
    dtt, job = Dtt(small_disk), JobDir(small_disk / "jobs/t")
    process = dtt.start("train", *tiny(**sizes(200, checkpoint__every=50)))
    wait_until(lambda: job.lead.exists() and trained_to(job) > 0)
    ballast = fill(small_disk)
    done = dtt.wait(process)
    assert done.returncode == ExitCode.IO, done.stderr
    assert "Traceback" not in done.stderr
    assert "jobs/t/" in done.stderr.split("dtt: ")[-1], "it names a file"
    assert "free" in done.stderr.split("dtt: ")[-1]
    ballast.unlink()
    dtt("train", "jobs/t")
    trained = [record["step"] for record in jsonl.read(job.metrics, "train")]
    assert trained == list(range(1, 201))


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
