"""The state of a job: from files alone, from Slurm, and when the two disagree."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.fake_slurm import (
    FORGOTTEN,
    NO_ACCOUNTING,
    NO_CONTROLLER,
    SACCT,
    SQUEUE,
    FakeSlurm,
    write_heartbeat,
)

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ConfigError, InputError
from dtt.jobs import job_state
from dtt.jobs.job_state import Status

DOCS = Path(__file__).parents[2] / "docs"
SAVED = "stopped at step 8 of 20, with a checkpoint\n  why:   {by}\n  next:  dtt train jobs/t"


@dataclass(frozen=True)
class Written:
    """A job directory, file by file. Times are seconds ago."""

    job: JobDir

    def submitted(self, id: str | None, *, ago: float = 500, **changes: Any) -> Written:
        record = {"time": time.time() - ago, "job_id": id, "argv": ["train"], "directory": "/",
                  "task": None}  # fmt: skip
        self._write("submission.json", json.dumps(record | changes))
        return self

    def attempt(self, number: int = 1, *, ago: float = 300, slurm: str | None = None) -> Written:
        # The file itself is new, as in a copy of the folder: its time says nothing.
        record = {"started": time.time() - ago, "slurm": slurm, "launch": "", "ranks": 2}
        return self.recorded(number, host="n1", **record)

    def recorded(self, number: int = 1, **facts: Any) -> Written:
        """Facts that are added to the record of an attempt."""
        path = self.job.attempt_dir(number) / "attempt.json"
        record = json.loads(path.read_text()) if path.exists() else {}
        self._write(f"attempts/{number}/attempt.json", json.dumps(record | facts))
        return self

    def decided(self, decision: str, *, ago: float = 50) -> Written:
        return self.recorded(decision=decision, decided=time.time() - ago)

    def ended(self, code: int, reason: str, number: int = 1, *, ago: float = 100) -> Written:
        by = next((x.split(":", 1)[1].strip() for x in reason.splitlines() if "why:" in x), "")
        return self.recorded(
            number, ended=time.time() - ago, code=code, reason=reason, step=8, rank=1, node="n2",
            checkpoint=None, asked_by=by,
        )  # fmt: skip

    def beat(self, number: int = 1, *, ago: float = 2, **changes: Any) -> Written:
        write_heartbeat(self.job, time=time.time() - ago, attempt=number, **changes)
        return self

    def asked(self, what: str, by: str = "alice: dtt job stop") -> Written:
        self._write(f"control/{what}", by + "\n")
        return self

    def acknowledged(self, *, ago: float = 1) -> Written:
        record = {"request": "stop", "by": ALICE, "step": 8, "time": time.time() - ago}
        self._write("control/acknowledged.json", json.dumps(record))
        return self

    def checkpoint(self, step: int) -> Written:
        (self.job.checkpoints / f"step-{step:06d}").mkdir(parents=True)
        return self

    def log(self, text: str) -> Written:
        self._write("logs/train-7-r0-n1.log", text)
        return self

    def status(self) -> Status:
        (status,) = job_state.examine([self.job])
        return status

    def _write(self, name: str, text: str) -> None:
        path = self.job.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """A job that was only configured."""
    job = Written(JobDir(tmp_path / "jobs/t"))
    job._write("config.yaml", "name: t\n")
    return job


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Knows no job, and has no accounting."""
    fake = FakeSlurm(tmp_path / "bin")
    fake.says("squeue", error=FORGOTTEN)
    fake.says("sacct", error=NO_ACCOUNTING)
    monkeypatch.setenv("PATH", str(fake.folder))
    return fake


def squeue_line(state: str, ago: float = 400, id: str = "7") -> str:
    return SQUEUE[state].format(id=id, since=round(time.time() - ago))


def sacct_line(state: str, ago: float = 400, id: str = "7") -> str:
    return SACCT[state].format(id=id, since=round(time.time() - ago))


Lines = tuple[str | float, ...]
"""A state of Slurm, the seconds since it began (400), and the id of the job (7)."""


def case(
    write: Callable[[Written], object],
    state: str,
    detail: str = "",
    *squeue: Lines,
    error: str = FORGOTTEN,
    sacct: Sequence[Lines] = (),
) -> tuple[Any, ...]:
    """What the files hold, the state, its detail (a final … stands for more), and Slurm's answer.

    Without `squeue`, Slurm answers with an error: by default that it does not know the job (any
    more).
    """
    return write, state, detail, squeue, error, sacct


TIME_LIMIT, TERM = SAVED.format(by="slurm: time limit"), SAVED.format(by="SIGTERM")
ALICE = "alice: dtt job stop"
STOPPED = "stopped at step 8 of 20, with a checkpoint"
ENDED = "attempt 1 ended: " + STOPPED
GAVE_UP = "over: exit code 74; 3 consecutive attempts without a new checkpoint: see logs"
FULL = "3 attempts without a new checkpoint; disk full (exit code 74, rank 1 on n2)"


def trained(w: Written) -> Written:
    """A training of Slurm job 7 that has begun."""
    return w.submitted("7").attempt(slurm="7")


def watched(w: Written) -> Written:
    """A command without heartbeats, which only the supervisor watches."""
    return w.submitted("7").attempt(ago=399, slurm="7")


def killed(w: Written, code: int | None) -> Written:
    """A training that Slurm ended: it may have recorded its end before."""
    trained(w).beat(ago=100)
    return w if code is None else w.ended(code, TERM)


FROM_FILES = {
    "without attempts": case(lambda w: w, "never started"),
    "a heartbeat": case(lambda w: w.attempt().beat(), "running"),
    "a long phase": case(
        lambda w: w.attempt().beat(phase="evaluate"), "running", "in phase evaluate"
    ),
    "no heartbeat yet": case(
        lambda w: w.attempt(1).beat(1).ended(75, TIME_LIMIT).attempt(2, ago=5),
        "running", "starting",
    ),
    "a stop request": case(
        lambda w: w.attempt().beat().asked("stop"),
        "stopping", f"requested by {ALICE}, not yet acknowledged",
    ),
    "an acknowledged one": case(
        lambda w: w.attempt().beat().asked("stop").acknowledged(),
        "stopping", f"requested by {ALICE}, acknowledged at step 8",
    ),
    "one of an earlier attempt": case(
        lambda w: w.attempt().beat().acknowledged(ago=1000), "running"
    ),
    "one without text": case(
        lambda w: w.attempt().beat().asked("stop", ""),
        "stopping", "requested by control/stop, not yet acknowledged",
    ),
    "a request to save": case(
        lambda w: w.attempt().beat().asked("save", "bob: dtt job save"),
        "running", "save requested by bob: dtt job save, not yet acknowledged",
    ),
    "done": case(lambda w: w.attempt().beat().ended(0, "done"), "done"),
    "stopped": case(
        lambda w: w.attempt().beat().ended(75, SAVED.format(by=ALICE)),
        "stopped", f"{STOPPED}; requested by {ALICE}",
    ),
    "diverged": case(
        lambda w: w.attempt().beat().ended(76, "training diverged: loss is nan at step 8\n  why"),
        "diverged", "training diverged: loss is nan at step 8",
    ),
    "failed": case(
        lambda w: w.attempt().beat().ended(74, "no space left on device"),
        "failed", "no space left on device (exit code 74, rank 1 on n2)",
    ),
    "no heartbeat any more": case(
        lambda w: w.attempt().beat(ago=90), "lost", "last heartbeat of attempt 1 on n1 9…"
    ),
}  # fmt: skip
WITH_SLURM = {
    "queued": case(
        lambda w: w.submitted("7"), "queued", "waiting in the queue (JobHeldUser)", ("HELD",)
    ),
    "running, not started": case(
        lambda w: w.submitted("7"), "running", "starting: Slurm job on n[1-2]", ("RUNNING",)
    ),
    "running without heartbeats": case(
        lambda w: trained(w).beat(ago=90),
        "lost", "Slurm job on n[1-2], no heartbeat for 9…", ("RUNNING",),
    ),
    "the last heartbeat of a killed job": case(
        lambda w: trained(w).beat().checkpoint(4),
        "cancelled", "step-000004 is the newest checkpoint", ("CANCELLED", 1),
    ),
    "run by hand while queued": case(
        lambda w: w.submitted("7").attempt().beat(), "running", "", ("PENDING",)
    ),
    "requeued": case(
        lambda w: trained(w).ended(75, TIME_LIMIT),
        "queued", f"waiting in the queue (Resources); attempt 1: {STOPPED}", ("PENDING", 90),
    ),
    "preempted with grace, by the script's own word": case(
        lambda w: trained(w).ended(75, TERM).decided("again: preempted, exit code 75; requeued"),
        "preempted", "waiting in the queue (Resources); …", ("PENDING", 90),
    ),
    "done, not yet over in Slurm": case(
        lambda w: trained(w).beat().ended(0, "done", ago=1), "done", "", ("RUNNING",)
    ),
    "done, then the node failed": case(
        lambda w: trained(w).beat().ended(0, "done", ago=1), "done", "", ("NODE_FAIL", 0)
    ),
    "submitted again after a final ending": case(
        lambda w: w.submitted("9", ago=10).attempt(slurm="7").ended(2, "3 mistakes"),
        "queued", "…", ("FAILED", 99), ("PENDING", 10, "9"),
    ),
    "cancelled and submitted again": case(
        lambda w: w.submitted("9", ago=9).attempt(slurm="7").ended(75, TERM),
        "queued", "…", ("CANCELLED", 99), ("PENDING", 9, "9"),
    ),
    "suspended": case(
        lambda w: trained(w).beat(ago=500),
        "suspended", "on n[1-2], until Slurm resumes it", ("SUSPENDED",),
    ),
    "of plain sbatch": case(
        lambda w: w.attempt(slurm="31").beat(), "cancelled", "…", ("CANCELLED", 1, "31")
    ),
    "known to accounting only": case(
        lambda w: trained(w).beat(ago=120),
        "cancelled", "…", sacct=[("RUNNING",), ("CANCELLED", 100)],
    ),
    "out of attempts": case(
        lambda w: trained(w).ended(74, "disk full").decided(GAVE_UP),
        "out of attempts", FULL, ("FAILED", 99),
    ),
    "out of attempts, whose node died": case(
        lambda w: trained(w).decided(GAVE_UP), "out of attempts", "…", ("FAILED", 99)
    ),
    "out of attempts in the set-up": case(
        lambda w: trained(w).ended(78, "exit code 78: see logs").decided(GAVE_UP),
        "out of attempts", "3 attempts without a new checkpoint; exit code 78: see logs …",
        ("FAILED", 99),
    ),
    "started by hand since": case(
        lambda w: trained(w).decided(GAVE_UP, ago=90).attempt(2, ago=80).ended(74, "x", 2, ago=70),
        "failed", "x …", ("FAILED", 99),
    ),
    **{
        f"ended by slurm with {code}: {state}": case(
            partial(killed, code=code), state, "…", (slurm_says, 100)
        )
        for code in (75, 1, None)
        for slurm_says, state in (
            ("CANCELLED", "cancelled"), ("TIMEOUT", "timed out"), ("NODE_FAIL", "node failed")
        )
    },
    "on a failed node": case(
        lambda w: trained(w).checkpoint(4),
        "node failed", "step-000004 is the newest checkpoint", ("NODE_FAIL", 99),
    ),
    "failed before any attempt": case(
        lambda w: w.submitted("7"), "failed", "Slurm state FAILED", ("FAILED",)
    ),
    "forgotten before any attempt": case(lambda w: w.submitted("7"), "lost", "never started, …"),
    "forgotten": case(lambda w: trained(w).beat(ago=100), "lost", "…"),
    "forgotten when done": case(lambda w: trained(w).ended(0, "done"), "done"),
    "a command without heartbeats": case(watched, "running", "Slurm job on n[1-2]", ("RUNNING",)),
    "a command that Slurm forgot": case(watched, "lost", "…"),
    "a command that is done": case(
        lambda w: watched(w).ended(0, "done").decided("over: done"), "done", "", ("COMPLETED", 99)
    ),
    "a cancelled command, which took a second to end": case(
        lambda w: w.submitted("7", argv=["download"]).attempt(ago=100, slurm="7")
        .ended(75, "stopped by slurm: SIGTERM"),
        "cancelled", "stopped by slurm: SIGTERM", ("CANCELLED", 101),
    ),
    "a stopped command": case(
        lambda w: w.submitted("7", argv=["download"]).attempt(ago=100, slurm="7")
        .ended(75, "stopped by slurm: SIGTERM"),
        "stopped", "stopped by slurm: SIGTERM",
    ),
}  # fmt: skip
SILENT = f"submitted as 7; {NO_CONTROLLER}"
WITHOUT_AN_ANSWER = {
    "running": case(lambda w: trained(w).beat(), "running", error=NO_CONTROLLER),
    "diverged": case(
        lambda w: trained(w).ended(76, "diverged"), "diverged", "diverged", error=NO_CONTROLLER
    ),
    "a command without heartbeats": case(watched, "unknown", SILENT, error=NO_CONTROLLER),
    "stopped for the time limit": case(
        lambda w: trained(w).ended(75, TIME_LIMIT),
        "unknown", f"{SILENT}; {ENDED}", error=NO_CONTROLLER,
    ),
    "after an error": case(
        lambda w: trained(w).ended(74, "x"), "unknown", "…", error=NO_CONTROLLER
    ),
    "requeued": case(
        lambda w: trained(w).ended(1, "x").decided("again: exit code; requeued"),
        "unknown", "…", error=NO_CONTROLLER,
    ),
    "stopped by the script's own word": case(
        lambda w: trained(w).ended(75, TERM).decided("over: stopped on request"),
        "stopped", "…", error=NO_CONTROLLER,
    ),
    "out of attempts by its own word": case(
        lambda w: trained(w).ended(74, "disk full").decided(GAVE_UP),
        "out of attempts", FULL, error=NO_CONTROLLER,
    ),
    "submitted again since": case(
        lambda w: trained(w).ended(74, "x").decided("over: x").submitted("9", ago=0),
        "unknown", f"submitted as 9; {NO_CONTROLLER}; attempt 1 ended: x", error=NO_CONTROLLER,
    ),
}  # fmt: skip
STATES = [
    pytest.param(*values, id=f"{group}: {name}")
    for group, cases in (
        ("files", FROM_FILES), ("slurm", WITH_SLURM), ("no answer", WITHOUT_AN_ANSWER)
    )
    for name, values in cases.items()
]  # fmt: skip


@pytest.mark.parametrize(("write", "state", "detail", "squeue", "error", "sacct"), STATES)
def test_the_state_follows_from_the_files_and_from_slurm(
    written: Written,
    slurm: FakeSlurm,
    write: Callable[[Written], object],
    state: str,
    detail: str,
    squeue: Sequence[Any],
    error: str,
    sacct: Sequence[Any],
) -> None:
    if squeue:
        slurm.says("squeue", *(squeue_line(*line) for line in squeue))
    else:
        slurm.says("squeue", error=error)
    if sacct:
        slurm.says("sacct", *(sacct_line(*line) for line in sacct))
    write(written)
    status = written.status()
    assert status.state.value == state, status.detail
    if detail.endswith("…"):
        assert status.detail.startswith(detail[:-1])
    else:
        assert status.detail == detail


def test_every_state_is_in_the_table_of_the_documentation_and_in_this_one() -> None:
    states = {state.value for state in job_state.State}
    assert states - {row.values[1] for row in STATES} == set()
    table = (DOCS / "slurm.md").read_text().split("## States\n")[1].split("\n## ")[0]
    assert states - set(re.findall(r"`([a-z ]+)`", table)) == set()


def test_a_running_job_has_its_step_and_the_time_left(written: Written, slurm: FakeSlurm) -> None:
    status = written.attempt().beat().status()
    assert (status.files.step, status.files.steps, status.seconds_left) == (8, 20, 6.0)
    assert slurm.asked("squeue") == [], "it was never submitted"


def test_a_lost_job_shows_the_end_of_its_log(written: Written) -> None:
    assert written.attempt().beat(ago=90).log("Bus error\n\n").status().log_tail == ["Bus error"]


def test_a_process_that_is_gone_from_this_machine_is_lost_at_once(written: Written) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here = socket.gethostname()
    assert written.attempt().beat(node=here, pid=gone.pid).status().state == "lost"
    assert written.beat(node=here, pid=os.getpid()).status().state == "running"


@pytest.mark.parametrize(
    ("answer", "error"),
    [(None, "squeue is not installed"), ("upgraded until noon", "unexpected output of squeue")],
)
def test_without_a_usable_squeue_a_submitted_job_is_unknown(
    written: Written, slurm: FakeSlurm, answer: str | None, error: str
) -> None:
    if answer is None:
        (slurm.folder / "squeue").unlink()
    else:
        slurm.says("squeue", answer)
    status = written.submitted("7").status()
    assert (status.state, status.detail) == ("unknown", f"submitted as 7; {error}")
    assert status.slurm_error == error


def test_a_running_or_queued_job_is_not_started_again(written: Written, slurm: FakeSlurm) -> None:
    slurm.says("squeue", squeue_line("PENDING", id="7_3"))
    with pytest.raises(ConfigError, match=r"jobs/t is queued as Slurm job 7_3\n[\s\S]*stop .* -y"):
        written.submitted("7_3").status().check_idle()
    written.attempt(slurm="7_3").beat()
    slurm.says("squeue", squeue_line("RUNNING", id="7_3"))
    with pytest.raises(ConfigError, match="is running"):
        written.status().check_idle()
    written.ended(75, SAVED.format(by="bob: x"))
    slurm.says("squeue", error=FORGOTTEN)
    written.status().check_idle()


def test_an_unreachable_slurm_does_not_affect_jobs_without_slurm(
    written: Written, slurm: FakeSlurm, tmp_path: Path
) -> None:
    slurm.says("squeue", error=NO_CONTROLLER)
    other = Written(JobDir(tmp_path / "jobs/other"))
    other._write("config.yaml", "name: other\n")
    other.attempt(ago=300)  # by hand, and gone before its first heartbeat
    written.submitted("7")
    assert [s.state for s in job_state.examine([written.job, other.job])] == ["unknown", "lost"]


def test_a_submission_that_sbatch_could_not_confirm_is_unknown_until_it_is_found(
    written: Written, slurm: FakeSlurm
) -> None:
    script = written.job.script.absolute()
    status = written.submitted(None, ago=20, script=str(script)).status()
    assert status.state == "unknown"
    assert "sbatch did not report whether Slurm accepted it" in status.detail
    found = f"31|{time.time() - 10:.0f}|{script}"
    slurm.says("squeue", found)
    # The fake prints the same for both of its questions: the second is no answer.
    assert "--me" in slurm.asked("squeue")[-1]
    assert written.status().files.unanswered
    assert "--jobs=31" in slurm.asked("squeue")[-1]


def test_one_query_covers_all_jobs(tmp_path: Path, slurm: FakeSlurm) -> None:
    names = ["a", "sweep/0001", "sweep/0002"]
    for i, name in enumerate(names):
        job = Written(JobDir(tmp_path / "jobs" / name))
        job._write("config.yaml", "name: t\n")
        job.submitted(f"7_{i}")
    slurm.says("squeue", *(squeue_line("PENDING", id=f"7_{i}") for i in range(3)))
    jobs = job_state.find(tmp_path / "jobs")
    assert [str(job.root.relative_to(tmp_path / "jobs")) for job in jobs] == names
    assert [status.state for status in job_state.examine(jobs)] == ["queued"] * 3
    assert len(slurm.asked("squeue")) == 1


def test_the_rest_of_a_deleted_job_is_not_found(tmp_path: Path) -> None:
    for name in (
        "t",
        ".removed-t-0a1b2c3d",
        ".removed-group-0a1b2c3d/t",
        "group/.removed-t-0a1b2c3d",
    ):
        Written(JobDir(tmp_path / name))._write("config.yaml", "name: t\n")
    assert [job.root.name for job in job_state.find(tmp_path)] == ["t"]


def test_a_folder_without_a_job_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs/t").mkdir(parents=True)
    (tmp_path / "jobs/t/config.yaml").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="use its directory: jobs/t"):
        job_state.open_job(Path("t"))
    with pytest.raises(InputError, match="dtt job ls"):
        job_state.open_job(Path("jobs"))


def test_job_state_needs_no_torch() -> None:
    modules = "dtt.launch.job, dtt.jobs.listing"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
