"""`dtt job …` on jobs that really run; what needs Slurm is in tests/slurm."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_slurm import NO_CONTROLLER, SQUEUE, FakeSlurm, write_heartbeat
from support.running import TIMEOUT, Dtt, wait_until

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ExitCode
from dtt.jobs.sweeps import SweepManifest, TrialRecord

Settings = Callable[..., list[str]]
ALONE = {"PATH": "/nonexistent"}
"""No Slurm."""


@pytest.fixture
def endless(dtt: Dtt, tiny: Settings) -> Iterator[Any]:
    """A job that runs and runs."""
    settings = tiny(train__steps=1_000_000, train__eval_every=0, checkpoint__every=1_000_000)
    process = dtt.start("train", *settings)
    wait_until((dtt.folder / "jobs/t/metrics.jsonl").exists)
    wait_until(lambda: (dtt.folder / "jobs/t/metrics.jsonl").stat().st_size > 1000)
    yield process
    process.kill()
    process.communicate()


def reported(dtt: Dtt) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(dtt("job", "status", "jobs/t", "--json").stdout)
    return status


@pytest.mark.slow
def test_a_running_job_is_saved_then_stopped_on_request(dtt: Dtt, endless: Any) -> None:
    running = reported(dtt)
    assert (running["state"], running["steps"], running["slurm"]) == ("running", 1_000_000, None)
    assert running["heartbeat_age"] < 60
    text = dtt("job", "status", "jobs/t").stdout
    assert "state       running" in text
    assert "of 1000000" in text
    assert "is running" in dtt("job", "resume", "jobs/t", expect=2).stderr

    assert "the job saves and continues" in dtt("job", "save", "jobs/t").stdout
    wait_until(lambda: list((dtt.folder / "jobs/t/checkpoints").glob("step-*")))
    assert endless.poll() is None

    asked = dtt("job", "profile", "jobs/t", "--kind", "torch")
    assert "the job profiles its next steps" in asked.stdout
    wait_until(lambda: list((dtt.folder / "jobs/t/profiles").glob("*.txt")))
    assert not (dtt.folder / "jobs/t/control/profile").exists()

    assert "the job saves and stops" in dtt("job", "stop", "jobs/t").stdout
    assert Dtt.wait(endless).returncode == 75
    stopped = reported(dtt)
    assert stopped["state"] == "stopped"
    assert stopped["detail"].endswith("dtt job stop")
    assert stopped["checkpoint"] == f"step-{stopped['step']:06d}"
    assert 0 < stopped["goodput"]["share"] < 1
    assert "goodput     " in dtt("job", "status", "jobs/t").stdout
    assert "jobs/t  stopped  " in dtt("job", "ls").stdout


@pytest.mark.slow
def test_stopping_twice_and_saving_after_the_end_are_reported(dtt: Dtt, tiny: Settings) -> None:
    dtt("train", *tiny())
    assert reported(dtt)["state"] == "done"
    assert "nothing to stop: jobs/t is done" in dtt("job", "stop", "jobs/t").stdout
    assert "it is done" in dtt("job", "save", "jobs/t", expect=2).stderr
    assert "is done" in dtt("job", "resume", "jobs/t", expect=2).stderr
    assert not (dtt.folder / "jobs/t/control/stop").exists()


@pytest.mark.slow
def test_a_job_that_does_not_acknowledge_keeps_the_request(dtt: Dtt, endless: Any) -> None:
    endless.send_signal(signal.SIGSTOP)
    deaf = dtt("job", "stop", "jobs/t", "--wait", "0.5", expect=1)
    assert "did not acknowledge" in deaf.stderr
    assert "dtt job status jobs/t" in deaf.stderr
    asked = reported(dtt)
    assert asked["state"] == "stopping"
    assert "not yet acknowledged" in asked["detail"]
    endless.send_signal(signal.SIGCONT)
    assert Dtt.wait(endless).returncode == 75


def test_a_killed_job_is_lost_and_resume_prints_the_command(dtt: Dtt, endless: Any) -> None:
    endless.kill()
    endless.wait()
    assert reported(dtt)["state"] == "lost"
    (dtt.folder / "jobs/t/control/stop").touch()
    assert dtt("job", "resume", "jobs/t", **ALONE).stdout == "dtt train jobs/t\n"
    assert not (dtt.folder / "jobs/t/control/stop").exists()


def made(dtt: Dtt, name: str) -> Path:
    """A job that was configured and never began."""
    job = dtt.folder / "jobs" / name
    (job / "logs").mkdir(parents=True)
    (job / "config.yaml").write_text(f"name: {name}\n")
    return job


def test_ls_lists_all_jobs_and_trials_newest_first(dtt: Dtt) -> None:
    for name, ended in (("old", 100), ("sweep/0001", 300), ("new", 200)):
        handed_over(made(dtt, name), "train", time=ended)
    listed = dtt("job", "ls", **ALONE)
    assert [line.split()[0] for line in listed.stdout.splitlines()] == [
        "job", "jobs/sweep/0001", "jobs/new", "jobs/old",
    ]  # fmt: skip
    assert "squeue is not installed" in listed.stderr
    facts = json.loads(dtt("job", "ls", "jobs/sweep", "--json", **ALONE).stdout)
    assert [fact["job"] for fact in facts] == ["jobs/sweep/0001"]


def test_ls_shows_the_progress_of_a_running_job_and_the_last_loss_of_an_ended_one(dtt: Dtt) -> None:
    for name, code in (("ended", 75), ("running", None), ("new", None)):
        job = JobDir(made(dtt, name))
        if name == "new":
            continue
        job.begin_attempt()
        records = [
            {"kind": "train", "step": 8, "loss": 2.34567, "tokens": 1_234_567_890},
            {"kind": "perf", "step": 8, "tokens_per_second": 45_678.9},
        ]
        job.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
        write_heartbeat(job, seconds_per_step=300.0)
        if code is not None:
            job.end_attempt(ExitCode(code), "stopped by a user", 0, attempt=1, asked_by="bob")
    header, *lines = dtt("job", "ls", **ALONE).stdout.splitlines()
    table = {line.split()[0]: line for line in lines}
    assert header.split("  ")[0] == "job"
    assert re.split(r"\s{2,}", header)[1:] == [
        "state", "step", "loss", "tokens", "tokens/s", "time left", "detail",
    ]  # fmt: skip
    cells = {name: re.split(r"\s{2,}", line)[1:7] for name, line in table.items()}
    assert cells["jobs/running"] == ["running", "8 of 20", "2.3457", "1.23B", "45.7k", "1 h 0 min"]
    assert cells["jobs/ended"] == ["stopped", "8 of 20", "2.3457", "1.23B", "-", "-"]
    assert cells["jobs/new"][1:] == ["-"] * 5
    ends = [header.index(name) + len(name) for name in ("step", "loss", "tokens", "time left")]
    assert all(re.fullmatch(r"\S( |)", line[end - 1 : end + 1]) for end in ends for line in lines)
    report = dtt("job", "status", "jobs/running", **ALONE).stdout
    assert "step        8 of 20, 45,679 tokens/s, 1 h 0 min left" in report
    ended = dtt("job", "status", "jobs/ended", **ALONE).stdout
    assert "step        8 of 20\n" in ended
    for text in (report, ended):
        assert "loss        2.3457 after 1,234,567,890 tokens" in text


def test_resume_submits_the_script_from_its_own_folder(dtt: Dtt) -> None:
    job = handed_over(made(dtt, "t"), "train", "jobs/t")
    (job / "control").mkdir()
    (job / "control/stop").write_text("bob: dtt job stop\n")
    slurm = FakeSlurm(dtt.folder / "bin")
    slurm.says("sbatch", error="sbatch: error: no such partition")
    path = str(slurm.folder)
    assert "no such partition" in dtt("job", "resume", "jobs/t", PATH=path, expect=78).stderr
    assert (job / "control/stop").read_text() == "bob: dtt job stop\n"
    slurm.says("sbatch", "23")
    slurm.says("squeue", SQUEUE["PENDING"].format(id="23", since=round(time.time())))
    assert "submitted  23" in dtt("job", "resume", "jobs/t", PATH=path).stdout
    assert slurm.asked("sbatch") == ["--parsable --chdir=/a b jobs/t/slurm.sh"] * 2
    assert not (job / "control/stop").exists()
    assert "is queued" in dtt("job", "resume", "jobs/t", PATH=path, expect=2).stderr
    assert len(slurm.asked("sbatch")) == 2


def handed_over(job: Path, *argv: str, id: str = "7", time: float = 1) -> Path:
    """Submitted from `/a b`."""
    (job / "slurm.sh").touch()
    record = {"time": time, "job_id": id, "command": "x", "argv": argv, "directory": "/a b"}
    (job / "submission.json").write_text(json.dumps(record) + "\n")
    return job


def test_without_a_script_resume_prints_the_command(dtt: Dtt) -> None:
    handed_over(made(dtt, "z-download"), "download", "-c", "jobs/z-download/config.yaml")
    reported = dtt("job", "resume", "jobs/z-download", **ALONE).stdout
    assert reported == "dtt download -c jobs/z-download/config.yaml\n"
    trial = made(dtt, "s/001-a")
    manifest = SweepManifest(
        name="s", source="s.yaml", keys=("seed",), logarithmic=(), metric="eval.loss", goal="min",
        concurrency=None, trials={"001-a": TrialRecord(values={"seed": 0}, folder="001-a")},
    )  # fmt: skip
    (trial.parent / manifest.filename).write_text(manifest.dump())
    reported = dtt("job", "resume", "jobs/s/001-a", **ALONE).stdout
    assert reported == "dtt sweep retry jobs/s 001-a\n"


def test_a_command_without_request_handling_is_cancelled(dtt: Dtt) -> None:
    job = handed_over(made(dtt, "z-download"), "download", "-c", "jobs/z-download/config.yaml")
    (job / "attempts/1").mkdir(parents=True)
    slurm = FakeSlurm(dtt.folder / "bin")
    slurm.says("squeue", SQUEUE["RUNNING"].format(id="7", since=round(time.time()) - 100))
    slurm.says("scancel")
    path = str(slurm.folder)
    refused = dtt("job", "save", "jobs/z-download", PATH=path, expect=2)
    assert "cannot save jobs/z-download: it runs dtt download" in refused.stderr
    stopped = dtt("job", "stop", "jobs/z-download", PATH=path).stdout.splitlines()
    assert stopped[0].startswith("dtt download cannot save and stop")
    assert stopped[1] == "cancelled Slurm job 7"
    assert slurm.asked("scancel") == ["7"]


def test_a_user_request_overrides_the_stop_of_the_time_limit(dtt: Dtt) -> None:
    job = handed_over(made(dtt, "t"), "train", "jobs/t")
    (job / "attempts/1/ranks").mkdir(parents=True)
    (job / "attempts/1/ranks/00000.json").write_text("{}")
    (job / "control").mkdir()
    (job / "control/stop").write_text("slurm: time limit\n")
    answer = {"request": "stop", "by": "slurm: time limit", "step": 8, "time": time.time()}
    (job / "control/acknowledged.json").write_text(json.dumps(answer))
    write_heartbeat(JobDir(job), phase="save")
    first, second = dtt("job", "stop", "jobs/t", **ALONE).stdout.splitlines()
    assert first == "acknowledged at step 8: the job saves and stops"
    assert "slurm: time limit" in second
    assert (job / "control/stop").read_text().endswith(": dtt job stop\n")
    (job / "control/stop").write_text("bob: dtt job stop\n")
    dtt("job", "stop", "jobs/t", **ALONE)
    assert (job / "control/stop").read_text() == "bob: dtt job stop\n"


def test_a_queued_job_is_cancelled_only_with_yes(dtt: Dtt) -> None:
    handed_over(made(dtt, "t"), "train", "jobs/t", id="23")
    slurm = FakeSlurm(dtt.folder / "bin")
    slurm.says("squeue", SQUEUE["HELD"].format(id="23", since=round(time.time())))
    slurm.says("scancel")
    path = str(slurm.folder)
    assert "scancel 23" in dtt("job", "stop", "jobs/t", PATH=path, expect=2).stderr
    assert slurm.asked("scancel") == []
    dtt("job", "stop", "jobs/t", "-y", PATH=path)
    assert slurm.asked("scancel") == ["23"]
    slurm.says("scancel", error="scancel: error: Access/permission denied")
    assert "permission denied" in dtt("job", "stop", "jobs/t", "-y", PATH=path, expect=78).stderr


def test_without_an_answer_of_slurm_ls_works_and_stop_leaves_its_request(dtt: Dtt) -> None:
    slurm = FakeSlurm(dtt.folder / "bin")
    slurm.says("squeue", error=NO_CONTROLLER)
    path = str(slurm.folder)
    job = handed_over(made(dtt, "t"), "train", "jobs/t")
    by_hand = made(dtt, "by-hand")
    (by_hand / "attempts/1").mkdir(parents=True)
    os.utime(by_hand / "attempts/1", (1, 1))
    listed = dtt("job", "ls", PATH=path)
    assert {line.split()[0]: line.split()[1] for line in listed.stdout.splitlines()[1:]} == {
        "jobs/t": "unknown", "jobs/by-hand": "lost",
    }  # fmt: skip
    stdout = dtt("job", "stop", "jobs/t", PATH=path).stdout
    assert "jobs/t is unknown: submitted as 7; " in stdout
    assert "the job saves and stops as soon as it runs" in stdout
    assert (job / "control/stop").read_text().endswith(": dtt job stop\n")
    handed_over(made(dtt, "z-export"), "export", "jobs/z")
    silent = dtt("job", "stop", "jobs/z-export", PATH=path, expect=78).stderr
    assert "the state of jobs/z-export is unknown" in silent
    assert (
        "may be running or queued" in dtt("job", "rm", "jobs/t", "-y", PATH=path, expect=2).stderr
    )


@pytest.mark.slow
def test_rm_deletes_a_job_that_has_ended_and_nothing_else(dtt: Dtt, endless: Any) -> None:
    wait_until(lambda: reported(dtt)["seconds_left"])  # the next heartbeat has it
    status = reported(dtt)
    assert status["loss"] > 0
    assert status["tokens"] > 0
    assert status["tokens_per_second"] > 0
    assert "loss        " in dtt("job", "status", "jobs/t").stdout
    assert "is running" in dtt("job", "rm", "jobs/t", "-y", expect=2).stderr
    dtt("job", "stop", "jobs/t")
    assert Dtt.wait(endless).returncode == 75
    kept = dtt("job", "rm", "jobs/t", expect=2).stderr  # nobody to ask
    assert "not deleted: jobs/t: stopped, 1 checkpoints" in kept
    assert "dtt job rm jobs/t -y" in kept
    disk = dtt.folder / "disk"
    (dtt.folder / "jobs/t").rename(disk)
    (dtt.folder / "jobs/t").symlink_to(disk)
    assert "deleted jobs/t" in dtt("job", "rm", "jobs/t", "-y").stdout
    assert not disk.exists()
    assert list((dtt.folder / "jobs").iterdir()) == []
    assert "is not a job directory" in dtt("job", "rm", "jobs/t", expect=66).stderr


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a terminal: that of its user, and that of a process."""
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def rm_at(terminal: int, folder: Path, **streams: int) -> subprocess.Popen[bytes]:
    """Start `dtt job rm jobs/t` at a terminal, except for these streams."""
    command = [sys.executable, "-m", "dtt.main", "job", "rm", "jobs/t"]
    where: dict[str, int] = {"stdin": terminal, "stdout": subprocess.PIPE, "stderr": terminal}
    return subprocess.Popen(command, cwd=folder, env=os.environ | ALONE, **(where | streams))


@pytest.mark.parametrize(
    ("answer", "deletes"), [("\x04", False), ("n\n", False), ("y\n", True)],
    ids=["end of input", "no", "yes"],
)  # fmt: skip
def test_rm_at_a_terminal_deletes_only_after_an_answer(
    dtt: Dtt, terminal: tuple[int, int], answer: str, deletes: bool
) -> None:
    job, (ours, theirs) = made(dtt, "t"), terminal
    process = rm_at(theirs, dtt.folder)
    said = b""
    while b"[Y/n]" not in said:
        said += os.read(ours, 1024)
    os.write(ours, answer.encode())
    printed, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == (0 if deletes else 2)
    assert printed.startswith(b"deleted jobs/t") == deletes
    assert job.exists() != deletes


@pytest.mark.parametrize("stream", ["stdin", "stderr"])
def test_rm_without_yes_deletes_nothing_unless_both_question_and_answer_have_a_terminal(
    dtt: Dtt, terminal: tuple[int, int], stream: str
) -> None:
    job, (ours, theirs) = made(dtt, "t"), terminal
    with (dtt.folder / stream).open("w+") as file:
        process = rm_at(theirs, dtt.folder, **{stream: file.fileno()})
        os.write(ours, b"y\n")
        process.communicate(timeout=TIMEOUT)
    assert process.returncode == 2
    assert (job / "config.yaml").exists()


def test_logs_of_the_first_node_or_another(dtt: Dtt) -> None:
    logs = made(dtt, "t") / "logs"
    for node in ("n1", "n2"):
        (logs / f"train-7-r0-{node}.log").write_text("".join(f"{node} {i}\n" for i in range(99)))
        (logs / f"latest-{node}.log").symlink_to(f"train-7-r0-{node}.log")
    (logs / "latest.log").symlink_to("train-7-r0-n1.log")
    assert dtt("job", "logs", "jobs/t", "-n", "2").stdout == "n1 97\nn1 98\n"
    assert dtt("job", "logs", "jobs/t", "-n", "1", "--node", "n2").stdout == "n2 98\n"
    refused = dtt("job", "logs", "jobs/t", "--node", "n3", expect=66)
    assert "use --node n1 or n2" in refused.stderr


def test_followed_logs_continue_with_the_next_attempt(dtt: Dtt) -> None:
    logs = made(dtt, "t") / "logs"
    (logs / "train-7-r0-n1.log").write_text("one\n")
    (logs / "latest.log").symlink_to("train-7-r0-n1.log")
    process = dtt.start("job", "logs", "jobs/t", "-f")
    assert process.stdout is not None
    assert process.stdout.readline() == "one\n"
    with (logs / "train-7-r0-n1.log").open("a") as file:
        file.write("two\n")
    assert process.stdout.readline() == "two\n"
    (logs / "train-7-r1-n1.log").write_text("three\n")
    (logs / "aside").symlink_to("train-7-r1-n1.log")
    (logs / "aside").replace(logs / "latest.log")
    assert process.stdout.readline() == "three\n"
    process.send_signal(signal.SIGINT)
    assert Dtt.wait(process).returncode == 130
