"""`dtt wandb` with the real client: the history on the server equals metrics.jsonl, row by row."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.fake_slurm import write_heartbeat
from support.loopback_wandb import KEY, LoopbackWandb, Run
from support.running import Dtt

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import EnvironmentUnfit
from dtt.report import wandb_upload
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


def variables(dtt: Dtt, url: str) -> dict[str, str]:
    home = dtt.folder / "home"
    home.mkdir(exist_ok=True)
    known = {"WANDB_BASE_URL": url, "WANDB_API_KEY": KEY, "HOME": str(home)}
    return known | {"SLURM_JWT": SLURM_JWT}


def upload(dtt: Dtt, url: str, *arguments: object, expect: int = 0, **env: str) -> Any:
    """Run `dtt wandb` in a process of its own."""
    return dtt("wandb", *arguments, expect=expect, **(variables(dtt, url) | env))


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
    assert f"sent 33 records of jobs/one: {url}\n" in first.stderr
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
        "rows": 50, "sent": 17,
    }  # fmt: skip
    assert_equal(server, "me/dtt/id-one", job)
    assert list(server.runs) == ["me/dtt/id-one"]
    assert not (job.root / "wandb").exists()
    arrived = "".join(server.bodies)
    for private in (SLURM_JWT, str(dtt.folder), socket.gethostname()):
        assert private not in arrived


@pytest.mark.slow
def test_a_history_that_a_resumed_job_dropped_gets_a_run_of_its_own(
    dtt: Dtt, job: JobDir, server: LoopbackWandb
) -> None:
    upload(dtt, server.url, "jobs/one")
    train(job, 10, 12)  # fewer records than before
    upload(dtt, server.url, "jobs/one")
    assert list(server.runs) == ["me/dtt/id-one", "me/dtt/id-one-2"]
    assert_equal(server, "me/dtt/id-one-2", job)
    train(job, 12, 30)
    upload(dtt, server.url, "jobs/one")
    assert_equal(server, "me/dtt/id-one-2", job)

    time.sleep(wandb_upload.LIVE_SECONDS)  # steps 26 to 30 come later than those they replace
    train(job, 25, 40)
    server.refuses_after = 12
    upload(dtt, server.url, "jobs/one")
    assert len(server.runs["me/dtt/id-one-3"].history) == 12
    server.refuses_after = None
    upload(dtt, server.url, "jobs/one")
    assert list(server.runs) == ["me/dtt/id-one", "me/dtt/id-one-2", "me/dtt/id-one-3"]
    assert_equal(server, "me/dtt/id-one-3", job)
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
    assert "sent 3 of 36 records" in upload(dtt, server.url, "jobs/one").stderr
    assert_equal(server, "me/dtt/id-one", job)
    assert list(server.runs) == ["me/dtt/id-one"]

    train(job, 10, 12)
    upload(dtt, server.url, "jobs/one")
    assert list(server.runs) == ["me/dtt/id-one", "me/dtt/id-one-2"]
    assert_equal(server, "me/dtt/id-one-2", job)


SOURCE = """
import sys, wandb
quiet = wandb.Settings(console="off", x_disable_stats=True, x_disable_meta=True)
for id, steps in ("exp", (0, 1, 5, *range(900, 2300), 4001)), ("exp-2", range(3)), ("none", ()):
    with wandb.init(
        entity="old", project="p", id=id, name="a name", group="g", tags=["a", "b"], notes="why",
        config={"seed": 7, "deep": {"x": [1, None]}}, settings=quiet,
    ) as run:
        run.define_metric("tokens", hidden=True)
        run.define_metric("train/*", step_metric="tokens")
        for step in steps:
            row = {"train/loss": 1 / (step + 1), "tokens": 10**12 + step, "_timestamp": 1e9 + step}
            if step % 2:
                row |= {"nan": float("nan"), "inf": float("inf"), "text": "é", "nested": {"a": 1}}
                row |= {"h": wandb.Histogram([1, 2, 3]), "none": None, "yes": True}
            run.log(row, step=step, commit=True)
        run.summary.update({"best": 0.5, "train/loss": 3})
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Three runs of `old/p` as the client wrote them: `exp`, `exp-2`, and one without rows."""
    dtt = Dtt(tmp_path_factory.mktemp("source"))
    with LoopbackWandb() as server:
        env = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY, "WANDB_MODE": "online"}
        made = dtt.start_python("-c", SOURCE, HOME=str(dtt.folder), **env)
        assert Dtt.wait(made).returncode == 0
    return server.runs


@pytest.fixture
def runs(made: dict[str, Run], server: LoopbackWandb) -> LoopbackWandb:
    """A server with these runs, which exist nowhere else."""
    server.runs.update(deepcopy(made))
    return server


def assert_copied(server: LoopbackWandb, source: str, target: str) -> None:
    """Both runs have the same rows, config, axes, summary, names, tags and notes."""
    one, other = server.runs[source], server.runs[target]

    def plain(values: dict[str, Any], *without: str) -> str:
        kept = {name: value for name, value in values.items() if name not in without}
        return (
            json.dumps(kept, sort_keys=True)
            .replace('"NaN"', "NaN")
            .replace('"Infinity"', "Infinity")
        )

    for a, b in zip(one.history, other.history, strict=True):
        assert plain(a, "_runtime") == plain(b, "_runtime")
    assert plain(one.summary, "_runtime", "_wandb") == plain(other.summary, "_runtime", "_wandb")
    assert plain(one.config, "_wandb") == plain(other.config, "_wandb")
    assert one.config["_wandb"]["value"]["m"] == other.config["_wandb"]["value"]["m"]
    for field in ("name", "group", "tags", "notes"):
        assert getattr(one, field) == getattr(other, field)


@pytest.mark.slow
def test_runs_of_the_server_are_copied_completely_and_not_twice(
    dtt: Dtt, runs: LoopbackWandb
) -> None:
    names = ["old/p/exp", "old/p/exp-2", "old/p/none"]
    arguments = ("--from", *names, "--entity", "new", "--project", "q")
    done = upload(dtt, runs.url, *arguments, "--json")
    assert [result["from"] for result in json.loads(done.stdout)] == names
    assert [result["sent"] for result in json.loads(done.stdout)] == [1404, 3, 0]
    for name in names:
        assert_copied(runs, name, name.replace("old/p", "new/q"))

    again = upload(dtt, runs.url, *arguments).stderr
    assert again.count("is up to date") == 3
    assert [runs.runs[f"new/q/{name}"].opened for name in ("exp", "exp-2", "none")] == [1, 1, 1]

    del runs.runs["new/q/exp"].history[1000:]  # as after a lost connection
    runs.runs["new/q/exp-2"].summary.pop("best")
    done = upload(dtt, runs.url, *arguments, "--json")
    assert [result["sent"] for result in json.loads(done.stdout)] == [404, 0, 0]
    for name in names:
        assert_copied(runs, name, name.replace("old/p", "new/q"))


@pytest.mark.slow
def test_a_run_that_cannot_be_copied_does_not_stop_the_others(
    dtt: Dtt, runs: LoopbackWandb
) -> None:
    runs.runs["me/p/exp"] = replace(runs.runs["old/p/exp"], history=[{"_step": 0, "x": 1}])
    done = upload(
        dtt, runs.url, "--from", "old/p/no", "old/p/exp", "old/p", "--from", "me/p/exp",
        "old/p/exp-2", "--json", expect=66,
    )  # fmt: skip
    assert "there is no run old/p/no" in done.stderr
    assert "the history of me/p/exp is not the beginning of that of old/p/exp" in done.stderr
    assert "old/p is not a W&B run" in done.stderr
    assert "me/p/exp is the run to copy" in done.stderr
    assert sum("error" in result for result in json.loads(done.stdout)) == 4
    assert_copied(runs, "old/p/exp-2", "me/p/exp-2")


def test_jobs_are_not_taken_for_runs(dtt: Dtt, job: JobDir, server: LoopbackWandb) -> None:
    mixed = upload(dtt, server.url, "--from", "jobs/one", expect=2).stderr
    assert "jobs/one is a job, and --from copies runs" in mixed
    assert "no job and no --from" in upload(dtt, server.url, expect=2).stderr


@pytest.mark.slow
def test_a_running_job_that_is_online_is_not_written_to_by_two(
    dtt: Dtt, server: LoopbackWandb
) -> None:
    job = make_job(dtt, "one", {"type": "wandb"})
    job.begin_attempt()
    write_heartbeat(job)
    (job.root / "wandb/run-20260102_000000-id-one").mkdir(parents=True)
    refused = upload(dtt, server.url, "jobs/one", expect=2)
    assert "jobs/one is running and sends its metrics to me/dtt" in refused.stderr
    upload(dtt, server.url, "jobs/one", "--project", "copy")
    assert_equal(server, "me/copy/id-one", job)
    (job.root / "wandb/offline-run-20260103_000000-id-one").mkdir()  # a later attempt
    upload(dtt, server.url, "jobs/one")
    assert_equal(server, "me/dtt/id-one", job)


IMPATIENT = """
from dtt.main import main
from dtt.report.wandb_upload import BOUNDS
BOUNDS.update(x_file_stream_retry_max=1, x_graphql_retry_max=1)
main()
"""
"""dtt, whose client tries again once: as often as it does for a user takes 50 s."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "code"),
    [
        ("refuses_after", 0),  # the client hides it
        ("hangs_up_after", 78),
    ],
)
def test_the_next_upload_sends_the_rows_that_did_not_arrive(
    dtt: Dtt, job: JobDir, server: LoopbackWandb, failure: str, code: int
) -> None:
    setattr(server, failure, 12)
    arguments = ("-c", IMPATIENT, "wandb", "jobs/one")
    failed = Dtt.wait(dtt.start_python(*arguments, **variables(dtt, server.url)))
    assert failed.returncode == code, failed.stderr
    assert 0 < len(server.runs["me/dtt/id-one"].history) <= 12
    setattr(server, failure, None)
    server.gone.clear()
    upload(dtt, server.url, "jobs/one")
    assert_equal(server, "me/dtt/id-one", job)
    assert "is up to date, 33 records" in upload(dtt, server.url, "jobs/one").stderr


@pytest.mark.slow
def test_a_server_that_does_not_answer_and_a_missing_key_are_errors(
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
    server.silent.set()
    assert "did not respond" in upload(dtt, server.url, "jobs/one", expect=78).stderr


def test_without_wandb_the_error_names_the_package(
    dtt: Dtt, job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.chdir(dtt.folder)
    with pytest.raises(EnvironmentUnfit, match=r"pip install .wandb>="):
        wandb_upload.upload(["jobs/one"], project=None, entity=None, as_json=False)
