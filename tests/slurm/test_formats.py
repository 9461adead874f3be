"""What the fakes of the unit tests print is what a real Slurm prints."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import fake_slurm

from dtt.launch import squeue


def shape(line: str) -> list[str]:
    """Fields that do not differ from job to job; nodes and reason do. A time may not be known."""
    fields = line.split("|")
    return [re.sub(r"^(\d+|N/A)$", "TIME", field) for field in fields[:2] + fields[3:6]]


def printed(argv: tuple[str, ...], job: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"SLURM_TIME_FORMAT": "%s"}
    return subprocess.run([*argv, f"--jobs={job}"], capture_output=True, text=True, env=env)


def test_squeue_prints_the_lines_of_the_fake(cluster: Any, tmp_path: Path) -> None:
    options = ("--parsable", f"--chdir={tmp_path}", "--output=/dev/null")
    ids = {
        "HELD": cluster.run("sbatch", *options, "--hold", "--wrap", "true"),
        "RUNNING": cluster.run("sbatch", *options, "-N2", "--wrap", "sleep 300"),
        "COMPLETED": cluster.run("sbatch", *options, "--wrap", "true"),
        "FAILED": cluster.run("sbatch", *options, "--wrap", "exit 3"),
    }
    for state in ("RUNNING", "COMPLETED", "FAILED"):
        cluster.wait_for_state(ids[state], state)
    pending = cluster.run("sbatch", *options, "-N2", "--exclusive", "--wrap", "true")
    ids["PENDING"] = pending
    for state, id in ids.items():
        jobs = squeue.ask([id]).jobs
        assert list(jobs) == [id]
        said = printed(squeue.SQUEUE, id).stdout.strip()
        assert shape(said) == shape(fake_slurm.SQUEUE[state].format(id=id, since=0)), state
    cluster.run("scancel", ids["RUNNING"])
    cluster.wait_for_state(ids["RUNNING"], "CANCELLED")
    assert squeue.ask([ids["RUNNING"]]).jobs[ids["RUNNING"]].state == "CANCELLED"
    squeue.cancel(ids["HELD"])
    squeue.cancel(pending)


def test_slurm_says_so_when_it_knows_no_job_or_keeps_no_accounts(cluster: Any) -> None:
    said = printed(squeue.SQUEUE, "999999")
    assert (said.returncode, said.stderr.strip()) == (1, fake_slurm.FORGOTTEN)
    assert squeue.ask(["999999"]) == squeue.Answer({})
    accounts = printed(squeue.SACCT, "999999")
    assert accounts.stdout == ""
    assert accounts.stderr.strip() in ("", fake_slurm.NO_ACCOUNTING)
