"""Every moment is counted once; speed is tokens over the time of steps; a slow rank is named."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from support.ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dtt.artifacts.jobdir import JobDir
from dtt.base.ranks import Ranks
from dtt.config.model import ModelConfig
from dtt.jobs.clock import Clock, PhaseTimer
from dtt.mesh.dist import World, start
from dtt.model import count, families
from dtt.model.architecture import Architecture
from dtt.train import throughput
from dtt.train.throughput import AttemptTimes, ThroughputMeter

SEQ_LEN = 32


def architecture() -> Architecture:
    config = ModelConfig(dim=16, n_layers=2, n_heads=2)
    return families.get(config.family).architecture(config, 64, SEQ_LEN)


FLOPS = count.flops_per_token(architecture(), SEQ_LEN)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands still until `now` is set; a device that multiplies at 1 MFLOP/s."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(throughput, "measured_flops", lambda device, dtype: 1e6)
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: clock.now)
    return clock


def make(compute_dtype: torch.dtype = torch.bfloat16) -> ThroughputMeter:
    return ThroughputMeter(architecture(), compute_dtype, start(Ranks(), "cpu"))


def one_step(meter: ThroughputMeter, tokens: int) -> None:
    with meter.step(tokens, SEQ_LEN):
        pass


def test_a_first_step_that_is_slow_in_the_optimizer_leaves_no_negative_time(
    clock: SimpleNamespace, tmp_path: Path
) -> None:
    job, speed = JobDir(tmp_path), make()
    job.begin_attempt()
    ran = Clock(job, 1)
    breakdown = AttemptTimes(job, speed, PhaseTimer(), ran)
    breakdown.start(0)
    for seconds in (9.0, 1.0, 1.0):
        with speed.step(100, SEQ_LEN):
            clock.now += 1
            speed.end_phase("forward_backward")
            clock.now += seconds
            speed.end_phase("optimizer")
    breakdown.startup_record()
    speed.restart()
    breakdown.write(3)
    ran.close()
    parts = json.loads(job.clock(1).read_text())["parts"]
    assert parts["forward_backward"] == 0
    assert parts["optimizer"] == 11
    assert parts["start"] > 0


def test_every_moment_belongs_to_one_part(clock: SimpleNamespace) -> None:
    speed = make()
    for _ in range(2):
        clock.now += 0.5  # asking for requests, logging
        with speed.step(100, SEQ_LEN):
            clock.now += 1
            speed.end_phase("data")
            clock.now += 4
            speed.end_phase("forward_backward")
            clock.now += 2
            speed.end_phase("optimizer")
            clock.now += 0.25
        with speed.paused("evaluate"):
            clock.now += 100
    reading = speed.read()
    assert reading["seconds"] == {
        "other": 1.5, "data": 2.0, "forward_backward": 8.0, "optimizer": 4.0, "evaluate": 200.0,
    }  # fmt: skip
    assert reading["seconds_per_step"] == 15.5 / 2
    assert reading["tokens_per_second"] == round(200 / 15.5, 1)
    assert sum(reading["communication_seconds"].values()) == 0.0  # a process alone has none
    assert reading["slowest_rank"] is None
    assert speed.totals == reading["seconds"]
    clock.now += 1
    assert speed.read()["seconds"] == {"other": 1.0}
    assert speed.totals["other"] == 2.5


def test_speed_is_what_was_done_since_the_last_reading(clock: SimpleNamespace) -> None:
    speed = make()
    for _ in range(4):
        one_step(speed, 500)
    clock.now += 8
    reading = speed.read()
    assert (reading["tokens_per_second"], reading["seconds_per_step"]) == (250.0, 2.0)
    one_step(speed, 500)
    clock.now += 1
    assert speed.read()["tokens_per_second"] == 500.0


def test_time_before_a_restart_does_not_count_for_the_speed(clock: SimpleNamespace) -> None:
    speed = make()
    one_step(speed, 10)
    clock.now += 1000
    speed.restart()
    one_step(speed, 10)
    clock.now += 1
    assert speed.read()["tokens_per_second"] == 10.0
    assert speed.totals["other"] == 1001.0


def test_time_of_a_pause_does_not_count(clock: SimpleNamespace) -> None:
    speed = make()
    one_step(speed, 10)
    clock.now += 1
    worked = speed.worked()
    with speed.paused("evaluate"):
        clock.now += 1000
    assert speed.worked() == worked
    assert speed.pauses == {"evaluate": 1000.0}
    assert speed.read()["tokens_per_second"] == 10.0


def test_an_unknown_device_has_a_share_of_what_was_measured_alone(clock: SimpleNamespace) -> None:
    speed = make()
    one_step(speed, 1000)
    clock.now += FLOPS / 1000
    reading = speed.read()
    assert (reading["mfu"], reading["mfu_causal"], reading["matmul_share"]) == (None, None, 1.0)


def test_shares_are_of_the_peak_of_bf16_and_causal_attention_is_half_of_it(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throughput, "peak_flops", lambda device: 2e6)
    share = make()
    one_step(share, 1000)
    one_step(share, 1000)
    clock.now += FLOPS / 1000
    reading = share.read()
    assert (reading["mfu"], reading["matmul_share"]) == (1.0, 2.0)
    arch = architecture()
    attention = 12 * arch.n_layers * arch.n_heads * arch.head_dim * SEQ_LEN
    assert reading["mfu_causal"] == round(1 - attention / 2 / FLOPS, 4)
    assert make(torch.float32).read()["mfu"] is None


def test_the_first_step_is_reported_with_its_excess(clock: SimpleNamespace) -> None:
    speed = make()
    for seconds in (9.0, 1.0, 1.0):
        with speed.step(1, SEQ_LEN):
            clock.now += seconds
    assert speed.first_step() == (9.0, 8.0)
    assert speed.steps == 3


def test_memory_of_a_cpu_run_is_that_of_the_process() -> None:
    reading = make().read()
    resident = psutil.Process().memory_info().rss / 1e9
    assert reading["memory_steady_gb"] == pytest.approx(resident, rel=0.2)
    assert reading["memory_gb"] >= reading["memory_steady_gb"] - 0.01
    assert reading["memory_reserved_gb"] is None


class Waits(torch.optim.SGD):
    """Waits for others, and says so."""

    waited_seconds = 0.0


def test_what_an_optimizer_waited_is_communication(clock: SimpleNamespace) -> None:
    optimizer = Waits([nn.Parameter(torch.zeros(1))])
    others = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    world = start(Ranks(), "cpu")
    speed = ThroughputMeter(architecture(), torch.float32, world, [others, optimizer])
    for waited in (0.5, 0.75):
        optimizer.waited_seconds = waited
        reading = speed.read()
    assert reading["communication_seconds"] == {"optimizer": 0.25, "gradients": 0.0}


LATE = 0.2
"""Seconds by which rank 1 is late: several times what a busy machine may hold up the other."""


class Uneven(nn.Module):
    """Its second layer holds up the backward pass of rank 1."""

    def __init__(self, slow: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.register_full_backward_hook(lambda *_: time.sleep(LATE if slow else 0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def uneven_steps(world: World) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    model = Uneven(slow=world.rank == 1)
    module = DistributedDataParallel(model)
    speed = ThroughputMeter(architecture(), torch.float32, world)
    speed.watch_gradients(model.first.weight)
    readings = []
    for _ in range(2):
        for _ in range(2):
            with speed.step(1, SEQ_LEN):
                for i in range(2):  # the first micro-batch exchanges nothing
                    module.require_backward_grad_sync = i == 1
                    module(torch.randn(8, 64)).sum().backward()
                speed.end_phase("forward_backward")
        readings.append(speed.read())
    return readings


def test_ranks_that_wait_for_gradients_say_so_and_name_the_one_they_wait_for() -> None:
    first, second = (readings[-1] for readings in on_ranks(2, uneven_steps))
    waited = first["communication_seconds"]["gradients"]
    assert waited > second["communication_seconds"]["gradients"]
    assert waited > 0.5 * 2 * 2 * LATE
    for reading in (first, second):  # all ranks are told alike
        assert reading["slowest_rank"] == 1
        assert reading["slowest_behind"] > 0.5
        assert reading["slowest_node"]


def test_flops_are_counted_once_for_each_length_and_not_in_each_step(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a model that its family builds, counting runs the whole model on tensors of no values."""
    counted: list[int] = []
    right = count.flops_per_token

    def counting(arch: Any, seq_len: int, **how: Any) -> int:
        counted.append(seq_len)
        return right(arch, seq_len, **how)

    monkeypatch.setattr(count, "flops_per_token", counting)
    meter = make()
    for length in (SEQ_LEN, SEQ_LEN, SEQ_LEN // 2, SEQ_LEN):
        with meter.step(64, length):
            pass
    assert sorted(counted) == [SEQ_LEN // 2] * 2 + [SEQ_LEN] * 2
