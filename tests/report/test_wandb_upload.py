"""`dtt wandb` with the real client: the history on the server equals metrics.jsonl, row by row."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.loopback_wandb import KEY, LoopbackWandb
from support.running import Dtt

from dtt.artifacts.jobdir import JobDir
from dtt.track.jsonl import JsonlTracker
from dtt.track.wandb import history_row

pytest.importorskip("wandb")

SLURM_JWT = "eyJhbGciOiJIUzI1NiJ9.secret"


@pytest.fixture
def server() -> Iterator[LoopbackWandb]:
    with LoopbackWandb() as server:
        yield server


@pytest.fixture
def job(dtt: Dtt) -> JobDir:
    return make_job(dtt, "one")


def make_job(dtt: Dtt, name: str, *track: dict[str, Any]) -> JobDir:
    """A job with the run id of its name that has logged 20 steps."""
    job = JobDir(dtt.folder / "jobs" / name)
    job.root.mkdir(parents=True)
    job.config.write_text(yaml.safe_dump({"name": name, "seed": 7, "track": list(track)}))
    (job.root / "run_id").write_text(f"id-{name}\n")
    train(job, None, 20)
    return job


def train(job: JobDir, resume_step: int | None, last: int) -> None:
    """Log the records of an attempt, and drop those after `resume_step`, as training does."""
    tracker = JsonlTracker(job.metrics, resume_step)
    first = (resume_step or 0) + 1
    tracker.log({"kind": "start", "step": first, "seconds": {"import": 1.5, "data": None}})
    for step in range(first, last + 1):
        loss = None if step == 7 else 9.0 / step + first
        tracker.log({"kind": "train", "step": step, "loss": loss, "tokens": 10**12 + step})
        if step % 5 == 0:
            tracker.log({"kind": "eval", "step": step, "loss": 1 / 3, "losses": {"a.b": step}})
            tracker.log({"kind": "task", "step": step, "task": "arc", "acc": 0.1, "gold": True})
            tracker.log({"kind": "sample", "step": step, "text": "line\n\0é “x”"})
    tracker.close()


def upload(dtt: Dtt, url: str, *arguments: object, expect: int = 0, **env: str) -> Any:
    """Run `dtt wandb` in a process of its own."""
    dtt.folder.joinpath("home").mkdir(exist_ok=True)
    known = {"WANDB_BASE_URL": url, "WANDB_API_KEY": KEY, "HOME": str(dtt.folder / "home")}
    return dtt("wandb", *arguments, expect=expect, **(known | {"SLURM_JWT": SLURM_JWT} | env))


def records(job: JobDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in job.metrics.read_text().splitlines()]


def assert_equal(server: LoopbackWandb, path: str, job: JobDir) -> None:
    """The history of a run has one row per record, in order, with all numbers and the time."""
    rows, expected = server.runs[path].history, records(job)
    assert [row["_step"] for row in rows] == list(range(len(expected)))
    for row, record in zip(rows, expected, strict=True):
        own = {name: value for name, value in row.items() if name not in ("_step", "_runtime")}
        assert own == history_row(record)
        assert own["_timestamp"] == record["time"]


def test_rows_have_all_numbers_the_time_and_the_text_of_samples() -> None:
    task = {"kind": "task", "step": 5, "task": "arc", "acc": 0.5, "n": {"x": 1, "y": None}}
    assert history_row(task | {"time": 12.5}) == {
        "step": 5, "task/arc/acc": 0.5, "task/arc/n/x": 1, "_timestamp": 12.5,
    }  # fmt: skip
    sample = {"kind": "sample", "step": 5, "text": "a\0b", "time": "today"}
    assert history_row(sample) == {"step": 5, "sample/text": "a\ufffdb"}


def test_the_history_equals_the_records_also_after_more_uploads(
    dtt: Dtt, job: JobDir, server: LoopbackWandb
) -> None:
    first = upload(dtt, server.url, "jobs/one")
    run = server.runs["me/dtt/id-one"]
    url = f"{server.url}/me/dtt/runs/id-one"
    assert f"uploaded 33 records of jobs/one: {url}\n" in first.stderr
    assert first.stdout == ""
    assert_equal(server, "me/dtt/id-one", job)
    assert (run.name, run.group, run.opened, run.finished) == ("one", "one", 1, 1)
    assert run.config["seed"]["value"] == 7
    axes = [metric for metric in run.config["_wandb"]["value"]["m"] if metric.get("2") == "train/*"]
    assert axes, "metrics are plotted over the step"

    again = upload(dtt, server.url, "jobs/one")
    assert f"jobs/one is up to date, 33 records: {url}" in again.stderr
    assert (run.opened, len(run.history)) == (1, 33)

    train(job, 20, 30)
    more = upload(dtt, server.url, "jobs/one", "--json")
    [result] = json.loads(more.stdout)
    assert result == {
        "job": "jobs/one", "entity": "me", "project": "dtt", "id": "id-one", "url": url,
        "rows": 50, "sent": 17, "replaced": False,
    }  # fmt: skip
    assert_equal(server, "me/dtt/id-one", job)
    assert list(server.runs) == ["me/dtt/id-one"]
    assert not (job.root / "wandb").exists()
    arrived = "".join(server.bodies)
    for private in (SLURM_JWT, str(dtt.folder), socket.gethostname()):
        assert private not in arrived


@pytest.mark.slow
def test_a_history_that_a_resumed_job_dropped_is_replaced(
    dtt: Dtt, job: JobDir, server: LoopbackWandb
) -> None:
    upload(dtt, server.url, "jobs/one")
    train(job, 10, 12)  # fewer records than before
    replaced = upload(dtt, server.url, "jobs/one").stderr
    assert "uploaded 20 records of jobs/one to a new run, which replaces the old one: " in replaced
    assert list(server.runs) == ["me/dtt/id-one-2"]
    assert_equal(server, "me/dtt/id-one-2", job)
    train(job, 12, 30)
    upload(dtt, server.url, "jobs/one")
    assert list(server.runs) == ["me/dtt/id-one-2"]
    assert_equal(server, "me/dtt/id-one-2", job)

    train(job, 25, 40)
    server.refuses_after = 12
    assert "W&B has 12 of " in upload(dtt, server.url, "jobs/one", expect=78).stderr
    assert set(server.runs) == {"me/dtt/id-one-2", "me/dtt/id-one-3"}
    server.refuses_after = None
    upload(dtt, server.url, "jobs/one")
    assert list(server.runs) == ["me/dtt/id-one-3"]
    assert_equal(server, "me/dtt/id-one-3", job)
    assert server.deleted == ["me/dtt/id-one", "me/dtt/id-one-2"]
    assert "is up to date" in upload(dtt, server.url, "jobs/one").stderr


@pytest.mark.slow
def test_several_jobs_go_to_any_project_and_failures_do_not_stop_the_others(
    dtt: Dtt, job: JobDir, server: LoopbackWandb
) -> None:
    other = make_job(dtt, "other", {"type": "wandb", "project": "p", "entity": "team"})
    empty = make_job(dtt, "empty")
    empty.metrics.unlink()
    done = upload(
        dtt, server.url, "jobs/empty", "jobs/one", "jobs/none", "jobs/other", "--json", expect=66
    )
    assert done.stderr.count("jobs/empty has no metrics") == 1
    assert done.stderr.count("jobs/none is not a job directory") == 1
    results = json.loads(done.stdout)
    assert [Path(result["job"]).name for result in results] == ["empty", "one", "none", "other"]
    assert ["error" in result for result in results] == [True, False, True, False]
    assert_equal(server, "me/dtt/id-one", job)
    assert_equal(server, "team/p/id-other", other)

    upload(dtt, server.url, "jobs/one", "jobs/other", "--project", "all", "--entity", "us")
    assert_equal(server, "us/all/id-one", job)
    assert_equal(server, "us/all/id-other", other)
    assert len(server.runs) == 4


@pytest.mark.slow
def test_a_job_without_a_run_id_keeps_its_run_wherever_it_lies_and_if_it_cannot_be_written(
    dtt: Dtt, job: JobDir, server: LoopbackWandb
) -> None:
    (job.root / "run_id").unlink()
    (job.root / "run_id").mkdir()  # cannot be written, also by root
    upload(dtt, server.url, "jobs/one")
    [path] = server.runs
    assert_equal(server, path, job)
    (job.root / "run_id").rmdir()
    job.root.rename(dtt.folder / "moved")
    assert "is up to date" in upload(dtt, server.url, "moved").stderr
    assert JobDir(dtt.folder / "moved").run_id() == Path(path).name


LIVE = """
import json, sys
from pathlib import Path
from dtt.config.train import WandbConfig
from dtt.track.wandb import WandbTracker
folder = Path(sys.argv[1])
tracker = WandbTracker(WandbConfig(), "one", "id-one", folder, {"seed": 7})
for line in (folder / "metrics.jsonl").open():
    record = json.loads(line)
    del record["time"]
    tracker.log(record)
tracker.close()
"""


@pytest.mark.slow
def test_the_run_of_the_tracker_is_continued(
    dtt: Dtt, server: LoopbackWandb, tmp_path: Path
) -> None:
    job = make_job(dtt, "one", {"type": "wandb"})
    env = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY, "WANDB_MODE": "online"}
    live = dtt.start_python("-c", LIVE, str(job.root), HOME=str(tmp_path), **env)
    assert Dtt.wait(live).returncode == 0
    run = server.runs["me/dtt/id-one"]
    assert len(run.history) == 33
    for row, record in zip(run.history, records(job), strict=True):
        row["_timestamp"] = record["time"]  # the test logged long after
    run.summary["_timestamp"] = records(job)[-1]["time"] + 0.01
    train(job, 20, 22)
    assert "uploaded 3 of 36 records" in upload(dtt, server.url, "jobs/one").stderr
    assert_equal(server, "me/dtt/id-one", job)
    assert list(server.runs) == ["me/dtt/id-one"]

    train(job, 10, 12)
    refused = upload(dtt, server.url, "jobs/one", expect=2).stderr
    assert "the history of me/dtt/id-one is not the beginning of the job's metrics" in refused
    assert list(server.runs) == ["me/dtt/id-one"]
    upload(dtt, server.url, "jobs/one", "--project", "copy")
    assert_equal(server, "me/copy/id-one", job)


def test_a_running_job_that_is_online_is_not_written_to_by_two(
    dtt: Dtt, server: LoopbackWandb
) -> None:
    job = make_job(dtt, "one", {"type": "wandb"})
    job.begin_attempt()
    now = time.time()
    beat = {
        "time": now, "progress": now, "attempt": 1, "phase": "train", "step": 20, "steps": 99,
        "seconds_per_step": 0.5, "world_size": 1, "node": "n1", "pid": 1,
    }  # fmt: skip
    job.heartbeat.write_text(json.dumps(beat))
    (job.root / "wandb/run-20260102_000000-id-one").mkdir(parents=True)
    refused = upload(dtt, server.url, "jobs/one", expect=2)
    assert "jobs/one is running and sends its metrics to me/dtt" in refused.stderr
    upload(dtt, server.url, "jobs/one", "--project", "copy")
    assert_equal(server, "me/copy/id-one", job)
    (job.root / "wandb/offline-run-20260103_000000-id-one").mkdir()  # a later attempt
    upload(dtt, server.url, "jobs/one")
    assert_equal(server, "me/dtt/id-one", job)


@pytest.mark.slow
def test_rows_that_the_server_refuses_are_an_error_and_the_next_upload_completes_them(
    dtt: Dtt, job: JobDir, server: LoopbackWandb
) -> None:
    server.refuses_after = 12
    lost = upload(dtt, server.url, "jobs/one", expect=78)
    assert "the upload is incomplete: W&B has 12 of 33 rows" in lost.stderr
    server.refuses_after = None
    upload(dtt, server.url, "jobs/one")
    assert_equal(server, "me/dtt/id-one", job)


@pytest.mark.slow
def test_a_connection_that_is_lost_is_an_error_and_the_next_upload_completes_it(
    dtt: Dtt, job: JobDir, server: LoopbackWandb
) -> None:
    server.hangs_up_after = 12
    lost = upload(dtt, server.url, "jobs/one", expect=78)
    assert server.url in lost.stderr
    assert 0 < len(server.runs["me/dtt/id-one"].history) <= 12
    server.hangs_up_after = None
    server.gone.clear()
    upload(dtt, server.url, "jobs/one")
    assert_equal(server, "me/dtt/id-one", job)


@pytest.mark.slow
def test_a_server_that_does_not_listen_and_a_missing_key_are_errors(
    dtt: Dtt, job: JobDir, server: LoopbackWandb
) -> None:
    down = upload(dtt, "http://127.0.0.1:9", "jobs/one", expect=78).stderr
    assert "the W&B server did not respond within 5 s" in down
    assert "http://127.0.0.1:9" in down
    keyless = upload(dtt, server.url, "jobs/one", expect=78, WANDB_API_KEY="").stderr
    assert "no API key for Weights & Biases" in keyless
    assert "wandb login" in keyless
    bad = upload(dtt, server.url, "jobs/one", expect=78, WANDB_API_KEY="short").stderr
    assert "refused" in bad
    assert server.runs == {}
    assert not (job.root / "wandb").exists()


@pytest.mark.slow
def test_a_server_that_never_answers_is_an_error(
    dtt: Dtt, job: JobDir, server: LoopbackWandb
) -> None:
    server.silent.set()
    assert "did not respond" in upload(dtt, server.url, "jobs/one", expect=78).stderr
