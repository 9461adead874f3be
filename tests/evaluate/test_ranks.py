"""Checkpoints that are saved and deleted meanwhile: all ranks evaluate the same ones, or none."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import forked_runs
from support.local_tasks import write_tasks
from support.ranks import on_ranks
from support.running import Dtt, wait_until
from support.tiny_job import write_job

from dtt.base.errors import DttError, InputError
from dtt.base.ranks import Ranks
from dtt.config.evaluation import EvalConfig
from dtt.evaluate.evaluation import Evaluation, choose_models, evaluate_each, open_evaluation
from dtt.evaluate.models import EvaluatedModel
from dtt.hf.read import LoadedModel
from dtt.mesh.dist import World

ALONE = World(Ranks(), torch.device("cpu"), None)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job with checkpoints of steps 5 and 10, next to the files of tasks."""
    monkeypatch.chdir(tmp_path)
    write_tasks(tmp_path)
    write_job(tmp_path, seq_len=128)
    return Path("jobs/tiny")


def tasks() -> Evaluation:
    return open_evaluation(EvalConfig(tasks=("sums.yaml",)))


def deleting(model: EvaluatedModel, *, after: bool = False) -> EvaluatedModel:
    """The model, whose checkpoint is deleted before it is loaded, or `after`."""

    def load() -> LoadedModel:
        if after:
            trained = model.load()
            state = {name: tensor.clone() for name, tensor in trained.state.items()}
            shutil.rmtree(model.path)
            return replace(trained, state=state)
        shutil.rmtree(model.path)
        return model.load()

    return replace(model, load=load)


def evaluated(world: World, models: list[EvaluatedModel], *, every: bool = True) -> list[Any]:
    """The steps that are evaluated, and their files."""
    ours = tasks()
    found = evaluate_each(models, world, lambda m: ours.run(m, world, lambda: False), every=every)
    return [(model.step, [str(file.path) for file in ours.files(model)]) for model, _ in found]


def choose_on_rank_0(world: World, folder: str) -> list[int | None]:
    """Rank 1 sees a checkpoint that rank 0 does not see."""
    os.chdir(Path(folder, str(world.rank)))
    return [model.step for model in choose_models("jobs/tiny", None, world)]


def delete_on_rank_1(world: World, folder: str) -> tuple[list[int | None], str]:
    """Step 5 is deleted while rank 1 loads it; then all are deleted."""
    os.chdir(folder)
    models = choose_models("jobs/tiny", "all", world)
    if world.rank == 1:
        models = [deleting(models[0]), *models[1:]]
    if world.first:  # it has read the weights before they are deleted
        models = [replace(models[0], load=lambda: time.sleep(1) or models[1].load()), *models[1:]]
    ours = tasks()
    found = evaluate_each(models, world, lambda m: ours.run(m, world, lambda: False), every=True)
    steps = [model.step for model, _ in found]
    damaged = Path("jobs/tiny/checkpoints/step-000010/MANIFEST.json")
    world.barrier()
    if world.first:
        damaged.unlink()
    world.barrier()
    try:
        models = choose_models("jobs/tiny", None, world)
        list(evaluate_each(models, world, lambda m: ours.run(m, world, lambda: False), every=True))
    except DttError as error:
        return steps, str(error)
    return steps, ""


def test_rank_0_chooses_the_checkpoints(job: Path, tmp_path: Path) -> None:
    for rank in ("0", "1"):
        shutil.copytree(job, tmp_path / rank / job)
    shutil.rmtree(tmp_path / "0" / job / "checkpoints/step-000010")
    assert on_ranks(2, choose_on_rank_0, str(tmp_path)) == [[5], [5]]


def test_a_checkpoint_that_one_rank_cannot_read_is_skipped_on_all(
    job: Path, tmp_path: Path
) -> None:
    (first, why), (second, why_too) = on_ranks(2, delete_on_rank_1, str(tmp_path))
    assert first == second == [10]
    assert "MANIFEST.json is missing" in why
    assert why == why_too


def test_a_checkpoint_may_be_deleted_before_or_while_it_is_evaluated(job: Path) -> None:
    one, two = choose_models(str(job), "all", None)
    [(step, files)] = evaluated(ALONE, [deleting(one), deleting(two, after=True)])
    assert step == 10
    assert all(Path(file).exists() for file in files)
    with pytest.raises(InputError, match="deleted before the evaluation"):
        evaluated(ALONE, [one])


def test_a_lost_rank_is_not_a_bug(dtt: Dtt, job: Path) -> None:
    write_tasks(dtt.folder, questions=4000)
    ranks = forked_runs.start(
        dtt, "eval", job, "--tasks", "sums.yaml", "eval.batch_tokens=512", ranks=2
    )
    files = partial((dtt.folder / job).glob, "evals/*/sums-*.jsonl")
    wait_until(lambda: any(path.stat().st_size for path in files()))
    os.kill(ranks.pids[1], 9)
    codes = ranks.wait()
    assert "another process of this run has ended" in codes.stderr
    assert "this is a bug" not in codes.stderr
