"""A resume is refused if the configuration in the folder is not what the job has trained with."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ConfigError
from dtt.config import explain
from dtt.config.load import resolve
from dtt.train.find_job import find_job


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobDir:
    """A job with a checkpoint, after two attempts."""
    monkeypatch.chdir(tmp_path)
    job = JobDir(Path("jobs/t"))
    text = explain.show(resolve(None, ["name=t", "data.type=synthetic"], env={}))
    for path in (job.trained_config(1), job.trained_config(2), job.config):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (job.checkpoints / "step-000001").mkdir(parents=True)
    return job


def edit(job: JobDir, old: str, new: str) -> None:
    text = job.config.read_text()
    assert text.count(old) == 1
    job.config.write_text(text.replace(old, new))


def test_an_edited_key_that_must_stay_is_refused_by_name(job: JobDir) -> None:
    edit(job, "  clip_norm: 1.0", "  clip_norm: 7.0")
    edit(job, "  log_every: 10", "  log_every: 20")  # may change
    with pytest.raises(ConfigError, match=r"was edited: another train\.clip_norm than") as error:
        find_job(None, ["jobs/t"], ())
    assert "cp jobs/t/attempts/2/config.yaml jobs/t/config.yaml, or use" in str(error.value)
    resolved, _ = find_job(None, ["jobs/t"], ["train.clip_norm"])
    assert (resolved.config.train.clip_norm, resolved.config.train.log_every) == (7.0, 20)


def test_a_copy_of_a_job_may_have_a_name_of_its_own(job: JobDir) -> None:
    job.root.rename("jobs/copy")
    edit(JobDir(Path("jobs/copy")), "name: t ", "name: copy ")
    assert find_job(None, ["jobs/copy"], ())[0].config.name == "copy"


@pytest.mark.parametrize("text", ["", "# only a comment\n", "{}\n"])
def test_an_empty_configuration_is_refused_by_name(job: JobDir, text: str) -> None:
    job.config.write_text(text)
    for started in (True, False):
        if not started:
            (job.checkpoints / "step-000001").rmdir()
        with pytest.raises(ConfigError, match=r"jobs/t/config\.yaml is empty"):
            find_job(None, ["jobs/t"], ())
