"""Training with batches and contexts that grow: records, resume, and two ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.records import assert_same_tensors, records
from support.running import in_this_process

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import DamagedError
from dtt.config.load import load_job
from dtt.data.inspect import run as data
from dtt.train import run as command
from dtt.train import samples_of_step

STEPS = 24
SIZES = [64] * 4 + [128] * 4 + [192] * 4 + [256] * 12
Settings = Callable[..., list[str]]


def growing(tiny: Settings, **changes: object) -> list[str]:
    """Batches of 2, 4, 6, then 8 sequences; contexts of 8, 16, then 32 tokens."""
    schedules: dict[str, object] = {
        "train__batch_schedule": "{type: list, stages: [[0, 64], [4, 128], [8, 192], [12, 256]]}",
        "train__context_schedule": "[[0, 8], [1k tokens, 16], [50%, 32]]",
        "train__steps": STEPS,
        "train__micro_batch": 3,
        "train__precision": "fp32",
        "checkpoint__keep_last": 99,
    }
    return tiny(**(schedules | changes))


def train(
    folder: Path, *arguments: str, allow: Sequence[str] = (), from_step: int | None = None
) -> None:
    """`dtt train` in this process."""
    with in_this_process(folder):
        command.run(None, arguments, allow, from_step)


@pytest.fixture(scope="module")
def whole(tiny: Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job that nothing disturbed."""
    folder = tmp_path_factory.mktemp("growing")
    train(folder, *growing(tiny))
    return folder / "jobs/t"


def test_metrics_record_the_size_of_each_step(whole: Path) -> None:
    found = records(whole, "train")
    assert [r["batch_tokens"] for r in found] == SIZES
    assert [r["tokens"] for r in found] == [sum(SIZES[: n + 1]) for n in range(STEPS)]
    # 1,000 tokens come before step 11, half of the steps before step 13.
    assert [r["seq_len"] for r in found] == [8] * 10 + [16] * 2 + [32] * 12


@pytest.mark.parametrize("step", [8, 12])
def test_a_resume_on_the_way_up_ends_as_if_nothing_had_happened(
    whole: Path, tmp_path: Path, step: int
) -> None:
    job = shutil.copytree(whole, tmp_path / "jobs/t")
    train(tmp_path, "jobs/t", from_step=step)
    assert_same_tensors(whole, job, STEPS)
    kinds = ("train", "eval", "sample")
    assert records(job, *kinds) == records(whole, *kinds)
    assert JobDir(job).exit_record(2) is not None


def test_what_a_step_was_trained_on_is_found_again(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = []
    for step, size in enumerate(SIZES, start=1):
        samples_of_step.at_step(
            str(whole), step, rank=None, ranks=None, limit=None, full=False, as_json=True
        )
        reported = json.loads(capsys.readouterr().out)
        assert reported["ledger_agrees"]
        assert reported["samples_of_step"] == size // 32
        samples += [sample["position"] for sample in reported["samples"]]
    assert samples == list(range(sum(SIZES) // 32))
    data.mix(load_job(whole))
    assert f"{len(SIZES)} steps of 64 to 256 tokens" in capsys.readouterr().out


def test_a_job_does_not_resume_after_steps_of_other_sizes(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "jobs/t")
    key, sizes = "train.batch_schedule.stages", "[[0, 64], [4, 128], [7, 192], [12, 256]]"
    with pytest.raises(DamagedError, match="not in the order that this job was trained in"):
        train(
            tmp_path,
            "jobs/t",
            f"{key}={sizes}",
            allow=[key],
            from_step=8,
        )
