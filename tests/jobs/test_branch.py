"""Branches: a child trains what a run of its length would have, whatever becomes of its parent."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.running import in_this_process

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ConfigError, DamagedError, InputError, Preempted
from dtt.base.files import sha256_file
from dtt.checkpoint import store
from dtt.jobs import branch
from dtt.jobs import listing as job_listing
from dtt.track import jsonl
from dtt.train import run as train

Settings = Callable[..., list[str]]
PARENT, CHILD, WHOLE = JobDir(Path("jobs/t")), JobDir(Path("jobs/child")), JobDir(Path("jobs/w"))


def run(*arguments: str, branch_of: str | None = None) -> None:
    """Train in this process."""
    train.run(None, arguments, [], None, branch_of)


@pytest.fixture(scope="module")
def settings(tiny: Settings) -> list[str]:
    """A job of 20 steps, the last two of which decay."""
    return tiny(
        train__steps=20, train__eval_every=3, checkpoint__every=8, checkpoint__keep_last=9,
        schedule__decay=2, schedule__warmup="10%", model__dropout=0.1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trunk(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a `jobs/` with that job."""
    folder = tmp_path_factory.mktemp("trunk")
    with in_this_process(folder):
        run(*settings)
    return folder


@pytest.fixture(autouse=True)
def _here(trunk: Path, tmp_path: Path) -> Iterator[None]:
    """Each test has a copy of it."""
    shutil.copytree(trunk / "jobs", tmp_path / "jobs")
    with in_this_process(tmp_path):
        yield


def records(of: JobDir) -> list[dict[str, Any]]:
    return [r for r in jsonl.read(of.metrics) if r["kind"] in ("train", "eval", "sample")]


def test_an_interrupted_branch_equals_a_run_of_its_length_without_its_parent(
    settings: list[str],
) -> None:
    run(*settings, "name=w", "train.steps=14", "schedule.decay=6", "schedule.warmup=2")
    started = sha256_file(PARENT.checkpoints / "step-000008/MANIFEST.json")
    CHILD.stop.parent.mkdir(parents=True)
    CHILD.stop.touch()
    with pytest.raises(Preempted, match="stopped at step 8 of 14"):
        run("schedule.decay=6", "name=child", branch_of="jobs/t@8")
    shutil.rmtree(PARENT.root)
    run("jobs/child")
    for file in ("model-00000.safetensors", "state-00000.safetensors"):
        one, other = (of.checkpoints / "step-000014" / file for of in (CHILD, WHOLE))
        assert one.read_bytes() == other.read_bytes(), file
    assert records(CHILD) == records(WHOLE)
    reported = CHILD.parent_record()
    assert reported == {"job": "../t", "step": 8, "checkpoint_sha256": started}
    assert CHILD.run_id() != WHOLE.run_id()


@pytest.mark.slow
def test_branches_leave_the_parent_unchanged_and_status_names_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = [sha256_file(path) for path in sorted(PARENT.checkpoints.rglob("*.*"))]
    run("schedule.decay=20%", branch_of="jobs/t@8")
    run("schedule.decay=2", "schedule.shape=linear", "train.steps=12", branch_of="jobs/t@8")
    ends = [store.steps(JobDir(Path(f"jobs/t-branch-8-{n}")).checkpoints)[-1] for n in (10, 12)]
    assert ends == [10, 12]
    assert [sha256_file(path) for path in sorted(PARENT.checkpoints.rglob("*.*"))] == before
    shutil.rmtree(PARENT.checkpoints / "step-000008")
    run("schedule.decay=20%", branch_of="jobs/t@8")  # is done, and says so
    capsys.readouterr()
    job_listing.status(Path("jobs/t-branch-8-10"), as_json=True)
    assert json.loads(capsys.readouterr().out)["parent"]["step"] == 8


def test_invalid_branches_are_refused_and_create_nothing() -> None:
    for of, arguments, why in [
        ("jobs/t@8", ["optim.lr=1"], "different values of: optim.lr"),
        ("jobs/t@8", ["train.seq_len=16"], "different values of: train.seq_len"),
        ("jobs/t@20", ["schedule.decay=5"], "rate of jobs/t decays after step 18, before the b"),
        ("jobs/t@8", ["train.steps=10", "schedule.decay=4"], "rate of the branch decays after s"),
        ("jobs/t@8", ["schedule.type=cosine"], "rate of the branch decays after step 2, before"),
        ("jobs/t@8", ["schedule.warmup=3"], "schedule.warmup cannot change"),
        ("jobs/t@8", ["schedule.decay=1.0"], "leaves no step before the decay"),
        ("jobs/t@8", ["train.steps=8", "schedule.decay=0"], "ends at step 8, but starts after"),
        ("jobs/t", [], "--branch jobs/t has no step"),
        ("jobs/t@8", ["jobs/t"], "--branch and jobs/t are mutually exclusive"),
    ]:
        with pytest.raises(ConfigError, match=why):
            branch.find(of, None, [*arguments, "name=child"], [])
    with pytest.raises(ConfigError, match="jobs/t exists and is not a branch of jobs/t@8"):
        branch.find("jobs/t@8", None, ["name=t"], [])
    with pytest.raises(InputError, match="does not name a step"):
        branch.find("jobs/t@", None, [], [])
    with pytest.raises(InputError, match="no checkpoint of step 9"):
        branch.find("jobs/t@9", None, [], [])
    with pytest.raises(ConfigError, match="--branch and --from-step 4 are mutually exclusive"):
        branch.find("jobs/t@8", None, ["name=child"], [], from_step=4)
    with pytest.raises(ConfigError, match="--branch and jobs/t are mutually exclusive"):
        run("jobs/t", branch_of="jobs/t@8")
    assert PARENT.attempt() == 1
    assert not CHILD.root.exists()


@pytest.mark.slow
def test_the_decay_of_a_run_that_ends_with_its_data_limits_branches(settings: list[str]) -> None:
    ends = ["data.on_exhausted=stop", "train.global_batch_tokens=2048", "checkpoint.every=2"]
    run(*settings, *ends, "name=e", "train.steps=1000", "schedule.decay=4")
    last = store.steps(JobDir(Path("jobs/e")).checkpoints)[-1]
    assert 7 < last < 20
    begin = last - 4
    inside, before = begin + 2 - begin % 2, begin - begin % 2
    with pytest.raises(ConfigError, match=f"rate of jobs/e decays after step {begin}, before"):
        branch.find(f"jobs/e@{inside}", None, ["name=child"], [])
    with pytest.raises(ConfigError, match=rf"the branch decays after step \d+, before .* {before}"):
        run("schedule.decay=70%", "name=child", branch_of=f"jobs/e@{before}")
    assert store.steps(CHILD.checkpoints) == []


def test_a_branch_may_set_a_budget_and_inline_sections() -> None:
    resolved, _, _ = branch.find(
        "jobs/t@8", None, ["schedule={decay: 3}", "train={budget: 1h}", "name=child"], []
    )
    assert (resolved.config.schedule.warmup.written, resolved.config.train.budget) == (2, "1h")
    resolved, _, _ = branch.find("jobs/t@8", None, ["train={steps: 15}", "schedule.decay=2"], [])
    assert resolved.config.train.steps == 15


def test_a_branch_of_a_trial_does_not_belong_to_its_sweep() -> None:
    trial = JobDir(Path("jobs/sweep/a"))
    shutil.copytree(PARENT.root, trial.root)
    config = trial.config.read_text()
    trial.config.write_text(config.replace("name: t", "name: sweep/a", 1))
    _, child, _ = branch.find("jobs/sweep/a@8", None, [], [])
    assert child.root == Path("jobs/sweep-a-branch-8-10")


def test_a_branch_does_not_need_the_init_weights_of_its_parent() -> None:
    text = PARENT.config.read_text()
    gone = re.sub(r"(?m)^( *from:) null", r"\1 jobs/gone", text, count=1)
    assert gone != text
    PARENT.config.write_text(gone)
    run("name=child", "schedule.decay=2", branch_of="jobs/t@16")
    assert CHILD.newest_checkpoint_name() == "step-000018"


def test_a_damaged_checkpoint_creates_no_branch() -> None:
    weights = PARENT.checkpoints / "step-000008/model-00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    _, child, started = branch.find("jobs/t@8", None, ["name=child"], [])
    with pytest.raises(DamagedError, match=r"the content of model-00000\.safetensors has ch"):
        started.create_job(child)
    assert store.steps(child.checkpoints) == []
