"""The ledger tells the truth: from files alone, from Slurm, and when the two disagree."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.fake_slurm import FORGOTTEN, NO_ACCOUNTING, NO_CONTROLLER, SACCT, SQUEUE, FakeSlurm

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ConfigError, InputError
from dtt.jobs import job_state
from dtt.jobs.job_state import Status
from dtt.jobs.slurm import submissions

SAVED = "stopped at step 8 of 20, with a checkpoint\n  why:   {by}\n  next:  dtt train jobs/t"


@dataclass(frozen=True)
class Written:
    """A job directory, file by file. Times are seconds ago."""

    job: JobDir

    def submitted(self, *ids: str) -> Written:
        facts = {"time": time.time() - 500, "argv": ["train"], "directory": "/"}
        lines = [facts | {"job_id": id} for id in ids]
        self._write("submissions.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        return self

    def succeeded(self, *ids: str) -> Written:
        """Successors that the job script has submitted."""
        with self.job.submissions.open("a") as file:
            for id in ids:
                record = {"time": time.time() - 300, "job_id": id, "command": "successor of 7"}
                file.write(json.dumps(record) + "\n")
        return self

    def decided(self, decision: str) -> Written:
        self._write("decision", decision + "\n", 50)
        return self

    def attempt(self, number: int = 1, *, ago: float = 300, slurm: str | None = None) -> Written:
        self._write(f"attempts/{number}/ranks/00000.json", "{}", ago)
        environment = {} if slurm is None else {"SLURM_JOB_ID": slurm}
        self._write("env.json", json.dumps({"environment": environment}), ago)
        return self

    def other_attempt(self, number: int, *, ago: float) -> Written:
        """One of a command that only the job script watches."""
        folder, when = self.job.attempt_dir(number), time.time() - ago
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder, (when, when))
        return self

    def beat(self, number: int = 1, *, ago: float = 2, **changes: Any) -> Written:
        when = time.time() - ago
        beat = {
            "time": when, "progress": when, "attempt": number, "phase": "step",
            "step": 8, "steps": 20, "seconds_per_step": 0.5, "world_size": 2, "node": "n1",
            "pid": 1,
        }  # fmt: skip
        self._write("heartbeat.json", json.dumps(beat | changes))
        return self

    def ended(self, code: int, reason: str, number: int = 1, *, ago: float = 100) -> Written:
        record = {"code": code, "reason": reason, "step": 8, "rank": 1, "node": "n2"}
        self._write(f"attempts/{number}/exit.json", json.dumps(record), ago)
        return self

    def asked(self, what: str, by: str = "alice: dtt job stop") -> Written:
        self._write(f"control/{what}", by + "\n")
        return self

    def acknowledged(self, request: str = "stop", *, ago: float = 1) -> Written:
        record = {
            "request": request,
            "by": "alice: dtt job stop",
            "step": 8,
            "time": time.time() - ago,
        }
        self._write("control/acknowledged.json", json.dumps(record))
        return self

    def checkpoint(self, step: int) -> Written:
        (self.job.checkpoints / f"step-{step:06d}").mkdir(parents=True)
        return self

    def stalled(self, began_with: int, count: int) -> Written:
        self._write("stalled", f"{began_with} {count}\n")
        return self

    def log(self, text: str) -> Written:
        self._write("logs/train-7-r0-n1.log", text)
        return self

    def status(self) -> Status:
        (status,) = job_state.examine([self.job])
        return status

    def _write(self, name: str, text: str, ago: float = 0.0) -> None:
        path = self.job.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        when = time.time() - ago
        os.utime(path, (when, when))


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


@pytest.fixture
def no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def squeue_line(state: str, *, ago: float = 400, id: str = "7") -> str:
    return SQUEUE[state].format(id=id, since=round(time.time() - ago))


def sacct_line(state: str, *, ago: float = 400, id: str = "7") -> str:
    return SACCT[state].format(id=id, since=round(time.time() - ago))


def reported(status: Status) -> tuple[str, str]:
    return status.state.value, status.detail


# ---- from files alone ----------------------------------------------------------------------------


@pytest.mark.usefixtures("no_slurm")
class TestWithoutSlurm:
    def test_a_job_without_attempts_has_never_started(self, written: Written) -> None:
        assert reported(written.status()) == ("never started", "")

    def test_running_with_its_step_and_the_time_left(self, written: Written) -> None:
        status = written.attempt().beat().status()
        assert reported(status) == ("running", "")
        assert (status.files.step, status.files.steps, status.seconds_left) == (8, 20, 6.0)

    def test_long_phases_are_named(self, written: Written) -> None:
        assert reported(written.attempt().beat(phase="evaluate").status()) == (
            "running", "in phase evaluate",
        )  # fmt: skip

    def test_an_attempt_without_a_heartbeat_yet_is_starting(self, written: Written) -> None:
        written.attempt(1).beat(1).ended(75, SAVED.format(by="bob: x")).attempt(2, ago=5)
        assert reported(written.status()) == ("running", "starting")

    def test_a_stop_request_names_its_requester(self, written: Written) -> None:
        status = written.attempt().beat().asked("stop").status()
        assert reported(status) == (
            "stopping", "requested by alice: dtt job stop, not yet acknowledged",
        )  # fmt: skip

    def test_a_request_acknowledged_at_a_step(self, written: Written) -> None:
        status = written.attempt().beat().asked("stop").acknowledged().status()
        assert reported(status) == (
            "stopping", "requested by alice: dtt job stop, acknowledged at step 8",
        )  # fmt: skip

    def test_an_acknowledgement_of_an_earlier_attempt_is_ignored(self, written: Written) -> None:
        status = written.attempt().beat().acknowledged(ago=1000).status()
        assert reported(status) == ("running", "")

    def test_a_save_request_does_not_stop_the_job(self, written: Written) -> None:
        status = written.attempt().beat().asked("save", "bob: dtt job save").status()
        assert reported(status) == (
            "running", "save requested by bob: dtt job save, not yet acknowledged",
        )  # fmt: skip

    def test_a_stop_file_without_text_is_named_as_the_reason(self, written: Written) -> None:
        written.attempt().beat()
        written.job.stop.parent.mkdir(exist_ok=True)
        written.job.stop.touch()
        assert reported(written.status())[1] == "requested by control/stop, not yet acknowledged"

    @pytest.mark.parametrize(
        ("code", "reason", "expected"),
        [
            (0, "done", ("done", "")),
            (75, SAVED.format(by="alice: dtt job stop"), (
                "stopped",
                "stopped at step 8 of 20, with a checkpoint; requested by alice: dtt job stop",
            )),
            (76, "training diverged: loss is nan at step 8\n  why: …", (
                "diverged", "training diverged: loss is nan at step 8",
            )),
            (74, "no space left on device", (
                "failed", "no space left on device (exit code 74, rank 1 on n2)",
            )),
        ],
    )  # fmt: skip
    def test_the_state_reports_how_the_job_ended(
        self, written: Written, code: int, reason: str, expected: tuple[str, str]
    ) -> None:
        assert reported(written.attempt().beat().ended(code, reason).status()) == expected

    def test_without_heartbeat_and_ending_it_is_lost(self, written: Written) -> None:
        status = written.attempt().beat(ago=90).log("Bus error\n\n").status()
        assert status.state == "lost"
        assert "on n1" in status.detail
        assert status.log_tail == ["Bus error"]

    def test_a_process_that_is_gone_from_this_machine_is_lost_at_once(
        self, written: Written
    ) -> None:
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        here = socket.gethostname()
        assert written.attempt().beat(node=here, pid=gone.pid).status().state == "lost"
        assert written.beat(node=here, pid=os.getpid()).status().state == "running"

    def test_a_submitted_job_without_slurm_is_unknown(self, written: Written) -> None:
        status = written.submitted("7").status()
        assert reported(status) == ("unknown", "submitted as 7; squeue is not installed")


# ---- with Slurm ----------------------------------------------------------------------------------


def test_a_job_that_was_never_submitted_asks_nothing(written: Written, slurm: FakeSlurm) -> None:
    assert written.attempt().beat().status().state == "running"
    assert slurm.asked("squeue") == []


def test_queued_with_the_reason_slurm_gives(written: Written, slurm: FakeSlurm) -> None:
    slurm.says("squeue", squeue_line("HELD"))
    status = written.submitted("7").status()
    assert reported(status) == ("queued", "waiting in the queue (JobHeldUser)")
    assert status.queued


def test_running_in_slurm_but_not_started(written: Written, slurm: FakeSlurm) -> None:
    slurm.says("squeue", squeue_line("RUNNING"))
    assert reported(written.submitted("7").status()) == (
        "running", "starting: Slurm job on n[1-2]",
    )  # fmt: skip


def test_a_command_without_a_heartbeat_runs_as_long_as_slurm_reports_it(
    written: Written, slurm: FakeSlurm
) -> None:
    slurm.says("squeue", squeue_line("RUNNING", ago=400))
    written.submitted("7").other_attempt(1, ago=399)
    assert reported(written.status()) == ("running", "Slurm job on n[1-2]")
    slurm.says("squeue", error=NO_CONTROLLER)
    assert reported(written.status()) == ("unknown", f"submitted as 7; {NO_CONTROLLER}")
    slurm.says("squeue", error=FORGOTTEN)
    assert written.status().state == "lost"
    written.stalled(-1, 3).ended(0, "done")
    assert reported(written.status()) == ("done", "")
    slurm.says("squeue", squeue_line("COMPLETED", ago=99))
    assert reported(written.status()) == ("done", "")


def test_a_command_without_a_heartbeat_is_cancelled_by_slurm_alone(
    written: Written, slurm: FakeSlurm
) -> None:
    slurm.says("squeue", squeue_line("CANCELLED", ago=101))  # it took a second to write its ending
    record = {"time": 1, "job_id": "7", "argv": ["download"], "directory": "/"}
    written._write("submissions.jsonl", json.dumps(record) + "\n")
    written.ended(75, "stopped by slurm: SIGTERM", ago=100).other_attempt(1, ago=100)
    assert reported(written.status()) == ("cancelled", "stopped by slurm: SIGTERM")
    slurm.says("squeue", error=FORGOTTEN)
    assert reported(written.status()) == ("stopped", "stopped by slurm: SIGTERM")


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


def test_a_truncated_line_of_submissions_is_skipped(written: Written, slurm: FakeSlurm) -> None:
    slurm.says("squeue", squeue_line("PENDING"))
    written.submitted("7")
    with written.job.submissions.open("a") as file:
        file.write('{"time": 1, "job_')
    assert written.status().state == "queued"


def test_running_in_slurm_without_heartbeats_is_lost(written: Written, slurm: FakeSlurm) -> None:
    slurm.says("squeue", squeue_line("RUNNING", ago=400))
    status = written.submitted("7").attempt(ago=300, slurm="7").beat(ago=90).status()
    assert status.state == "lost"
    assert "Slurm job on n[1-2], no heartbeat for 9" in status.detail


def test_the_last_heartbeat_of_a_killed_job_does_not_count(
    written: Written, slurm: FakeSlurm
) -> None:
    slurm.says("squeue", squeue_line("CANCELLED", ago=1))
    status = written.submitted("7").attempt(slurm="7").beat().checkpoint(4).status()
    assert reported(status) == ("cancelled", "step-000004 is the newest checkpoint")


def test_a_run_by_hand_counts_while_slurm_has_the_job_queued(
    written: Written, slurm: FakeSlurm
) -> None:
    slurm.says("squeue", squeue_line("PENDING"))
    assert written.submitted("7").attempt().beat().status().state == "running"


def test_a_requeued_job_reports_how_the_attempt_ended(written: Written, slurm: FakeSlurm) -> None:
    slurm.says("squeue", squeue_line("PENDING", ago=90))
    written.submitted("7").attempt(slurm="7").ended(75, SAVED.format(by="slurm: time limit"))
    assert reported(written.status()) == (
        "queued",
        "waiting in the queue (Resources); attempt 1: stopped at step 8 of 20, with a checkpoint",
    )


@pytest.mark.parametrize("accounting", [False, True])
def test_a_preempted_job_waits_in_the_queue(
    written: Written, slurm: FakeSlurm, accounting: bool
) -> None:
    slurm.says("squeue", squeue_line("PENDING", ago=90))
    written.submitted("7").attempt(slurm="7")
    if accounting:  # killed without a word
        slurm.says("sacct", sacct_line("PREEMPTED"), sacct_line("PENDING", ago=90))
        written.beat(ago=95)
    else:
        # The grace period: the script itself put it back, which Slurm calls neither.
        written.ended(75, SAVED.format(by="SIGTERM"))
        written.decided("again: preempted, exit code 75; requeued")
    status = written.status()
    assert (status.state, status.queued) == ("preempted", True)
    assert status.detail.startswith("waiting in the queue (Resources); ")


@pytest.mark.parametrize(
    ("slurm_says", "state"),
    [("CANCELLED", "cancelled"), ("TIMEOUT", "timed out"), ("NODE_FAIL", "node failed")],
)
@pytest.mark.parametrize("code", [75, 1, None])
def test_jobs_ended_by_slurm_have_the_state_of_slurm(
    written: Written, slurm: FakeSlurm, slurm_says: str, state: str, code: int | None
) -> None:
    slurm.says("squeue", squeue_line(slurm_says, ago=100))
    written.submitted("7").attempt(slurm="7").beat(ago=100)
    if code is not None:
        written.ended(code, SAVED.format(by="slurm: SIGTERM"))
    assert written.status().state == state


def test_a_final_ending_is_not_overruled(written: Written, slurm: FakeSlurm) -> None:
    written.submitted("7").attempt(slurm="7").beat().ended(0, "done", ago=1)
    for line in (squeue_line("RUNNING"), squeue_line("NODE_FAIL", ago=0)):
        slurm.says("squeue", line)
        assert written.status().state == "done"


def test_submitted_again_after_a_final_ending_it_is_queued(
    written: Written, slurm: FakeSlurm
) -> None:
    written.submitted("7", "9").attempt(slurm="7").ended(2, "3 mistakes", ago=100)
    slurm.says("squeue", squeue_line("FAILED", ago=99), squeue_line("PENDING", ago=10, id="9"))
    assert written.status().state == "queued"


def test_of_a_chain_the_running_job_counts(written: Written, slurm: FakeSlurm) -> None:
    slurm.says("squeue", squeue_line("RUNNING"), squeue_line("PENDING", id="8"))
    status = written.submitted("7", "8").attempt(slurm="7").beat().status()
    assert (status.state, status.slurm and status.slurm.id) == ("running", "7")
    assert "--jobs=7,8" in slurm.asked("squeue")[0]


def test_a_job_of_plain_sbatch_is_known_from_its_attempt(
    written: Written, slurm: FakeSlurm
) -> None:
    slurm.says("squeue", squeue_line("CANCELLED", ago=1, id="31"))
    assert written.attempt(slurm="31").beat().status().state == "cancelled"
    assert "--jobs=31" in slurm.asked("squeue")[0]


def test_accounting_knows_what_the_controller_has_forgotten(
    written: Written, slurm: FakeSlurm
) -> None:
    slurm.says("sacct", sacct_line("RUNNING"), sacct_line("CANCELLED", ago=100))
    assert written.submitted("7").attempt(slurm="7").beat(ago=120).status().state == "cancelled"


def test_a_job_that_slurm_has_forgotten_is_derived_from_files(
    written: Written, slurm: FakeSlurm
) -> None:
    assert written.submitted("7").status().state == "lost"
    written.attempt(slurm="7").beat(ago=100)
    assert written.status().state == "lost"
    assert written.ended(0, "done").status().state == "done"
    assert slurm.asked("sacct")


def test_three_attempts_without_a_checkpoint_are_out_of_attempts(
    written: Written, slurm: FakeSlurm
) -> None:
    slurm.says("squeue", squeue_line("FAILED", ago=99))
    written.submitted("7").attempt(slurm="7").ended(74, "disk full").stalled(4, 3).checkpoint(4)
    status = written.status()
    assert reported(status) == (
        "out of attempts",
        "3 attempts without a new checkpoint; disk full (exit code 74, rank 1 on n2)",
    )  # fmt: skip
    assert written.checkpoint(8).status().state == "failed"


def test_a_job_script_that_failed_before_any_attempt(written: Written, slurm: FakeSlurm) -> None:
    slurm.says("squeue", squeue_line("FAILED"))
    assert reported(written.submitted("7").status()) == ("failed", "Slurm state FAILED")


def test_an_unreachable_controller_is_reported(written: Written, slurm: FakeSlurm) -> None:
    slurm.says("squeue", error=NO_CONTROLLER)
    status = written.submitted("7").attempt(slurm="7").beat().status()
    assert (status.state, status.slurm_error) == ("running", NO_CONTROLLER)
    assert written.ended(76, "diverged").status().state == "diverged"


# ---- Slurm gives no answer -----------------------------------------------------------------------


@pytest.mark.parametrize(("code", "by"), [(75, "slurm: time limit"), (1, ""), (74, "")])
def test_a_job_that_may_be_in_the_queue_is_unknown(
    written: Written, slurm: FakeSlurm, code: int, by: str
) -> None:
    slurm.says("squeue", error=NO_CONTROLLER)
    written.submitted("7").attempt(slurm="7").ended(code, SAVED.format(by=by))
    reason = "stopped at step 8 of 20, with a checkpoint"
    expected = f"submitted as 7; {NO_CONTROLLER}; attempt 1 ended: {reason}"
    assert reported(written.status()) == ("unknown", expected)
    assert written.decided("again: exit code; requeued").status().state == "unknown"


def test_an_ending_recorded_by_the_job_script_needs_no_slurm(
    written: Written, slurm: FakeSlurm
) -> None:
    slurm.says("squeue", error=NO_CONTROLLER)
    written.submitted("7").attempt(slurm="7").ended(75, SAVED.format(by="bob: x"))
    written.decided("over: stopped on request")
    assert written.status().state == "stopped"
    written.ended(74, "disk full").stalled(4, 3).checkpoint(4)
    assert written.status().state == "out of attempts"
    written.submitted("7", "9")
    (written.job.submissions).write_text(
        written.job.submissions.read_text()
        + json.dumps({"time": time.time(), "job_id": "9"})
        + "\n"
    )  # handed over again since then
    assert written.status().state == "unknown"


def test_an_unreachable_slurm_does_not_affect_jobs_without_slurm(
    written: Written, slurm: FakeSlurm, tmp_path: Path
) -> None:
    slurm.says("squeue", error=NO_CONTROLLER)
    other = Written(JobDir(tmp_path / "jobs/other"))
    other._write("config.yaml", "name: other\n")
    other.attempt(ago=300)  # by hand, and gone before its first heartbeat
    written.submitted("7")
    assert [s.state for s in job_state.examine([written.job, other.job])] == ["unknown", "lost"]


def test_unexpected_output_of_squeue_is_not_an_answer(written: Written, slurm: FakeSlurm) -> None:
    slurm.says("squeue", "slurm is being upgraded until noon")
    assert written.submitted("7").status().state == "unknown"


def test_a_submission_that_sbatch_could_not_confirm_is_unknown_until_it_is_found(
    written: Written, slurm: FakeSlurm
) -> None:
    script = written.job.script.absolute()
    record = {"time": time.time() - 20, "job_id": None, "argv": ["train"], "directory": "/",
              "script": str(script), "task": None}  # fmt: skip
    written._write("submissions.jsonl", json.dumps(record) + "\n")
    status = written.status()
    assert status.state == "unknown"
    assert "sbatch did not report whether Slurm accepted it" in status.detail
    found = f"31|{time.time() - 10:.0f}|{script}"
    slurm.says("squeue", found)
    # The fake prints the same for both of its questions: the second is no answer.
    assert "--me" in slurm.asked("squeue")[-1]
    assert written.status().files.unanswered
    assert "--jobs=31" in slurm.asked("squeue")[-1]


# ---- chains, suspension, resumption --------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "reason", "decision", "state"),
    [
        (75, SAVED.format(by="alice: dtt job stop"), "over: stopped on request", "stopped"),
        (74, "disk full", "over: exit code 74; 3 consecutive attempts", "out of attempts"),
        (None, "", "over: exit code 78; 3 consecutive attempts", "out of attempts"),
    ],
)
def test_a_successor_that_the_script_cancelled_does_not_make_the_job_cancelled(
    written: Written, slurm: FakeSlurm, code: int | None, reason: str, decision: str, state: str
) -> None:
    slurm.says("squeue", squeue_line("FAILED", ago=99), squeue_line("CANCELLED", ago=98, id="8"))
    written.submitted("7").succeeded("8").attempt(slurm="7").stalled(4, 3).checkpoint(4)
    if code is not None:
        written.ended(code, reason)
    assert written.status().state == "cancelled"  # by somebody else
    status = written.decided(decision).status()
    assert (status.state, status.slurm and status.slurm.id) == (state, "7")


def test_a_suspended_job_is_suspended_without_heartbeats(
    written: Written, slurm: FakeSlurm
) -> None:
    slurm.says("squeue", squeue_line("SUSPENDED"))
    written.submitted("7").attempt(slurm="7")
    for ago in (5, 500):
        status = written.beat(ago=ago).status()
        assert reported(status) == ("suspended", "on n[1-2], until Slurm resumes it")
    with pytest.raises(ConfigError, match="is suspended as Slurm job 7"):
        status.check_idle()


def test_a_cancelled_and_resumed_job_is_queued_not_preempted(
    written: Written, slurm: FakeSlurm
) -> None:
    slurm.says("squeue", squeue_line("CANCELLED", ago=99), squeue_line("PENDING", ago=9, id="9"))
    written.submitted("7", "9").attempt(slurm="7").ended(75, SAVED.format(by="SIGTERM"))
    assert written.status().state == "queued"


def test_a_chain_reports_how_its_predecessor_ended(written: Written, slurm: FakeSlurm) -> None:
    written.submitted("7").succeeded("8").attempt(slurm="7").ended(75, SAVED.format(by="SIGTERM"))
    slurm.says("squeue", squeue_line("NODE_FAIL", ago=99), squeue_line("PENDING", ago=98, id="8"))
    status = written.status()
    assert status.state == "queued"
    assert "attempt 1, NODE_FAIL: stopped at step 8" in status.detail
    slurm.says("squeue", squeue_line("FAILED", ago=99), squeue_line("PENDING", ago=98, id="8"))
    assert written.decided("again: preempted, exit code 75").status().state == "preempted"


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


def test_the_arguments_of_a_chain_are_those_of_its_first_job_without_a_warning(
    written: Written, caplog: pytest.LogCaptureFixture
) -> None:
    job = written.submitted("7").succeeded("8", "9").job
    assert submissions.argv(job) == ["train"]
    assert submissions.directory(job) == Path("/")
    assert caplog.text == ""


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
