"""Budgets: a run ends in time, annealed, validated and saved, at whatever speed it goes."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.running import in_this_process, wait_until

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import Preempted
from dtt.checkpoint import store
from dtt.config.evaluation import EvalConfig
from dtt.config.load import load_job
from dtt.config.run import RunConfig
from dtt.config.schedule import Decay
from dtt.config.train import CheckpointConfig, TrainConfig
from dtt.jobs.clock import Clock
from dtt.optim.lr_curves import WsdConfig
from dtt.optim.resolved_schedule import resolve_schedule
from dtt.track import jsonl
from dtt.train import run as train
from dtt.train.run_schedule import SHORTEST, SPARE_SECONDS, TimeBudget

Settings = Callable[..., list[str]]
LIMIT, EVALUATION, TASKS, SAVE, WHOLE_SAVE = 1000, 3.0, 4.0, 0.5, 2.0


def tokens_before(step: int) -> int:
    return 100 * step


@dataclass
class Simulated:
    """A run on a clock of its own, whose steps take what `seconds` says."""

    budget: TimeBudget
    seconds: Callable[[float], float]
    """Of a step, by the time that has passed."""
    passed: float = 0.0
    step: int = 0
    rates: list[float] = field(default_factory=list)
    begun: int | None = None

    def run(self) -> None:
        schedule = resolve_schedule(self.budget.schedule, self.budget.limit, tokens_before)
        schedule = schedule.with_decay(None)
        worked = 0.0
        while self.step < (schedule.decay.end if schedule.decay else self.budget.limit):
            pauses = {"evaluate": EVALUATION, "tasks": TASKS, "save": SAVE} if self.step else {}
            left = LIMIT - self.passed
            self.budget.measure(self.step, left, worked, pauses)
            if schedule.decay is None and (end := self.budget.end(self.step, left)):
                self.begun = self.step
                schedule = schedule.with_decay(Decay(self.step, end))
            self.rates.append(schedule.multiplier(self.step))
            took = self.seconds(self.passed)
            worked += took
            self.passed += took
            self.step += 1
            self.passed += EVALUATION * (self.step % 50 == 0) + TASKS * (self.step % 80 == 0)
            self.passed += SAVE * (self.step % 100 == 0)
        self.passed += EVALUATION + TASKS + WHOLE_SAVE


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clock]:
    job = JobDir(tmp_path_factory.mktemp("job"))
    clock = Clock(job, job.begin_attempt())
    yield clock
    clock.close()


def simulated(clock: Clock, seconds: Callable[[float], float], **changes: Any) -> Simulated:
    cfg = RunConfig(
        train=TrainConfig(budget=f"{LIMIT}s", eval_every=50),
        eval=EvalConfig(every=80),
        checkpoint=CheckpointConfig(every=100),
    )
    schedule, limit = changes.get("schedule", WsdConfig(decay=0.2)), changes.get("limit", 10**6)
    budget = TimeBudget(cfg, schedule, tokens_before, limit, clock)
    budget.measured["whole_save"] = WHOLE_SAVE
    run = Simulated(budget, seconds)
    run.run()
    return run


@settings(max_examples=15)
@given(
    st.floats(0.3, 3),
    st.sampled_from([20, 200, 0.1, 0.4, "30%", "10k tokens"]),
    st.integers(0, 10**6),
)
def test_at_any_speed_it_ends_annealed_just_in_time(
    clock: Clock, usual: float, decay: Any, seed: int
) -> None:
    """The speed changes from step to step."""

    rng = random.Random(seed)

    def seconds(_: float) -> float:
        return usual * rng.uniform(0.8, 1.2)

    run = simulated(clock, seconds, schedule=WsdConfig(decay=decay, shape="linear"))
    slowest = 1.2 * usual
    assert run.passed <= LIMIT + (SHORTEST + 1) * slowest
    assert run.passed >= LIMIT - 4 * SPARE_SECONDS - EVALUATION - TASKS - 0.02 * LIMIT - 3 * slowest
    assert all(a - b >= -1e-9 for a, b in pairwise(run.rates))
    assert run.begun is not None
    assert 0.0 < run.rates[-1] <= 1 / SHORTEST + 1e-9


def test_the_decay_takes_the_share_it_should(clock: Clock) -> None:
    run = simulated(clock, lambda _: 1.0, schedule=WsdConfig(decay=0.2))
    assert run.begun is not None
    assert (run.step - run.begun) / run.step == pytest.approx(0.2, abs=0.01)
    assert run.rates[-1] == pytest.approx(1 - math.sqrt(1 - 1 / (run.step - run.begun)), rel=0.5)


def test_a_run_that_reaches_its_last_step_first_ends_there(clock: Clock) -> None:
    run = simulated(clock, lambda _: 0.1, limit=400)
    assert (run.step, run.begun) == (400, 320)


def test_a_pause_that_does_not_come_again_is_not_expected(clock: Clock) -> None:
    budget = simulated(clock, lambda _: 1.0).budget
    budget.measure(1, 100.0, 1.0, {"profile": 9.0, "save": 2.0})
    assert budget.measured["save"] == 2.0


def test_after_the_time_limit_a_short_decay_remains(clock: Clock) -> None:
    run = simulated(clock, lambda _: 2000.0)
    assert (run.step, run.begun) == (1 + SHORTEST, 1)


def test_setting_the_wall_clock_does_not_change_the_budget(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = clock.left("2h")
    later = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: later)
    assert before - 60 < clock.left("2h") <= before


def test_an_attempt_of_which_nothing_can_be_read_counts_as_no_time(
    tmp_path: Path, clock: Clock
) -> None:
    job, timed = JobDir(tmp_path), "1h"
    for seconds in (100.0, None, None):
        path = job.clock(job.begin_attempt())
        path.write_text("" if seconds is None else json.dumps({"began": 0.0, "seconds": seconds}))
    job.clock(3).unlink()
    after = Clock(job, job.begin_attempt())
    after.close()
    assert after.left(timed) == pytest.approx(clock.left(timed) - 100.0, abs=10.0)


@pytest.fixture
def _here(tmp_path: Path) -> Iterator[None]:
    with in_this_process(tmp_path):
        yield


def budget(seconds: float) -> str:
    """That ends so many seconds from now: the time of an attempt is that of its process."""
    return f"train.budget={time.time() - psutil.Process().create_time() + seconds:.1f}s"


@pytest.mark.usefixtures("_here")
def test_a_run_interrupted_in_its_decay_resumes_the_decay(tiny: Settings) -> None:
    arguments = tiny(
        train__steps=10**6, schedule__decay="99.9%", schedule__shape="linear", train__eval_every=50,
        train__sample_tokens=0, checkpoint__every=10**6,
    )  # fmt: skip
    job, decays, stops = JobDir(Path("jobs/t")), [], []
    for asked in ([*arguments, budget(300)], ["jobs/t"]):
        stopper = Thread(target=stop_when_saved, args=(job,))
        stopper.start()
        with pytest.raises(Preempted):
            train.run(None, asked, [], None)
        stopper.join()
        stopped = store.newest(job.checkpoints)
        assert stopped is not None
        decays.append(Decay.from_json(stopped.position()["decay"]))
        stops.append(stopped.step)
    decay = decays[0]
    assert decays == [decay, decay]
    assert decay.begin < stops[0] < stops[1] < decay.end
    rates = [record["lr"] for record in jsonl.read(job.metrics, "train")]
    peak = load_job(job.root).optim.lr
    assert rates[stops[0]] == pytest.approx(peak * (1 - decay.progress(stops[0])))
    assert all(a >= b for a, b in pairwise(rates[decay.begin :]))


def stop_when_saved(job: JobDir) -> None:
    """Ask for a stop one step after a checkpoint: one is saved where the decay begins."""
    wait_until(
        lambda: (steps := store.steps(job.checkpoints)) and (job.last_step() or 0) > steps[-1]
    )
    job.stop.touch()
