"""`dtt eval JOB --watch`: every checkpoint is evaluated once, whatever happens meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml
from support.loopback_wandb import KEY, LoopbackWandb
from support.running import Dtt, wait_until
from support.tiny_job import write_checkpoint, write_job

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import DamagedError, DttError, EnvironmentUnfit, ExitCode
from dtt.base.files import exclusive
from dtt.checkpoint import retention, store
from dtt.config.train import CheckpointConfig
from dtt.evaluate import watch as eval_watch
from dtt.evaluate.evaluation import Evaluation
from dtt.evaluate.watch import DONE, FAILED, GONE, RETRIES, Watch
from dtt.jobs import job_state
from dtt.jobs.job_files import JobFiles
from dtt.jobs.job_state import State, Status
from dtt.jobs.slurm.squeue import SlurmJob

QUESTIONS = 6


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    """A job that has ended, with checkpoints of steps 5 and 10, and a task."""
    job = JobDir(write_job(tmp_path))
    rows = [{"text": f"{i} plus one is", "a": f"{i + 1}", "b": "blue"} for i in range(QUESTIONS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sums.yaml").write_text(
        "type: multiple_choice\ndata: {file: rows.jsonl}\nprompt: '{text}'\n"
        "choices: ['{a}', '{b}']\ngold: 0\n"
    )
    end(job)
    return job


def end(job: JobDir) -> None:
    job.end_attempt(ExitCode.DONE, "done", 0, attempt=job.begin_attempt())


def watch(dtt: Dtt, *options: object, expect: int = 0) -> subprocess.CompletedProcess[str]:
    return dtt("eval", "jobs/tiny", "--watch", "--tasks", "sums.yaml", *options, expect=expect)


def sealed(job: JobDir) -> dict[str, int]:
    """Return the number of complete result files of each folder in `evals`."""
    files = job.evals.glob("*/sums-*.jsonl")
    return Counter(f.parent.name for f in files if '"result"' in f.read_text())


def links(job: JobDir) -> list[Path]:
    return list(job.evals.glob("*/checkpoint"))


def test_each_checkpoint_of_an_ended_job_is_evaluated_once(dtt: Dtt, job: JobDir) -> None:
    first = watch(dtt, "--json")
    assert [json.loads(line)["step"] for line in first.stdout.splitlines()] == [5, 10]
    assert "2 done" in first.stderr
    assert sealed(job) == {"step-000005": 1, "step-000010": 1}
    assert links(job) == []
    files = {path: path.stat().st_mtime_ns for path in job.evals.glob("*/*.jsonl")}
    assert watch(dtt, "--json").stdout == ""
    assert files == {path: path.stat().st_mtime_ns for path in job.evals.glob("*/*.jsonl")}


def test_what_appears_and_is_deleted_while_another_is_evaluated_is_not_lost(
    job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eval_watch, "SECONDS_BETWEEN_SCANS", 0.01)
    found = []

    def evaluate(step: int, checkpoint: Path) -> None:
        store.verify(checkpoint)
        found.append(step)
        if step == 5:
            for new in range(15, 40, 5):
                write_checkpoint(job.root, new)
                while new not in watch.waiting:
                    time.sleep(0.001)
                retention.prune(job.checkpoints, CheckpointConfig(keep_last=1))

    watch = Scripted(job, evaluate)
    with watch.protecting():
        watch.run()
    assert store.steps(job.checkpoints) == [35]
    assert found == [*range(5, 40, 5)]
    assert watch.ended == dict.fromkeys(found, DONE)
    assert links(job) == []


def test_a_job_has_one_watch_and_the_next_one_continues(dtt: Dtt, job: JobDir) -> None:
    with exclusive(job.evals, "a watch", name=".watch.lock"):
        assert "jobs/tiny/evals is in use" in watch(dtt, expect=78).stderr
    Scripted(job).protect(5)
    shutil.rmtree(store.folder_of(job.checkpoints, 5))
    watch(dtt)
    assert sealed(job) == {"step-000005": 1, "step-000010": 1}
    assert links(job) == []


def test_the_stages_of_a_job_that_have_tasks_are_watched_in_turn(dtt: Dtt, job: JobDir) -> None:
    folder, names = dtt.folder / "jobs/staged", ["base", "middle", "last"]
    record = {"stages": names, "data_key": None, "predecessor": None}
    config = yaml.safe_load(job.config.read_text())
    for name, tasks in zip(names, (["sums.yaml"], [], ["sums.yaml"]), strict=True):
        shutil.copytree(job.root, folder / name)
        config |= {"name": f"staged/{name}", "eval": {"tasks": tasks}}
        (folder / name / "config.yaml").write_text(yaml.safe_dump(config))
        (folder / name / "stage.json").write_text(json.dumps(record))
    shutil.rmtree(store.folder_of(JobDir(folder / "last").checkpoints, 10))
    weights = store.folder_of(JobDir(folder / "base").checkpoints, 5) / store.rank_file("model", 0)
    weights.write_bytes(b"")

    # The damage of one stage is reported after the others are evaluated.
    said = dtt("eval", "jobs/staged", "--watch", "--json", expect=65)
    assert "1 checkpoints of jobs/staged/base could not be evaluated: step 5" in said.stderr
    assert f"{weights.name} has 0 bytes" in said.stderr
    assert [json.loads(line)["step"] for line in said.stdout.splitlines()] == [10, 5]
    assert sealed(JobDir(folder / "base")) == {"step-000010": 1}
    assert sealed(JobDir(folder / "last")) == {"step-000005": 1}
    assert not JobDir(folder / "middle").evals.exists()


def test_a_checkpoint_that_was_deleted_too_early_is_named(dtt: Dtt, job: JobDir) -> None:
    """But not one that was deleted after its evaluation."""
    saves = [{"kind": "save", "step": step} for step in (3, 5, 10)]
    job.metrics.write_text("".join(json.dumps(record) + "\n" for record in saves))
    for _ in range(2):
        done = watch(dtt)
        assert "step 3 was deleted before it could be evaluated" in done.stderr
        assert "2 done, 1 gone" in done.stderr
        shutil.rmtree(store.folder_of(job.checkpoints, 5), ignore_errors=True)


def test_a_stop_request_ends_the_watch_and_the_same_command_continues(
    dtt: Dtt, job: JobDir
) -> None:
    shutil.rmtree(job.root / "attempts")
    process = dtt.start("eval", "jobs/tiny", "--watch", "--tasks", "sums.yaml")
    wait_until(lambda: sealed(job)["step-000010"], process)
    process.terminate()
    stopped = Dtt.wait(process)
    assert stopped.returncode == 75, stopped.stderr
    write_checkpoint(job.root, 15)
    end(job)
    watch(dtt)
    assert sealed(job)["step-000015"] == 1


def test_the_checkpoint_of_a_step_that_was_trained_again_is_evaluated_again(
    dtt: Dtt, job: JobDir
) -> None:
    watch(dtt)
    shutil.rmtree(store.folder_of(job.checkpoints, 10))
    write_checkpoint(job.root, 10, says={1: 2})
    watch(dtt)
    assert sealed(job) == {"step-000005": 1, "step-000010": 2}


@pytest.mark.slow
def test_results_are_a_wandb_run_of_their_own_over_the_number_of_tokens(
    dtt: Dtt, job: JobDir
) -> None:
    """A second watch, which finds all results, sends them again: none can be missing."""
    pytest.importorskip("wandb")
    config = yaml.safe_load(job.config.read_text()) | {"track": [{"type": "wandb"}]}
    job.config.write_text(yaml.safe_dump(config))
    records: list[dict[str, Any]] = [{"kind": "train", "step": 3}]  # incomplete
    records += ({"kind": "train", "step": step, "tokens": 64 * step} for step in (5, 10))
    job.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    path = f"me/dtt/{job.run_id()}-eval"
    with LoopbackWandb() as server:
        env = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY, "WANDB_MODE": "online"}
        for times in (1, 2):
            dtt("eval", "jobs/tiny", "--watch", "--tasks", "sums.yaml", **env)
            assert list(server.runs) == [path]
            run = server.runs[path]
            assert (run.name, run.group, run.finished) == ("tiny-eval", "tiny", times)
            sent = [(h["step"], h["tokens"]) for h in run.history if "task/sums/acc" in h]
            assert sent == [(5, 320), (10, 640)] * times


class Scripted(Watch):
    """A watch in this process; a step is done once `evaluate` has returned for it."""

    def __init__(
        self, job: JobDir, evaluate: Callable[[int, Path], object] = lambda *_: None
    ) -> None:
        super().__init__(job, cast("Evaluation", None), lambda: False)
        self.scripted, self.done = evaluate, set[int]()

    def evaluate(self, step: int, checkpoint: Path) -> None:
        self.scripted(step, checkpoint)
        self.done.add(step)

    def files(self, step: int, weights: str) -> Any:
        return [] if step in self.done else [SimpleNamespace(result=lambda: None)]


def test_how_an_evaluation_ends_follows_from_the_files_and_the_attempts(job: JobDir) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no")

    one = Scripted(job, fail)
    saved, linked = one.saved(5), one.linked(5)
    one.scan()
    one.waiting = {5}
    assert (linked / store.POSITION).samefile(saved / store.POSITION)
    shutil.rmtree(saved)  # a new folder may take its inode
    store.verify(linked)
    for _ in range(RETRIES + 1):
        assert one.ended == {}
        assert one.evaluate_next()
    assert one.ended == {5: FAILED}
    with pytest.raises(DttError, match="step 5") as caught:
        one.report_end()
    assert caught.value.exit_code == ExitCode.BUG
    # Another watch may succeed, as long as there are links.
    again = Scripted(job)
    with again.protecting():
        assert 5 in again.waiting
        shutil.rmtree(linked)
        assert again.evaluate_next()
    assert again.ended == {5: GONE}
    write_checkpoint(job.root, 5)  # training has started again at an earlier step
    one.scan()
    one.scripted = lambda *_: None
    assert one.evaluate_next()
    one.report_end()
    assert one.ended == {5: DONE}


def test_a_checkpoint_that_is_deleted_while_it_is_linked_leaves_no_empty_folder(
    job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Scripted(job)
    monkeypatch.setattr(Path, "is_file", lambda _: False)  # as after the deletion
    one.protect(5)
    assert not one.linked(5).exists()


def test_a_step_whose_result_file_is_in_use_is_not_evaluated_now(job: JobDir) -> None:
    tried = []

    def evaluate(step: int, checkpoint: Path) -> None:
        tried.append(step)
        with exclusive(job.evals, "a test", name="x"), exclusive(job.evals, "a test", name="x"):
            pytest.fail("locked twice")

    watch = Scripted(job, evaluate)
    watch.scan()
    assert not watch.evaluate_next()
    assert tried == [5, 10]
    assert sorted(watch.waiting) == [5, 10]
    assert watch.failures == {}


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (DamagedError("truncated"), False),
    ],
)
def test_an_error_of_the_gpu_is_recorded_once_and_ends_the_watch(
    job: JobDir, monkeypatch: pytest.MonkeyPatch, error: Exception, ends: bool
) -> None:
    def evaluate(step: int, checkpoint: Path) -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    watch = Scripted(job, evaluate)
    watch.scan()
    if ends:
        with pytest.raises(EnvironmentUnfit, match="illegal memory access"):
            watch.evaluate_next()
    else:
        assert watch.evaluate_next()
    assert [*watch.failures] == [5]
    saved = watch.saved(5)  # and training starts again before it: its weights are others
    shutil.copytree(saved, again := saved.with_name("again"))
    shutil.rmtree(saved)
    again.rename(saved)
    watch.scan()
    assert watch.failures == {}


@pytest.mark.parametrize(
    ("state", "slurm_state", "over"),
    [
        (State.LOST, None, True),
        (State.LOST, "RUNNING", False),
        (State.DONE, "RUNNING", True),
        (State.NEW, None, False),
    ],
)
def test_a_job_is_over_unless_it_may_continue(
    job: JobDir, monkeypatch: pytest.MonkeyPatch, state: State, slurm_state: str | None, over: bool
) -> None:
    slurm = None if slurm_state is None else SlurmJob("7", slurm_state, "n1", "", 0.0)
    status = Status(state, "", JobFiles.read(job), slurm, None)
    monkeypatch.setattr(job_state, "examine", lambda _: [status])
    assert Scripted(job).job_over() is over


def test_a_job_of_unknown_state_is_over_after_an_hour_without_a_checkpoint(
    job: JobDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    status = Status(State.UNKNOWN, "squeue failed", JobFiles.read(job), None, "squeue failed")
    monkeypatch.setattr(job_state, "examine", lambda _: [status])
    watch = Scripted(job)
    assert not watch.job_over()
    assert not watch.job_over()
    assert caplog.text.count("squeue failed") == 1
    watch._sign_of_life -= 3601
    assert watch.job_over()
    watch.scan()  # finds checkpoints
    assert not watch.job_over()


@pytest.mark.parametrize(
    "arguments", [["jobs/tiny", "jobs/tiny"], ["jobs/tiny", "--step", "5"], ["jobs/tiny@5"]]
)
def test_arguments_that_make_no_sense_are_refused(
    dtt: Dtt, job: JobDir, arguments: list[str]
) -> None:
    done = dtt("eval", *arguments, "--watch", "--tasks", "sums.yaml", expect=2)
    assert "--watch takes one job, without a step" in done.stderr
    assert f"(got {' '.join(arguments)})" in done.stderr
    assert "dtt eval jobs/" in done.stderr
    assert not job.evals.exists()


def test_copies_replace_hard_links_where_these_are_impossible(
    job: JobDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    one = Scripted(job)
    one.protect(5)
    assert "is copied: hard links are not possible here" in caplog.text
    store.verify(one.linked(5))
