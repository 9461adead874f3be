"""Training through a real Slurm: limits, preemption, lost nodes; in the end nothing has changed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import fake_slurm
from support.planted_copies import planted
from support.running import TIMEOUT

from dtt.artifacts.jobdir import JobDir
from dtt.jobs.slurm import squeue

pytestmark = pytest.mark.slow

Submit = Callable[..., Any]
Check = Callable[[Any], None]


@contextmanager
def held(pid: int) -> Iterator[None]:
    """Keep a process from running; Slurm sends SIGCONT before SIGTERM, so once does not do."""

    def hold() -> None:
        with suppress(PermissionError):  # on busy cores it would get to run for too long
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -20)
        with suppress(ProcessLookupError):
            while True:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.001)

    holder = threading.Thread(target=hold)
    holder.start()
    yield
    holder.join()


def test_preflight_and_training_on_two_nodes_survive_a_restarted_controller(
    cluster: Any, submit: Submit, assert_as_undisturbed: Check
) -> None:
    job = submit(launch__preflight=True)
    assert job.reported()["state"] in ("queued", "running")
    job.wait_for_step(50)
    reported = job.reported()
    assert (reported["state"], reported["steps"], reported["slurm"]["state"]) == (
        "running",
        320,
        "RUNNING",
    )
    assert reported["slurm"]["id"] == job.id
    assert reported["heartbeat"]["world_size"] == 2
    assert 50 <= reported["step"] <= 320
    cluster.kill("slurmctld")
    cluster.start_what_was_killed()
    reported = job.reported()
    assert (reported["state"], reported["slurm"]["state"]) == ("running", "RUNNING")
    cluster.wait_for_state(job.id, "COMPLETED")
    reported = job.reported()
    assert (reported["state"], reported["step"], reported["checkpoint"]) == (
        "done",
        320,
        "step-000320",
    )
    logs = job.dtt.folder / job.path / "logs"
    assert {path.name.split("-")[-1] for path in logs.glob("train-*")} == {"n1.log", "n2.log"}
    (doctor,) = logs.glob("preflight-*-n1.log")
    assert "processes     2 (torchrun)" in doctor.read_text()
    assert "no problems found" in doctor.read_text()
    assert_as_undisturbed(job)


def test_a_job_with_two_time_limits_equals_an_uninterrupted_one(
    cluster: Any, submit: Submit, assert_as_undisturbed: Check
) -> None:
    job = submit()
    for attempt in (1, 2):
        job.wait_for_step(80 * attempt)
        cluster.ask_to_save(job.id)
        record = job.exit_record(attempt)
        assert record["code"] == 75
        assert "slurm: time limit" in record["reason"]
        assert record["checkpoint"] == f"step-{record['step']:06d}"
        cluster.wait_for_state(job.id, "PENDING", "CONFIGURING")
        reported = job.reported()
        assert reported["state"] == "queued"
        assert "stopped at step" in reported["detail"]
    cluster.wait_for_state(job.id, "COMPLETED")
    assert job.reported()["state"] == "done"
    assert cluster.field(job.id, "Restarts") == "2"
    assert_as_undisturbed(job)


def test_preempted_with_and_without_time_to_save_it_comes_back(
    cluster: Any, submit: Submit, assert_as_undisturbed: Check
) -> None:
    job = submit()

    def preempt() -> dict[str, Any]:
        urgent = cluster.run(
            "sbatch", "--parsable", "-p", "debug", "-N2", "--exclusive", "-o", "/dev/null",
            "--wrap", "sleep 1",
        )  # fmt: skip
        cluster.wait_for_state(urgent, "RUNNING", "COMPLETED")
        reported: dict[str, Any] = job.reported()
        assert reported["slurm"]["state"] == "PENDING"
        assert reported["checkpoint"] is not None
        return reported

    job.wait_for_step(80)
    assert preempt()["state"] == "preempted"
    record = job.exit_record(1)
    assert record["code"] == 75
    assert "SIGTERM" in record["reason"]
    grace = cluster.run("scontrol", "-o", "show", "partition", "batch")
    grace = grace.split("GraceTime=")[1].split()[0]
    cluster.run("scontrol", "update", "partitionname=batch", "gracetime=0")
    try:
        job.wait_for_step(160)
        with held(job.reported()["heartbeat"]["pid"]):  # it cannot save
            preempt()
    finally:
        cluster.run("scontrol", "update", "partitionname=batch", f"gracetime={grace}")
    cluster.wait_for_state(job.id, "COMPLETED")
    # The launcher may have the time to record that its rank was killed, before it is killed itself.
    record_of_second = JobDir(job.dtt.folder / job.path).exit_record(2)
    assert record_of_second is None or record_of_second["code"] == 78
    assert cluster.field(job.id, "Restarts") == "2"
    assert job.reported()["state"] == "done"
    assert_as_undisturbed(job)


def test_a_cancelled_job_saves_and_stays_cancelled_until_plain_sbatch(
    cluster: Any, submit: Submit, assert_as_undisturbed: Check
) -> None:
    job = submit()
    job.wait_for_step(80)
    cluster.run("scancel", job.id)
    record = job.exit_record(1)
    assert record["code"] == 75
    assert record["checkpoint"] == f"step-{record['step']:06d}"
    cluster.wait_for_state(job.id, "CANCELLED")
    assert job.reported()["state"] == "cancelled"
    assert cluster.run("squeue", "-h", "-o", "%A") == ""
    again = subprocess.run(
        ["sbatch", "--parsable", job.path / "slurm.sh"],
        cwd=job.dtt.folder, text=True, capture_output=True, check=True,
    ).stdout.strip()  # fmt: skip
    job.wait_for_step(record["step"] + 1)
    reported = job.reported()
    assert (reported["state"], reported["slurm"]["id"]) == ("running", again)
    cluster.wait_for_state(again, "COMPLETED")
    assert job.reported()["state"] == "done"
    assert_as_undisturbed(job)


@pytest.mark.parametrize(
    ("continuation", "then"),
    [("none", "NODE_FAIL"), ("requeue", "PENDING")],
)
def test_a_lost_node_is_reported_and_the_job_resumes(
    continuation: str, then: str, cluster: Any, submit: Submit, assert_as_undisturbed: Check
) -> None:
    job = submit(launch__continuation=continuation)
    job.wait_for_step(80)
    cluster.kill("slurmd-n2")
    cluster.run("scontrol", "update", "nodename=n2", "state=down", "reason=power")
    cluster.wait_for_state(job.id, then)
    reported = job.reported()
    assert reported["state"] == ("node failed" if continuation == "none" else "queued")
    assert reported["slurm"]["state"] == (then if continuation == "none" else "PENDING")
    assert reported["checkpoint"] is not None
    cluster.start_what_was_killed()
    again = job.id
    if continuation == "none":
        again = job.dtt("job", "resume", job.path).stdout.split()[-1]
    cluster.wait_for_state(again, "COMPLETED")
    assert job.reported()["state"] == "done"
    assert_as_undisturbed(job)


def test_a_second_job_ends_and_a_suspended_job_is_reported(
    cluster: Any, submit: Submit, assert_as_undisturbed: Check
) -> None:
    job = submit()
    job.wait_for_step(40)
    script = job.dtt.folder / job.path / "slurm.sh"
    rival = cluster.run("sbatch", "--parsable", f"--chdir={job.dtt.folder}", str(script))
    cluster.run("scontrol", "suspend", job.id)
    assert job.reported()["state"] == "suspended"
    cluster.wait_for_state(rival, "FAILED")
    assert cluster.field(rival, "ExitCode") == "78:0"
    assert cluster.field(rival, "Restarts") == "0"
    cluster.run("scontrol", "resume", job.id)
    cluster.wait_for_state(job.id, "COMPLETED")
    assert (job.reported()["state"], job.reported()["attempt"]) == ("done", 1)
    assert job.state_in_report() == "done"
    assert_as_undisturbed(job)


def test_a_job_stopped_by_a_user_stays_stopped(cluster: Any, submit: Submit) -> None:
    job = submit(train__steps=100_000)
    job.wait_for_step(20)
    assert "acknowledged at step" in job.dtt("job", "save", job.path).stdout
    assert "acknowledged at step" in job.dtt("job", "stop", job.path).stdout
    cluster.wait_for_state(job.id, "FAILED")  # as Slurm calls an exit code of 75
    reported = job.reported()
    assert reported["state"] == "stopped"
    assert job.state_in_report() == "stopped"
    assert "dtt job stop" in reported["detail"]
    assert "nothing to stop" in job.dtt("job", "stop", job.path).stdout
    assert cluster.run("squeue", "-h", "-o", "%A") == ""
    assert "step" in job.dtt("job", "logs", job.path, "--node", "n1").stdout


def test_a_queued_job_reports_the_reason_and_is_cancelled_on_request(
    cluster: Any, submit: Submit
) -> None:
    job = submit(launch__directives="[--hold]")
    reported = job.reported()
    assert (reported["state"], reported["slurm"]["state"]) == ("queued", "PENDING")
    assert "JobHeldUser" in reported["detail"]
    refused = job.dtt("job", "resume", job.path, expect=2)
    assert "is queued" in refused.stderr
    assert job.id in job.dtt("job", "stop", job.path, expect=2).stderr
    job.dtt("job", "stop", job.path, "-y")
    cluster.wait_for_state(job.id, "CANCELLED")
    assert job.reported()["state"] == "cancelled"


def test_a_job_that_sbatch_could_not_confirm_is_found_in_the_queue(
    cluster: Any, dtt: Any, settings: Callable[..., list[str]], follow: Submit
) -> None:
    """The real sbatch hands it over, and what it says about that gets lost."""
    sbatch = dtt.folder / "bin/sbatch"
    sbatch.parent.mkdir()
    lost = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    sbatch.write_text(
        f'#!/bin/sh\n{shutil.which("sbatch")} "$@" >/dev/null\necho "{lost}" >&2; exit 1\n'
    )
    sbatch.chmod(0o755)
    keys = settings(launch__directives="[--hold]")
    path = f"{sbatch.parent}:{os.environ['PATH']}"
    report = json.loads(dtt("submit", "train", *keys, "-y", "--json", PATH=path).stdout)
    assert cluster.field(report["job_id"], "JobState") == "PENDING"
    job = follow(report["job_dir"], report["job_id"])
    assert job.reported()["state"] == "queued"
    assert "is queued" in dtt("job", "rm", job.path, "-y", expect=2).stderr
    dtt("job", "stop", job.path, "-y")
    assert "deleted" in dtt("job", "rm", job.path, "-y").stdout
    assert list((dtt.folder / "jobs").iterdir()) == []


def test_a_permanent_failure_is_not_retried(cluster: Any, submit: Submit) -> None:
    job = submit(optim__lr=1e30, checkpoint__every=1000)
    cluster.wait_for_state(job.id, "FAILED")
    assert job.exit_record(1)["code"] == 76
    assert job.reported()["state"] == "diverged"
    assert job.state_in_report() == "diverged"
    assert cluster.field(job.id, "Restarts") == "0"
    assert cluster.run("squeue", "-h", "-o", "%A") == ""


def test_after_three_attempts_without_a_checkpoint_it_gives_up(
    cluster: Any, submit: Submit
) -> None:
    job = submit(launch__setup="[exit 3]")
    cluster.wait_for_state(job.id, "FAILED")
    assert cluster.field(job.id, "Restarts") == "2"
    assert job.reported()["state"] == "out of attempts"
    assert "3 consecutive attempts" in job.slurm_log()


def test_a_limit_of_one_trial_of_an_array_leaves_the_others_alone(
    cluster: Any, dtt: Any, settings: Callable[..., list[str]], follow: Submit
) -> None:
    overrides = [key for key in settings(launch__nodes=1) if not key.startswith("name=")]
    sweep = {"base": {}, "overrides": overrides, "parameters": {"seed": [1, 2]}}
    (dtt.folder / "two.json").write_text(json.dumps(sweep))
    dtt("sweep", "submit", "two.json")
    paths = sorted(path.parent for path in (dtt.folder / "jobs/two").glob("*/config.yaml"))
    array = cluster.run("squeue", "-h", "-o", "%F").split()[0]
    first, last = (
        follow(path.relative_to(dtt.folder), f"{array}_{task}") for task, path in enumerate(paths)
    )
    first.wait_for_step(20)
    dtt("job", "stop", first.path)
    assert first.exit_record(1)["code"] == 75
    last.wait_for_step(80)
    cluster.ask_to_save(last.id)
    assert last.exit_record(1)["code"] == 75
    cluster.wait_for_state(last.id, "COMPLETED")
    assert cluster.field(first.id, "Restarts") == "0"
    assert cluster.field(last.id, "Restarts") == "1"
    assert (first.reported()["state"], last.reported()["state"]) == ("stopped", "done")
    assert "dtt sweep retry two" in first.slurm_log()


TOKENIZE = (
    "download.dataset=counting.jsonl", "tokenizer.vocab_size=300",
    "tokenize.validation_fraction=0.1", "tokenize.unit_bytes=8192", "tokenize.out=tokens",
)  # fmt: skip


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no MPI")
def test_tokenize_on_two_nodes_resumes_after_a_limit_with_the_same_bytes(
    cluster: Any, dtt: Any, tokens: Path, follow: Submit
) -> None:
    shutil.copy(tokens.parent / "counting.jsonl", dtt.folder)
    dtt("download", "-d", "counting.jsonl")
    at_first = '[ -z "${SLURM_STEP_ID:-}" ] || [ -e ended ] || { touch began; exec sleep 300; }'
    said = dtt(
        "submit", "tokenize", *TOKENIZE, f"launch.setup={json.dumps([at_first])}",
        "launch.nodes=2", "launch.processes_per_node=2", "launch.mpi=pmi2", "-y", "--json",
    )  # fmt: skip
    facts = json.loads(said.stdout)
    job = follow(facts["job_dir"], facts["job_id"])
    cluster.wait_for_file(dtt.folder / "began")
    (dtt.folder / "ended").touch()
    cluster.ask_to_save(job.id)
    record = job.exit_record(1)
    assert (record["code"], record["reason"]) == (75, "stopped by slurm: time limit")
    cluster.wait_for_state(job.id, "COMPLETED")
    assert job.exit_record(2)["code"] == 0
    made = {p.name: p.read_bytes() for p in (dtt.folder / "tokens").iterdir() if p.is_file()}
    wanted = {p.name: p.read_bytes() for p in tokens.iterdir() if p.is_file()}
    shards = {name for name in wanted if name.endswith((".bin", ".idx"))}
    assert shards
    assert {name: made.get(name) for name in shards} == {name: wanted[name] for name in shards}


def test_plain_srun_tokenizes_on_two_nodes_without_mpi_with_the_same_bytes(
    cluster: Any, dtt: Any, tokens: Path
) -> None:
    """The tasks meet through files in the output folder, of which nothing is left."""
    shutil.copy(tokens.parent / "counting.jsonl", dtt.folder)
    dtt("download", "-d", "counting.jsonl")
    tokenize = [sys.executable, "-m", "dtt.main", "tokenize", *TOKENIZE]
    said = subprocess.run(
        ["srun", "-N2", "-n4", "--mpi=none", *tokenize],
        cwd=dtt.folder, capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    assert said.stdout.count("tokens      tokens") == 1
    made, wanted = (
        {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        for folder in (dtt.folder / "tokens", tokens)
    )
    manifests = [json.loads(files.pop("manifest.json")) for files in (made, wanted)]
    assert made == wanted
    for manifest in manifests:
        del manifest["corpus"], manifest["text"]  # the two corpora lie in different folders
    assert manifests[0] == manifests[1]
    assert not (dtt.folder / "tokens/.units/rendezvous").exists()


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no MPI")
def test_a_selection_has_the_same_bytes_alone_from_plain_srun_and_as_a_job(
    cluster: Any, dtt: Any, follow: Submit
) -> None:
    (dtt.folder / "in").mkdir()
    documents = planted(300)
    for number in range(3):
        table = pa.table({"text": documents[number::3]})
        pq.write_table(table, dtt.folder / f"in/{number}.parquet", row_group_size=20)
    dtt("download", "-d", "in")
    options = ("download.dataset=in", "clean.near.threshold=0.8")

    def made() -> dict[str, bytes]:
        [selection] = (dtt.folder / "data/corpus/in").glob("selection-*")
        files = {path.name: path.read_bytes() for path in selection.iterdir() if path.is_file()}
        shutil.rmtree(selection)
        return files

    dtt("clean", *options)
    alone = made()
    assert any(name.endswith(".removed.parquet") for name in alone)
    said = subprocess.run(
        ["srun", "-N2", "-n4", "--mpi=none", sys.executable, "-m", "dtt.main", "clean", *options],
        cwd=dtt.folder, capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    assert made() == alone
    ranks = ("launch.nodes=2", "launch.processes_per_node=2", "launch.mpi=pmi2", "-y", "--json")
    facts = json.loads(dtt("submit", "clean", *options, *ranks).stdout)
    job = follow(facts["job_dir"], facts["job_id"])
    cluster.wait_for_state(job.id, "COMPLETED")
    assert made() == alone


# ---- what the fakes of the unit tests print is what a real Slurm prints ----------------


def shape(line: str) -> list[str]:
    """Fields that do not differ from job to job; nodes and reason do. A time may not be known."""
    fields = line.split("|")
    return [re.sub(r"^(\d+|N/A)$", "TIME", field) for field in fields[:2] + fields[3:6]]


def printed(argv: tuple[str, ...], job: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"SLURM_TIME_FORMAT": "%s"}
    return subprocess.run([*argv, f"--jobs={job}"], capture_output=True, text=True, env=env)


def test_squeue_prints_the_lines_that_the_fake_prints(cluster: Any, tmp_path: Path) -> None:
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


def test_slurm_reports_unknown_jobs_and_missing_accounting(cluster: Any) -> None:
    said = printed(squeue.SQUEUE, "999999")
    assert (said.returncode, said.stderr.strip()) == (1, fake_slurm.FORGOTTEN)
    assert squeue.ask(["999999"]) == squeue.QueueReply({})
    accounts = printed(squeue.SACCT, "999999")
    assert accounts.stdout == ""
    assert accounts.stderr.strip() in ("", fake_slurm.NO_ACCOUNTING)
