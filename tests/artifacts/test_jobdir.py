"""The job directory keeps what explains a job, and no secrets."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest
from support.forked import as_user

from dtt.artifacts.jobdir import PACKAGE, JobDir, git_state, own_slurm_id
from dtt.base.errors import ExitCode
from dtt.base.files import write_atomically

SECRETS = [
    "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "SLURM_JWT", "DTT_HUB_TOKEN",
    "DTT_API_KEY", "TORCH_CREDENTIALS", "NCCL_PASSPHRASE", "MASTER_PASSWORD", "DTT_access_token",
    "SSH_AUTH_SOCK", "SLURM_AUTH_HEADER",
]  # fmt: skip


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    return JobDir(tmp_path / "jobs" / "small")


def test_the_environment_is_kept_without_any_secret(
    job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate(SECRETS):
        monkeypatch.setenv(name, f"s3cr3t-{number}")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("DTT_TRAIN__STEPS", "12")
    job.write_environment()
    text = (job.root / "env.json").read_text()
    assert "s3cr3t" not in text
    record = json.loads(text)
    assert record["environment"]["SLURM_JOB_ID"] == "4711"
    assert record["environment"]["DTT_TRAIN__STEPS"] == "12"
    assert not record["environment"].keys() & set(SECRETS)
    assert record["packages"].keys() >= {"torch", "numpy", "dtt-lm"}
    installed = sorted((one.name, one.version) for one in metadata.distributions())
    assert record["packages"] == dict(installed)
    assert record["nodes"]
    assert record["command"] == sys.argv


@pytest.mark.parametrize(
    ("variables", "id"),
    [({"ENVIRONMENT": "BATCH"}, "31"), ({}, None),
     ({"ENVIRONMENT": "BATCH", "JPY_PARENT_PID": "7"}, None),
     ({"ENVIRONMENT": "BATCH", "SLURM_PTY_PORT": "7"}, None),
     ({"DTT_SUPERVISED": "31"}, "31"), ({"DTT_SUPERVISED": "30"}, None),
     ({"ENVIRONMENT": "BATCH", "SLURM_ARRAY_JOB_ID": "28", "SLURM_ARRAY_TASK_ID": "3"}, "28_3")],
)  # fmt: skip
def test_an_allocation_for_work_by_hand_is_not_the_slurm_job_of_an_attempt(
    variables: dict[str, str], id: str | None, job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.environ", variables | {"SLURM_JOB_ID": "31"})
    assert own_slurm_id() == id
    record = job.attempt_record(job.begin_attempt("launch-1", 4))
    assert record is not None
    assert (record["slurm"], record["launch"], record["ranks"]) == (id, "launch-1", 4)


def test_attempts_are_numbered_from_one(job: JobDir) -> None:
    assert job.attempt() == 0
    for number in range(1, 12):
        assert job.begin_attempt() == job.attempt() == number
    assert job.stop.parent.is_dir()


def test_an_attempt_at_whose_start_the_disk_was_full_began_with_its_folder(job: JobDir) -> None:
    assert job.attempt_record(1) is None
    job.attempt_dir(1).mkdir(parents=True)
    os.utime(job.attempt_dir(1), (5.0, 5.0))
    record = job.attempt_record(1)
    assert record == {"started": 5.0, "slurm": None, "launch": "", "ranks": 1}
    assert job.exit_record(1) is None


def test_a_training_takes_the_attempt_that_the_supervisor_of_its_slurm_job_has_begun(
    job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.environ", {"SLURM_JOB_ID": "31", "DTT_SUPERVISED": "31"})
    begun = {"started": 5.0, "slurm": "31", "launch": "", "ranks": 0, "host": "n1", "saved": 7}
    path = job.attempt_dir(4) / "attempt.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(begun))
    assert job.begin_attempt("a", 2) == 4
    record = job.attempt_record(4)
    assert record is not None
    assert (record["started"], record["saved"], record["ranks"]) == (5.0, 7, 2)
    assert job.begin_attempt("b", 2) == 5, "its ranks have begun"
    job.end_attempt(ExitCode.DONE, "done", rank=0, attempt=4)
    assert {p.name for p in path.parent.iterdir()} == {"attempt.json"}
    path.write_text(json.dumps(begun | {"slurm": "30"}))
    assert job.begin_attempt() == 6, "of another Slurm job"


def test_an_ending_is_recorded_although_the_answer_of_the_file_server_is_lost(
    job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, answers = os.link, []

    def link(source: Path, target: Path) -> None:
        real(source, target)  # the second time it exists
        answers.append(target)
        raise OSError(errno.EIO, "the answer is lost")

    monkeypatch.setattr(os, "link", link)
    job.begin_attempt()
    job.end_attempt(ExitCode.DIVERGED, "the loss is nan", rank=1, attempt=1)
    assert len(answers) == 1
    assert (job.exit_record(1) or {}).get("code") == ExitCode.DIVERGED
    assert {p.name for p in job.attempt_dir(1).iterdir()} == {"attempt.json"}


def test_the_first_ending_of_an_attempt_is_the_cause(job: JobDir) -> None:
    job.begin_attempt()
    job.end_attempt(ExitCode.DIVERGED, "the loss is nan", rank=1, attempt=1)
    job.end_attempt(ExitCode.BUG, "a peer has gone", rank=0, attempt=1)
    job.begin_attempt()
    job.end_attempt(ExitCode.DONE, "done", rank=0, attempt=2)
    endings = [
        json.loads((job.root / "attempts" / n / "attempt.json").read_text()) for n in ("1", "2")
    ]
    assert [(e["code"], e["reason"], e["rank"]) for e in endings] == [
        (76, "the loss is nan", 1), (0, "done", 0),
    ]  # fmt: skip


def test_ranks_that_end_together_leave_one_complete_record(job: JobDir) -> None:
    job.begin_attempt()
    code = (
        "import sys\nfrom pathlib import Path\nfrom dtt.base.errors import ExitCode\n"
        "from dtt.artifacts.jobdir import JobDir\nsys.stdin.readline()\n"
        "job, rank = JobDir(Path(sys.argv[1])), int(sys.argv[2])\n"
        "job.end_attempt(ExitCode.IO, 'disk full', rank, attempt=1)"
    )
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, job.root, str(rank)], stdin=subprocess.PIPE)
        for rank in range(4)
    ]
    for rank in ranks:
        rank.communicate(b"go\n")
        assert rank.returncode == 0
    folder = job.root / "attempts" / "1"
    assert {path.name for path in folder.iterdir()} == {"attempt.json"}
    assert json.loads((folder / "attempt.json").read_text())["reason"] == "disk full"


def test_the_ending_names_the_step_and_the_checkpoint_if_there_are_any(job: JobDir) -> None:
    job.begin_attempt()
    job.end_attempt(ExitCode.USAGE, "a typo", rank=0, attempt=1)
    record = json.loads((job.root / "attempts" / "1" / "attempt.json").read_text())
    assert (record["step"], record["checkpoint"]) == (None, None)
    job.begin_attempt()
    for name in ("step-000900", "step-001000", "step-001000-by-hand", "step-notes"):
        (job.checkpoints / name).mkdir(parents=True)
    lines = [json.dumps({"kind": "train", "step": step}) + "\n" for step in range(1, 1003)]
    job.metrics.write_text("".join(lines) + '{"kind": "train", "st')
    job.end_attempt(ExitCode.PREEMPTED, "SIGTERM", rank=0, attempt=2)
    record = json.loads((job.root / "attempts" / "2" / "attempt.json").read_text())
    assert (record["step"], record["checkpoint"]) == (1002, "step-001000")


def test_the_run_id_is_made_once_and_differs_between_jobs(job: JobDir, tmp_path: Path) -> None:
    first = job.run_id()
    assert JobDir(job.root).run_id() == first
    assert JobDir(tmp_path / "jobs" / "other").run_id() != first


OWNER, TEAMMATE, STRANGER, TEAM = 31_001, 31_002, 31_003, 32_000
"""Ids of users and of a group; none of them needs to exist."""


@pytest.mark.parametrize("is_team", [True, False])
def test_a_teammate_may_ask_a_job_only_in_the_folder_of_a_team(is_team: bool) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become two other users")
    place = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own folders are closed to others
    try:
        place.chmod(0o755)
        job = JobDir(place / "jobs/small")
        job.root.parent.mkdir()
        os.chown(job.root.parent, OWNER, TEAM)
        job.root.parent.chmod(0o2775 if is_team else 0o755)
        assert as_user(job.begin_attempt, OWNER, OWNER, TEAM)
        assert (
            as_user(partial(write_atomically, job.stop, "a"), TEAMMATE, TEAMMATE, TEAM) == is_team
        )
        assert not as_user(partial(write_atomically, job.save, "a"), STRANGER, STRANGER)
        if is_team:
            assert as_user(job.stop.unlink, OWNER, OWNER, TEAM)
            assert job.stop.parent.stat().st_gid == TEAM
        # Nothing else becomes writable.
        assert not as_user((job.root / "attempts/x").mkdir, TEAMMATE, TEAMMATE, TEAM)
        assert as_user(job.begin_attempt, OWNER, OWNER, TEAM)
    finally:
        shutil.rmtree(place)


def test_the_state_of_a_clone_has_changes_of_the_whole_package(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    package = tmp_path / "src/dtt"
    (package / "train").mkdir(parents=True)
    (package / "train/step.py").write_text("rate = 1\n")
    git("init")
    assert git_state(package) is None  # as in the environment of another project
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-m", "first")
    clean = git_state(package)
    assert clean is not None
    assert clean["diff"] == ""
    assert len(clean["commit"]) == 40
    (package / "train/step.py").write_text("rate = 2\n")
    changed = git_state(package)
    assert changed is not None
    assert "+rate = 2" in changed["diff"]
    assert PACKAGE.name == "dtt"
