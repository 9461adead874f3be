"""The jobs that tests of reports use are jobs to dtt itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.hostile_jobs import HOSTILE, write_hostile_job
from support.planted_secrets import ENVIRONMENT, SECRETS, phrase, write_job_with_secrets

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import DataManifest
from dtt.base.secrets import redacted
from dtt.config.load import load_job
from dtt.jobs.job_state import State, examine
from dtt.track import jsonl


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
