"""The jobs that tests of reports use are jobs to dtt itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.hostile_jobs import HOSTILE, write_hostile_job, write_hostile_sweep
from support.planted_secrets import ENVIRONMENT, SECRETS, phrase, write_job_with_secrets
from support.report_jobs import write_finished_job, write_interrupted_job, write_sweep

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import DataManifest
from dtt.base.errors import ExitCode
from dtt.base.secrets import redacted
from dtt.checkpoint import store
from dtt.config.load import load_job
from dtt.jobs import sweep_results as results
from dtt.jobs import sweep_trials as trials
from dtt.jobs.goodput import goodput
from dtt.jobs.job_state import State, examine
from dtt.track import jsonl


def test_a_finished_job_is_done_and_its_checkpoints_are_verified(tmp_path: Path) -> None:
    job = JobDir(write_finished_job(tmp_path))
    [status] = examine([job])
    assert status.state == State.DONE
    assert load_job(job.root).train.steps == job.last_step() == 400
    assert [store.verify(path).step for path in sorted(job.checkpoints.iterdir())] == [350, 400]
    spent = goodput(job)
    assert spent is not None
    assert (spent.attempts, round(spent.share, 2)) == (1, 0.88)


def test_an_interrupted_job_was_killed_preempted_and_failed_before_it_was_done(
    tmp_path: Path,
) -> None:
    job = JobDir(write_interrupted_job(tmp_path))
    [status] = examine([job])
    assert status.state == State.DONE
    endings = [job.exit_record(number) for number in (1, 2, 3, 4)]
    codes = [ending and ending["code"] for ending in endings]
    assert codes == [None, ExitCode.PREEMPTED, ExitCode.IO, ExitCode.DONE]
    assert endings[1] is not None
    assert (endings[1]["asked_by"], endings[1]["checkpoint"]) == ("SIGTERM", "step-000210")
    assert [r["step"] for r in jsonl.read(job.metrics, "train")] == [*range(1, 401)]
    assert [r["step"] for r in jsonl.read(job.metrics, "start")] == [0, 100, 210, 250]
    assert [r["step"] for r in jsonl.read(job.metrics, "guard")] == [157]
    spent = goodput(job)
    assert spent is not None
    assert spent.attempts == 4
    assert spent.lost["redone"] == pytest.approx(55 * 0.25 * 0.94, abs=0.01)


def test_a_sweep_has_eight_trials_of_which_six_are_done(tmp_path: Path) -> None:
    root = write_sweep(tmp_path)
    sweep = trials.Sweep(root, trials.SweepManifest.read(root))
    assert sweep.manifest.keys == ("optim.lr", "model.n_layers")
    states = [trial.state for trial in results.progress(sweep)]
    assert states == [State.DONE] * 6 + [State.DIVERGED, State.NEW]
    best = results.table(sweep)[0]
    assert best.values["optim.lr"] == pytest.approx(4e-3, rel=0.6)


@pytest.mark.parametrize(
    ("running", "state"), [(False, State.FAILED), (True, State.STOPPING)], ids=["failed", "running"]
)
def test_the_hostile_job_can_be_read_and_each_hostile_text_is_a_sample(
    running: bool, state: State, tmp_path: Path
) -> None:
    job = JobDir(write_hostile_job(tmp_path, running=running))
    [status] = examine([job])
    assert (status.state, len(status.log_tail)) == (state, 0 if running else 5)
    samples = [record["text"] for record in jsonl.read(job.metrics, "sample")]
    assert len(set(HOSTILE)) == 200
    assert set(samples) > set(HOSTILE)
    read = {one.name for one in load_job(job.root).data.sources}
    assert read == {source.name for source in DataManifest.read(job.root).sources}
    assert len(read & set(HOSTILE)) == 6


def test_the_trials_of_the_hostile_sweep_are_done(tmp_path: Path) -> None:
    root = write_hostile_sweep(tmp_path)
    sweep = trials.Sweep(root, trials.SweepManifest.read(root))
    assert [trial.state for trial in results.progress(sweep)] == [State.DONE] * 4


def test_every_planted_secret_is_in_the_job_and_would_be_redacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JobDir(write_job_with_secrets(tmp_path))
    assert examine([job])[0].state == State.FAILED
    assert load_job(job.root).train.steps == 400
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    metrics, reason = job.metrics.read_text("utf-8"), str(job.exit_record(2))
    for name, secret in SECRETS.items():
        assert secret in metrics, name
        assert secret in reason, name
        assert secret not in redacted(phrase(name)), name
