"""A run is scored at the evaluation that counts, with the time of its steps alone."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import DamagedError
from dtt.base.files import write_atomically
from dtt.bench import target_watch
from dtt.bench.recipe import ScoreRule
from dtt.bench.run_score import first_reached, score, training_seconds, values
from dtt.bench.target_watch import TargetWatch

LOSS = ScoreRule(
    metric="eval.loss", label="loss", target=3.0, beside=("eval.bits_per_byte", "task.a.acc")
)
CORE = ScoreRule(metric="task.*.centred", label="CORE", goal="max")


def write(folder: Path, *records: dict[str, Any]) -> JobDir:
    job = JobDir(folder)
    job.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    return job


def evaluation(step: int, loss: float | None) -> dict[str, Any]:
    return {"kind": "eval", "step": step, "loss": loss, "bits_per_byte": loss and loss / 2}


def perf(step: int, steps: int, working: float, **pauses: float) -> dict[str, Any]:
    seconds = {"data": 0.25 * working, "forward_backward": 0.75 * working, **pauses}
    return {"kind": "perf", "step": step, "seconds_per_step": working / steps, "seconds": seconds}


def start(step: int, first: float) -> dict[str, Any]:
    return {"kind": "start", "step": step, "seconds": {"imports": 9.0, "first step": first}}


def train(step: int) -> dict[str, Any]:
    return {"kind": "train", "step": step, "tokens": 100 * step}


def test_the_first_evaluation_that_reaches_the_target_counts(tmp_path: Path) -> None:
    records = [
        evaluation(0, 5.0), train(10), start(0, 1.0), perf(10, 10, 10.0), evaluation(10, 2.9),
        train(12), evaluation(12, 2.8),
    ]  # fmt: skip
    found = score(write(tmp_path, *records), LOSS, [], 0)
    assert (found.step, found.tokens, found.value) == (10, 1000, 2.9)
    assert found.reached is True
    assert found.best == 2.8
    assert found.beside == {"eval.bits_per_byte": 1.45, "task.a.acc": None}


def test_a_run_that_misses_the_target_counts_with_its_last_evaluation(tmp_path: Path) -> None:
    records = [evaluation(0, 5.0), evaluation(10, 3.1), evaluation(20, 3.2), evaluation(30, None)]
    found = score(write(tmp_path, *records), LOSS, [], 0)
    assert (found.step, found.value, found.reached, found.best) == (20, 3.2, False, 3.1)
    with pytest.raises(DamagedError, match=r"lacks eval\.loss[\s\S]*at step 30 it is not finite"):
        score(write(tmp_path, *records), LOSS.model_copy(update={"target": None}), [], 0)


def test_a_run_without_the_metric_has_no_score(tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match=r"lacks task\.\*\.centred"):
        score(write(tmp_path, evaluation(0, 5.0)), CORE, ["a"], 0)


def test_pauses_and_the_compilation_of_the_first_step_do_not_count(tmp_path: Path) -> None:
    """Nine steps take 2 s each; the first one takes 30 s and counts as one of them."""
    job = write(
        tmp_path, start(0, 30.0), perf(10, 10, 48.0, evaluate=100.0, save=7.0, sample=3.0),
        perf(20, 10, 20.0, evaluate=50.0),
    )  # fmt: skip
    assert training_seconds(job.metrics, 10) == pytest.approx(20.0)
    assert training_seconds(job.metrics, 20) == pytest.approx((18.0 + 20.0) / 19 * 20)


def test_steps_without_a_record_count_as_a_mean_step(tmp_path: Path) -> None:
    """Killed after step 10 of 15 that were saved; the next attempt compiles again."""
    job = write(
        tmp_path, start(0, 11.0), perf(10, 10, 20.0), start(15, 31.0), perf(20, 5, 35.0)
    )  # fmt: skip
    assert training_seconds(job.metrics, 20) == pytest.approx(20 * (9.0 + 4.0) / 13)
    assert training_seconds(write(tmp_path).metrics, 20) is None


def test_a_mean_over_tasks_needs_all_of_them(tmp_path: Path) -> None:
    def task(step: int, name: str, centred: float) -> dict[str, Any]:
        return {"kind": "task", "step": step, "task": name, "centred": centred}

    job = write(tmp_path, task(0, "a", 0.5), task(5, "a", 0.2), task(5, "b", 0.4))
    assert values(job.metrics, "task.*.centred", ["a", "b"]) == [(5, pytest.approx(0.3))]
    assert values(job.metrics, "task.a.centred", ["a", "b"]) == [(0, 0.5), (5, 0.2)]


def test_a_run_is_asked_to_stop_when_its_target_is_reached(tmp_path: Path) -> None:
    job = write(tmp_path, evaluation(0, 5.0))
    with TargetWatch(job, LOSS, []) as watch:
        with job.metrics.open("a") as file:
            file.write(json.dumps(evaluation(10, 2.9)) + "\n")
        watch.wait()
        assert job.stop.read_text() == "dtt bench: loss 3 is reached\n"
    assert not job.stop.exists(), "the next attempt would stop"
    assert first_reached(job, LOSS, []) == 10


def test_a_disk_that_was_full_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write(tmp_path, evaluation(10, 2.9))
    attempts = []

    def full_once(path: Path, content: str) -> None:
        attempts.append(path)
        if len(attempts) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_atomically(path, content)

    monkeypatch.setattr(target_watch, "write_atomically", full_once)
    with TargetWatch(job, LOSS, []) as watch:
        watch.wait()
        assert job.stop.read_text() == "dtt bench: loss 3 is reached\n"
    assert len(attempts) == 2


def test_a_run_without_a_target_is_left_alone(tmp_path: Path) -> None:
    job = write(tmp_path, evaluation(10, 0.1))
    with TargetWatch(job, ScoreRule(metric="eval.loss", label="loss"), []):
        pass
    assert not job.stop.parent.exists()
