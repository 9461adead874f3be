"""Stages of training as jobs: they train as jobs by hand, and what changed is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from conftest import Settings
from support.running import Dtt, in_this_process, kill_when

from dtt.artifacts.jobdir import JobDir
from dtt.config import explain
from dtt.config.layers import from_arguments
from dtt.config.merging import nested
from dtt.jobs.stages import done
from dtt.track import jsonl
from dtt.train.find_job import find_stages

LAST = {"pretrain": 12, "midtrain": 8, "last": 6}
"""Steps of each stage."""
STAGES = [
    {"name": "pretrain", "optim": {"lr": 1e-3}},
    {"name": "midtrain", "optim": {"lr": 5e-4}, "train": {"steps": 8}, "seed": 1},
    {"name": "last", "optim": {"lr": 1e-4}, "train": {"steps": 6, "seq_len": 64}},
]

SKIP = """
import sys
from dtt.jobs.stages import done
from dtt.train.find_job import find_stages
assert all(done(find_stages("s.yaml", [])))
assert "torch" not in sys.modules
"""
"""A program that finds all stages done, without importing torch."""


@pytest.fixture
def tiny_stages(dtt: Dtt, tiny: Settings) -> str:
    """A configuration of three stages that train for seconds."""
    write_stages(dtt.folder, tiny)
    return "s.yaml"


def write_stages(folder: Path, tiny: Settings) -> None:
    common = nested(from_arguments(tiny(name="s"), explain.key_types()))
    text = yaml.safe_dump(common | {"stages": STAGES}, sort_keys=False)
    (folder / "s.yaml").write_text(text)


def train(dtt: Dtt, config: str, *names: str) -> None:
    for name in names:
        dtt("train", "-c", config, "--stage", name)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory, tiny: Settings) -> Path:
    """A folder in which the first stage is done."""
    dtt = Dtt(tmp_path_factory.mktemp("pretrained"))
    write_stages(dtt.folder, tiny)
    train(dtt, "s.yaml", "pretrain")
    return dtt.folder


@pytest.fixture(scope="module")
def midtrained(tmp_path_factory: pytest.TempPathFactory, pretrained: Path) -> Path:
    """A folder in which the first two stages are done."""
    folder = tmp_path_factory.mktemp("midtrained")
    shutil.copytree(pretrained, folder, dirs_exist_ok=True)
    train(Dtt(folder), "s.yaml", "midtrain")
    return folder


def final_files(folder: Path, job: str, step: int) -> dict[str, bytes]:
    """The tensors of a job's last checkpoint."""
    checkpoint = folder / "jobs" / job / f"checkpoints/step-{step:06d}"
    return {path.name: path.read_bytes() for path in sorted(checkpoint.glob("*.safetensors"))}


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory, tiny: Settings) -> dict[str, bytes]:
    """The result of the same three runs as jobs of their own, each from the one before."""
    dtt = Dtt(tmp_path_factory.mktemp("by_hand"))
    dtt("train", *tiny(name="one", optim__lr=1e-3))
    dtt("train", *tiny(name="two", optim__lr=5e-4, train__steps=8, seed=1), "init.from=jobs/one")
    three = tiny(name="three", optim__lr=1e-4, train__steps=6, train__seq_len=64)
    dtt("train", *three, "init.from=jobs/two@8")
    return final_files(dtt.folder, "three", 6)


def test_stages_train_as_jobs_by_hand_do(
    dtt: Dtt, tiny_stages: str, by_hand: dict[str, bytes]
) -> None:
    train(dtt, tiny_stages, *LAST)
    ours = final_files(dtt.folder, "s/last", 6)
    assert len(ours) == 2
    assert ours == by_hand
    record = JobDir(dtt.folder / "jobs/s/last").stage_record()
    assert record is not None
    assert record["predecessor"]["job"] == "../midtrain"
    assert record["predecessor"]["step"] == 8


def test_a_stage_needs_the_one_before_it(dtt: Dtt, tiny_stages: str) -> None:
    refused = dtt("train", "-c", tiny_stages, "--stage", "midtrain", expect=66)
    assert "the previous stage is not done" in refused.stderr
    assert "--stage pretrain" in refused.stderr
    assert not (dtt.folder / "jobs").exists()


@pytest.mark.slow
def test_the_pipeline_skips_what_is_done_and_refuses_what_changed(
    dtt: Dtt, tiny: Settings, tiny_stages: str
) -> None:
    first = dtt("pipeline", "-c", tiny_stages)
    for number, name in enumerate(LAST, start=1):
        assert f"[{number}/4] train {name}: dtt train -c s.yaml --stage {name}" in first.stderr
    assert "[4/4] export: dtt export jobs/s/last" in first.stderr
    result = final_files(dtt.folder, "s/last", 6)

    again = json.loads(dtt("pipeline", "-c", tiny_stages, "--json").stdout)
    assert [stage["job"] for stage in again["stages"]] == [f"jobs/s/{name}" for name in LAST]
    assert [JobDir(dtt.folder / stage["job"]).attempt() for stage in again["stages"]] == [1, 1, 1]

    found = dtt.wait(dtt.start_python("-c", SKIP))
    assert found.returncode == 0, found.stderr

    changed = dtt("pipeline", "-c", tiny_stages, "stages.midtrain.optim.lr=1e-5", expect=2)
    for words in ("jobs/s/midtrain was started with different values of: optim.lr",
                  "mv jobs/s/midtrain jobs/s/last ELSEWHERE"):  # fmt: skip
        assert words in changed.stderr
    # A warning for a stage that keeps its own value, an error if every stage does.
    none = dtt("pipeline", "-c", tiny_stages, "optim.lr=1e-5", expect=2)
    assert "optim.lr has no effect" in none.stderr
    longer = (tiny_stages, "train.steps=16")
    dtt("train", "-c", *longer, "--stage", "pretrain", "--allow-change", "train.steps")
    refused = dtt("pipeline", "-c", *longer, expect=2)
    for words in ("jobs/s/midtrain was trained from a checkpoint other than jobs/s/pretrain@16",
                  "the checkpoint of step 12", "mv jobs/s/midtrain jobs/s/last"):  # fmt: skip
        assert words in refused.stderr
    (dtt.folder / "aside").mkdir()
    for name in ("midtrain", "last"):
        (dtt.folder / "jobs/s" / name).rename(dtt.folder / "aside" / name)
    redone = dtt("pipeline", "-c", *longer)
    assert "train.steps changes the common part: stage midtrain keeps its own" in redone.stderr
    assert "stage pretrain is done: jobs/s/pretrain@16" in redone.stderr
    assert final_files(dtt.folder, "s/last", 6) != result


@pytest.mark.slow
def test_a_stage_resumes_before_it_looks_at_its_predecessor(
    dtt: Dtt, tiny_stages: str, pretrained: Path, by_hand: dict[str, bytes]
) -> None:
    shutil.copytree(pretrained, dtt.folder, dirs_exist_ok=True)
    half = ("train", "-c", tiny_stages, "--stage", "midtrain", "checkpoint.every=1")
    checkpoints = dtt.folder / "jobs/s/midtrain/checkpoints"
    while not kill_when((checkpoints / "step-000003").exists, dtt.start(*half)):
        shutil.rmtree(checkpoints.parent)  # too late: again from the start
    resumed = dtt("train", "-c", tiny_stages, "--stage", "midtrain")
    assert "resumed from jobs/s/midtrain/checkpoints/step-00000" in resumed.stderr
    train(dtt, tiny_stages, "last")
    assert final_files(dtt.folder, "s/last", 6) == by_hand


@pytest.mark.slow
def test_a_stage_that_lost_its_origin_is_refused_and_resumes_alone(
    dtt: Dtt, tiny_stages: str, midtrained: Path
) -> None:
    shutil.copytree(midtrained, dtt.folder, dirs_exist_ok=True)
    with in_this_process(dtt.folder):
        assert [final is not None for final in done(find_stages("s.yaml", []))] == [
            True, True, False,
        ]  # fmt: skip
        # Started again after its end, and killed: it is not lost, and ends once more.
        Path("jobs/s/pretrain/attempts/2").mkdir()
        assert done(find_stages("s.yaml", [])) == [None, None, None]
        train(dtt, tiny_stages, "pretrain")
        assert [final is not None for final in done(find_stages("s.yaml", []))] == [
            True, True, False,
        ]  # fmt: skip
    shutil.rmtree(dtt.folder / "jobs/s/pretrain")
    refused = dtt("pipeline", "-c", tiny_stages, expect=2)
    assert "jobs/s/midtrain was trained from jobs/s/pretrain, which is not done now" in (
        refused.stderr
    )
    alone = dtt("train", "jobs/s/midtrain")
    assert "jobs/s/midtrain is done" in alone.stderr


@pytest.mark.slow
def test_a_stage_starts_from_the_average_and_the_optimizer_if_asked(
    dtt: Dtt, tiny_stages: str
) -> None:
    asked = ("train.ema_decay=0.9", "stages.midtrain.init.average=true", "stages.midtrain.seed=0",
             "stages.midtrain.init.optimizer=carry")  # fmt: skip
    for name in ("pretrain", "midtrain"):
        run = dtt("train", "-c", tiny_stages, "--stage", name, *asked)
    assert "optimizer state from jobs/s/pretrain/checkpoints/step-000012" in run.stderr
    before, after = (
        list(jsonl.read(JobDir(dtt.folder / "jobs/s" / name).metrics, "eval"))
        for name in ("pretrain", "midtrain")
    )
    assert after[0]["loss"] == before[-1]["ema_loss"] != before[-1]["loss"]


@pytest.mark.slow
def test_without_an_average_a_stage_that_asks_for_it_is_refused(
    dtt: Dtt, tiny_stages: str, pretrained: Path
) -> None:
    shutil.copytree(pretrained, dtt.folder, dirs_exist_ok=True)
    refused = dtt(
        "train", "-c", tiny_stages, "--stage", "midtrain", "stages.midtrain.init.average=true",
        expect=66,
    )  # fmt: skip
    assert "step-000012 has no moving average of the weights" in refused.stderr


@pytest.mark.slow
def test_other_token_ids_than_in_the_stage_before_are_refused(
    dtt: Dtt, tiny_stages: str, pretrained: Path
) -> None:
    shutil.copytree(pretrained, dtt.folder, dirs_exist_ok=True)
    (dtt.folder / "rivers.txt").write_text("the river runs to the sea\n\n" * 2000)
    dtt("download", "-d", "rivers.txt")
    dtt("tokenize", "-d", "rivers.txt", "tokenizer.vocab_size=270", "tokenize.out=other",
        "tokenize.validation_fraction=0")  # fmt: skip
    refused = dtt(
        "train", "-c", tiny_stages, "--stage", "midtrain", "stages.midtrain.data.tokens=other",
        expect=2,
    )  # fmt: skip
    assert "token ids decode to different text than in the previous stage" in refused.stderr
    assert not (dtt.folder / "jobs/s/midtrain").exists()


@pytest.mark.slow
def test_a_job_of_the_same_name_is_not_taken_for_a_stage(
    dtt: Dtt, tiny: Settings, tiny_stages: str
) -> None:
    dtt("train", *tiny(name="s/pretrain", optim__lr=1e-3))
    refused = dtt("pipeline", "-c", tiny_stages, expect=2)
    assert "jobs/s/pretrain is already a job, but not stage pretrain" in refused.stderr
    dtt("train", *tiny(name="u"))
    refused = dtt("pipeline", "-c", tiny_stages, "name=u", expect=2)
    assert "jobs/u is already a job" in refused.stderr


@pytest.mark.slow
def test_the_states_of_stages_are_shown_in_order(
    dtt: Dtt, tiny_stages: str, midtrained: Path
) -> None:
    shutil.copytree(midtrained, dtt.folder, dirs_exist_ok=True)
    lines = dtt("job", "status", "jobs/s").stdout.splitlines()[1:]
    assert [line.split(maxsplit=1)[0] for line in lines] == list(LAST)
    assert ["done" in line for line in lines] == [True, True, False]
    assert "never started" in lines[2]
    listed = dtt("job", "ls").stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["job", "jobs/s/pretrain", "jobs/s/midtrain"]
    states = json.loads(dtt("job", "status", "jobs/s", "--json").stdout)["stages"]
    assert [stage["state"] for stage in states] == ["done", "done", "never started"]


def test_a_plan_has_a_line_per_stage_and_their_sum(dtt: Dtt, tiny_stages: str) -> None:
    lines = dtt("plan", "-c", tiny_stages, "--gpu", "cpu").stdout.splitlines()
    steps = {line.split()[0]: line.split()[1] for line in lines[1:5]}
    assert steps == {"pretrain": "12", "midtrain": "8", "last": "6", "total": "26"}
    plan = json.loads(dtt("plan", "-c", tiny_stages, "--gpu", "cpu", "--json").stdout)
    seconds = [stage["seconds"] for stage in plan["stages"].values()]
    assert plan["total"]["seconds"] == pytest.approx(sum(seconds))
    one = dtt("plan", "-c", tiny_stages, "--gpu", "cpu", "--stage", "last").stdout
    assert "6 steps" in one
