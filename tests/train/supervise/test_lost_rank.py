"""A rank that was lost is named, with its node and how it ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import forked_runs
from support.running import Dtt, wait_until

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ExitCode, PeerLost
from dtt.train.supervise.lost_rank import explained

Settings = Callable[..., list[str]]
HERE = socket.gethostname()


def test_a_killed_rank_is_named_by_the_other_in_the_message_and_in_exit_json(
    dtt: Dtt, tiny: Settings
) -> None:
    job = dtt.folder / "jobs/t"
    agent = dtt.start_torchrun(2, "-m", "dtt.main", "train", *tiny(train__steps=100_000))
    place = job / "attempts/1/ranks/00001.json"
    wait_until(lambda: place.exists() and (job / "metrics.jsonl").exists())
    wait_until(lambda: '"train"' in (job / "metrics.jsonl").read_text())
    os.kill(json.loads(place.read_text())["pid"], signal.SIGKILL)
    stderr = Dtt.wait(agent).stderr
    assert f"dtt: rank 1 on {HERE} was killed" in stderr
    assert "this is a bug" not in stderr
    record = json.loads((job / "attempts/1/attempt.json").read_text())
    assert (record["code"], record["rank"], record["node"]) == (78, 1, HERE)
    assert record["reason"].startswith(f"rank 1 on {HERE} was killed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "code", "reason"),
    [
        ("data.tokens=missing", ExitCode.INPUT_MISSING, "no token files there"),
        (
            "optim.groups=[{match: absent.*, optimizer: adamw}]",
            ExitCode.USAGE,
            "no parameter has a name that matches 'absent.*'",
        ),
    ],
    ids=["before the process group", "while the model is built"],
)
def test_an_error_of_one_rank_is_told_by_it_and_is_the_reason_of_the_attempt(
    dtt: Dtt, tiny: Settings, mistake: str, code: ExitCode, reason: str
) -> None:
    done = forked_runs.start(dtt, "train", *tiny(), ranks=2, last=[mistake]).wait()
    assert f"dtt: {reason}\n  where:" in done.stderr
    assert f"dtt: rank 1 on {HERE} has ended" in done.stderr
    assert f"why:   {reason}" in done.stderr
    assert "another" not in done.stderr
    record = json.loads((dtt.folder / "jobs/t/attempts/1/attempt.json").read_text())
    assert (record["code"], record["rank"], done.returncode) == (code, 1, code)
    assert record["reason"].startswith(reason)


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    job = JobDir(tmp_path / "job")
    job.begin_attempt()
    return job


def place(job: JobDir, rank: int, **where: Any) -> None:
    folder = job.attempt_dir(1) / "ranks"
    folder.mkdir(exist_ok=True)
    (folder / f"{rank:05d}.json").write_text(json.dumps({"rank": rank, **where}))


def lost(why: str = "Connection closed by peer [127.0.0.1]:5123") -> PeerLost:
    return PeerLost("another process of this run has ended", why=f"[gloo/pair.cc:538] {why}")


def test_the_signal_is_known_until_the_parent_has_collected_the_process(job: JobDir) -> None:
    place(job, 0, node=HERE, pid=os.getpid())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        place(job, 1, node=HERE, pid=other.pid)
        other.kill()
        named = explained(lost(), job, 1)
    assert str(named).splitlines()[0] == f"rank 1 on {HERE} was killed by SIGKILL"
    assert (named.rank, named.node, named.exit_code) == (1, HERE, ExitCode.UNFIT)
    assert f"rank 1 on {HERE} was killed, or crashed" in str(explained(lost(), job, 1))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "who"), [([1], "rank 1"), ([1, 2], "a rank")])
def test_on_another_node_the_address_of_the_connection_names_the_rank(
    job: JobDir, ranks: list[int], who: str
) -> None:
    place(job, 0, node=HERE, pid=os.getpid())
    for rank in ranks:
        place(job, rank, node="localhost", pid=1)
    named = explained(lost(), job, 1)
    among = ", one of 1, 2" if len(ranks) > 1 else ""
    assert str(named).splitlines()[0] == f"{who} on localhost was lost{among}"
    assert named.rank == (1 if len(ranks) == 1 else None)
    elsewhere = explained(lost("Connection reset by peer [10.9.8.7]:99"), job, 1)
    assert str(elsewhere).splitlines()[0] == "a rank on 10.9.8.7 was lost"
