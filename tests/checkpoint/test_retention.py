"""What stays: the newest few; and nothing half-done."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ConfigError
from dtt.checkpoint import retention, store
from dtt.config.train import CheckpointConfig


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folders of four committed steps, one save and one pruning that were interrupted."""
    root = tmp_path / "checkpoints"
    for name in ("step-000005", "step-000010", "step-000015", "step-1000000"):
        (root / name).mkdir(parents=True)
        (root / name / "model-00000.safetensors").write_text(name)
    for name in (".tmp-step-000020-3", ".tmp-step-000001-pruned"):
        (root / name).mkdir()
        (root / name / "model-00000.safetensors").write_text("half")
    (root / "step-000005-by-hand").mkdir()
    return root


def test_only_leftovers_of_interrupted_saves_are_deleted(folder: Path) -> None:
    retention.sweep_staging(folder)
    assert list(folder.glob(".tmp*")) == []
    assert store.steps(folder) == [5, 10, 15, 1_000_000]
    assert (folder / "step-000005-by-hand").exists()


def evaluated(folder: Path, losses: dict[int, float | None]) -> dict[int, float]:
    """The losses of a job with records of these; None is no finite number."""
    job = JobDir(folder.parent)
    records = [{"kind": "eval", "step": step, "loss": loss} for step, loss in losses.items()]
    records.insert(1, {"kind": "train", "step": 15, "loss": 0.1})
    job.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    return retention.eval_losses(job)


@pytest.mark.parametrize(
    ("rules", "diverged", "left"),
    [
        ({}, None, [1_000_000]),
        ({"keep_last": 2}, None, [15, 1_000_000]),
        ({"keep_last": 4}, None, [5, 10, 15, 1_000_000]),
        ({"keep_last": 9}, None, [5, 10, 15, 1_000_000]),
        ({"keep_every": 10}, None, [10, 1_000_000]),
        ({"keep_best": 1}, None, [5, 1_000_000]),
        ({"keep_best": 2, "keep_every": 15}, None, [5, 15, 1_000_000]),
        ({"keep_best": 9}, None, [5, 10, 15, 1_000_000]),
        ({}, 14, [10, 1_000_000]),
        ({}, 15, [15, 1_000_000]),
        ({}, 4, [1_000_000]),
    ],
)
def test_the_newest_checkpoint_is_kept_and_those_of_the_rules(
    folder: Path, rules: dict[str, int], diverged: int | None, left: list[int]
) -> None:
    found = evaluated(folder, {5: 1.0, 10: 3.0, 12: 0.5, 15: 2.0, 1_000_000: None})
    assert found == {5: 1.0, 10: 3.0, 12: 0.5, 15: 2.0}
    gone = retention.prune(folder, CheckpointConfig(**{"keep_last": 1} | rules), diverged, found)
    assert store.steps(folder) == left
    assert (folder / "step-000005-by-hand").exists()
    assert sorted([*gone, *left]) == [5, 10, 15, 1_000_000]


@pytest.fixture
def base(tmp_path: Path) -> JobDir:
    """A job with checkpoints of steps 5 and 10; the adapter of another one needs step 5."""
    job, adapter = JobDir(tmp_path / "base"), JobDir(tmp_path / "adapter")
    for step in (5, 10):
        store.folder_of(job.checkpoints, step).mkdir(parents=True)
    adapter.root.mkdir()
    adapter.config.touch()
    retention.note_dependent(store.folder_of(job.checkpoints, 5), adapter.root)
    return job


def test_checkpoints_that_adapters_need_stay_as_long_as_these(base: JobDir, tmp_path: Path) -> None:
    rules = CheckpointConfig(keep_last=1)
    assert retention.prune(base.checkpoints, rules) == []
    with pytest.raises(ConfigError, match=r"adapter needs the weights of step 5(.|\n)*dtt job rm"):
        retention.check_dependents(base, after=4)
    retention.check_dependents(base, after=5)
    shutil.rmtree(tmp_path / "adapter")
    retention.check_dependents(base)
    assert retention.prune(base.checkpoints, rules) == [5]


def test_a_job_of_others_cannot_be_told_and_damaged_records_do_not_matter(
    base: JobDir, caplog: pytest.LogCaptureFixture
) -> None:
    (base.dependents / "step-000010-x.json").write_text("{")
    assert retention.dependents(base.checkpoints).keys() == {5}
    shutil.rmtree(base.dependents)
    base.dependents.touch()  # no folder, as for somebody who may not write there
    with caplog.at_level(logging.WARNING, "dtt"):
        retention.note_dependent(store.folder_of(base.checkpoints, 5), base.root)
    assert "may delete it" in caplog.text
