"""`dtt report`: where the page is written, by whom, and what is refused."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from conftest import Settings
from support.report_jobs import write_finished_job, write_interrupted_job, write_sweep
from support.running import Dtt

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ExitCode
from dtt.train import run as train


def data_of(page: Path) -> dict[str, object]:
    text = page.read_text().partition('id="data">')[2].partition("</script>")[0]
    return dict(json.loads(text))


def test_the_page_of_a_job_or_a_sweep_is_in_its_folder_and_others_in_this_one(
    dtt: Dtt, tmp_path: Path
) -> None:
    write_finished_job(tmp_path)
    write_interrupted_job(tmp_path)
    write_sweep(tmp_path)
    for arguments, page in (
        (["jobs/finished"], "jobs/finished/report.html"),
        (["jobs/sweep"], "jobs/sweep/report.html"),
        (["jobs/finished", "jobs/interrupted"], "report.html"),
        (["jobs/finished", "--out", "deep/er/page.html"], "deep/er/page.html"),
    ):
        assert dtt("report", *arguments).stdout == f"{page}\n"
        assert (tmp_path / page).read_text().startswith("<!doctype html>")
    assert len(data_of(tmp_path / "jobs/sweep/report.html")["runs"]) == 8  # type: ignore[arg-type]


def test_the_folder_of_stages_gives_one_page_of_all_stages(dtt: Dtt, tmp_path: Path) -> None:
    for name in ("base", "sft"):
        job = write_finished_job(tmp_path, f"chat-{name}")
        job.rename(tmp_path / "jobs" / name)
    (tmp_path / "jobs/chat").mkdir()
    for name in ("base", "sft"):
        folder = (tmp_path / "jobs" / name).rename(tmp_path / "jobs/chat" / name)
        record = {"stages": ["base", "sft"], "data_key": None, "predecessor": None}
        (folder / "stage.json").write_text(json.dumps(record))
    dtt("report", "jobs/chat")
    runs = data_of(tmp_path / "jobs/chat/report.html")["runs"]
    assert [run["path"] for run in runs] == ["jobs/chat/base", "jobs/chat/sft"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "no job is named"),
        (["jobs/none"], 66, "jobs/none is not a job directory"),
        (["--serve", "--out", "x.html"], 2, "mutually exclusive"),
        (["jobs/finished", "--out", "jobs/finished"], 74, "is a directory"),
        (["jobs/finished", "--out", "jobs/finished/config.yaml/x.html"], 74, "there is a file"),
    ],
)
def test_mistakes_are_refused_with_a_reason(
    arguments: list[str], code: int, message: str, dtt: Dtt, tmp_path: Path
) -> None:
    write_finished_job(tmp_path)
    assert message in dtt("report", *arguments, expect=code).stderr


def test_training_ends_with_a_report_and_names_it(dtt: Dtt, tiny: Settings, tmp_path: Path) -> None:
    done = dtt("train", *tiny(**{"train.steps": 6}))
    assert "report: jobs/t/report.html" in done.stderr
    (run,) = data_of(tmp_path / "jobs/t/report.html")["runs"]  # type: ignore[misc]
    assert run["verdict"]["state"] == "done"
    assert run["step"] == 6
    assert [a["how"] for a in run["clock"]["attempts"]] == ["done"]


def test_a_run_that_fails_gets_a_report_that_says_why(
    dtt: Dtt, tiny: Settings, tmp_path: Path
) -> None:
    dtt("train", *tiny(**{"train.steps": 40, "optim.lr": 1e30}), expect=76)
    (run,) = data_of(tmp_path / "jobs/t/report.html")["runs"]  # type: ignore[misc]
    assert run["verdict"]["state"] == "diverged"


def test_a_report_that_cannot_be_written_does_not_fail_the_run(
    dtt: Dtt, tiny: Settings, tmp_path: Path
) -> None:
    (tmp_path / "jobs/t/report.html").mkdir(parents=True)
    done = dtt("train", *tiny(**{"train.steps": 2}))
    assert "the report could not be written" in done.stderr
    assert "dtt report jobs/t" in done.stderr


def test_under_slurm_only_a_run_that_is_done_writes_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JobDir(write_finished_job(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert not train.under_time_pressure(job)
    job.begin_attempt()
    assert train.under_time_pressure(job)
    job.end_attempt(ExitCode.PREEMPTED, "stopped", 0, attempt=2)
    assert train.under_time_pressure(job)
    monkeypatch.delenv("SLURM_JOB_ID")
    assert not train.under_time_pressure(job)


def test_serve_prints_its_address_and_ends_with_ctrl_c(dtt: Dtt, tmp_path: Path) -> None:
    write_finished_job(tmp_path)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "jobs").rglob("*")}
    process = dtt.start("report", "--serve")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("http://127.0.0.1:")
    process.send_signal(signal.SIGINT)
    done = dtt.wait(process)
    assert done.returncode in (0, ExitCode.INTERRUPTED)
    assert "Traceback" not in done.stderr
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "jobs").rglob("*")} == before
    assert "ssh -L" in done.stderr


def test_a_job_may_be_in_another_folder(tmp_path: Path) -> None:
    job = write_finished_job(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    Dtt(elsewhere)("report", os.path.relpath(job, elsewhere))
    assert (job / "report.html").is_file()
