"""Goodput counts the time of steps that were not lost, over the time of all attempts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dtt.artifacts.jobdir import JobDir
from dtt.base.ranks import Ranks
from dtt.config.model import ModelConfig
from dtt.jobs.clock import Clock, PhaseTimer, goodput
from dtt.mesh.dist import start
from dtt.model import families
from dtt.train.throughput import AttemptTimes, ThroughputMeter


def attempts(root: Path, *records: dict[str, Any]) -> JobDir:
    job = JobDir(root)
    for record in records:
        job.clock(job.begin_attempt()).write_text(json.dumps({"began": 0.0, **record}))
    return job


def trained(first: int, step: int, seconds: float, **parts: float) -> dict[str, Any]:
    return {"seconds": seconds, "first": first, "step": step, "steps": step - first, "parts": parts}


def test_steps_repeated_after_a_crash_do_not_count_as_useful(tmp_path: Path) -> None:
    job = attempts(
        tmp_path,
        trained(0, 100, 150.0, start=20.0, forward_backward=90.0, optimizer=10.0, data=5.0),
        {"seconds": 10.0},  # ended before it came to a step
        trained(60, 160, 140.0, start=20.0, forward_backward=90.0, optimizer=10.0, save=10.0),
    )
    found = goodput(job)
    assert found is not None
    assert found.useful == pytest.approx(60 + 100)
    assert found.seconds == 300.0
    assert found.lost == pytest.approx(
        {"start": 50.0, "redone": 40.0, "data": 5.0, "save": 10.0, "unlogged": 35.0}
    )
    assert found.useful + sum(found.lost.values()) == pytest.approx(found.seconds)
    assert found.describe() == (
        "53.3% of 5 min 0 s in 3 attempts; lost: start 16.7%, redone 13.3%, unlogged 11.7%, "
        "save 3.3%, data 1.7%"
    )


def test_steps_after_the_checkpoint_of_a_resume_do_not_count_as_useful(tmp_path: Path) -> None:
    job = attempts(
        tmp_path,
        trained(0, 50, 50.0, forward_backward=50.0),
        trained(50, 100, 50.0, forward_backward=50.0),
        trained(20, 40, 20.0, forward_backward=20.0),  # dtt train --from-step 20
    )
    found = goodput(job)
    assert found is not None
    assert found.useful == pytest.approx(20 + 0 + 20)


def test_a_job_without_clock_records_has_no_goodput(tmp_path: Path) -> None:
    job = JobDir(tmp_path)
    assert goodput(job) is None
    job.begin_attempt()
    assert goodput(job) is None


def test_an_attempt_that_stops_before_its_first_log_line_has_its_steps_counted(
    tmp_path: Path,
) -> None:
    config = ModelConfig(dim=16, n_layers=2, n_heads=2)
    arch = families.get(config.family).architecture(config, 64, 32)
    meter = ThroughputMeter(arch, torch.float32, start(Ranks(), "cpu"))
    job = JobDir(tmp_path)
    clock = Clock(job, job.begin_attempt())
    breakdown = AttemptTimes(job, meter, PhaseTimer(), clock)
    breakdown.start(0)
    with meter.step(1, 32):  # nothing but data
        meter.end_phase("data")
    with meter.paused("save"):
        pass
    meter.restart()
    breakdown.write(1)
    clock.close()
    kept = json.loads(job.clock(1).read_text())
    assert (kept["first"], kept["step"], kept["steps"]) == (0, 1, 1)
    assert {"start", "data", "save", "other"} <= kept["parts"].keys()


@pytest.mark.parametrize("hours", [-1.0, 1.0])
def test_a_clock_that_is_set_while_a_run_starts_changes_no_measurement(
    tmp_path: Path, hours: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Clock(attempts(tmp_path / "before", {}), 1)
    before.close()
    now, age = time.time, before.ran()
    monkeypatch.setattr(time, "time", lambda: now() + 3600 * hours)
    job = attempts(tmp_path, {})
    clock, timer = Clock(job, 1), PhaseTimer()
    timer.end_phase("imports")
    clock.close()
    # Each reading of the age of the process takes a moment of its own.
    assert -1 <= clock.ran() - age < 60
    assert -1 <= timer.seconds["imports"] - age < 60
    kept = json.loads(job.clock(1).read_text())
    assert -1 <= kept["seconds"] - age < 60


def test_a_time_below_zero_that_an_earlier_version_kept_is_never_shown(tmp_path: Path) -> None:
    job = attempts(
        tmp_path,
        trained(0, 10, -3600.0, start=-3610.0, forward_backward=9.0),
        trained(10, 20, 12.0, start=2.0, forward_backward=10.0),
    )
    spent = goodput(job)
    assert spent is not None
    assert "-" not in spent.describe()
    assert 0 <= spent.share <= 1
    assert all(seconds >= 0 for seconds in spent.lost.values())
    only = attempts(tmp_path / "only", trained(0, 10, -3600.0, start=-3610.0))
    assert goodput(only) is None
