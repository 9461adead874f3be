"""TensorBoard reads what was logged, and after a resume sees each step once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dtt.base.errors import EnvironmentUnfit
from dtt.track.trackers import TensorBoardTracker


def train(folder: Path, resume_step: int | None, steps: range, loss: float) -> None:
    """Log some steps as one attempt does, with `loss` to tell attempts apart."""
    tracker = TensorBoardTracker(folder, resume_step)
    for step in steps:
        tracker.log({"kind": "train", "step": step, "loss": loss + step, "ledger": "ab"})
        tracker.log({"kind": "perf", "step": step, "tokens_per_second": 5.0, "mfu": None})
    tracker.log({"kind": "eval", "step": steps[-1], "loss": loss, "bits_per_byte": 1.5})
    scores = {"acc": 0.25, "acc_stderr": 0.125}
    tracker.log({"kind": "task", "step": steps[-1], "task": "piqa", **scores})
    tracker.log({"kind": "sample", "step": steps[-1], "text": "import sys"})
    tracker.close()


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    events = event_accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_every_number_is_a_scalar_and_nothing_else_is(tmp_path: Path) -> None:
    train(tmp_path, None, range(1, 4), loss=10)
    assert scalars(tmp_path) == {
        "train/loss": [(1, 11), (2, 12), (3, 13)],
        "perf/tokens_per_second": [(1, 5), (2, 5), (3, 5)],
        "eval/loss": [(3, 10)],
        "eval/bits_per_byte": [(3, 1.5)],
        "task/piqa/acc": [(3, 0.25)],
        "task/piqa/acc_stderr": [(3, 0.125)],
    }


def test_after_a_resume_steps_that_were_trained_again_show_once(tmp_path: Path) -> None:
    train(tmp_path, None, range(1, 8), loss=10)
    train(tmp_path, 4, range(5, 10), loss=100)
    losses = scalars(tmp_path)["train/loss"]
    assert losses == [(n, 10 + n) for n in range(1, 5)] + [(n, 100 + n) for n in range(5, 10)]


def test_without_tensorboard_the_error_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(EnvironmentUnfit, match=r"pip install .tensorboard>="):
        TensorBoardTracker(tmp_path, None)
