"""Speed is tokens over time; a share of the peak is given only where the peak is known."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch

from dtt.train import meter
from dtt.train.meter import PEAK_FLOPS, Meter, peak_by_name, peak_flops

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands still until `now` is set."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(meter.time, "perf_counter", lambda: clock.now)
    return clock


def one_step(meter: Meter, tokens: int, flops_per_token: int = 1000) -> None:
    with meter.step(tokens, flops_per_token):
        pass


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("AMD Instinct MI300X", 1307e12),
        ("NVIDIA L40", None),
        ("Some Accelerator 9000", None),
        ("", None),
    ],
)
def test_the_peak_is_that_of_the_data_sheet_or_none(name: str, peak: float | None) -> None:
    assert peak_by_name(name) == peak


def test_a_longer_name_comes_before_one_it_contains() -> None:
    names = list(PEAK_FLOPS)
    for i, name in enumerate(names):
        assert not [later for later in names[i + 1 :] if name in later]


def test_a_cpu_has_no_peak_and_no_share_of_it(clock: SimpleNamespace) -> None:
    assert peak_flops(CPU) is None
    cpu = Meter(CPU, 1, "bf16")
    one_step(cpu, 64)
    clock.now += 1
    assert cpu.read()["mfu"] is None


def test_speed_is_what_was_done_since_the_last_reading(clock: SimpleNamespace) -> None:
    speed = Meter(CPU, 2, "bf16")
    for _ in range(4):
        one_step(speed, 500)
    clock.now += 8
    reading = speed.read()
    assert (reading["tokens_per_second"], reading["seconds_per_step"]) == (250.0, 2.0)
    one_step(speed, 500)
    clock.now += 1
    assert speed.read()["tokens_per_second"] == 500.0


def test_time_before_a_restart_does_not_count(clock: SimpleNamespace) -> None:
    speed = Meter(CPU, 1, "bf16")
    one_step(speed, 10)
    clock.now += 1000
    speed.restart()
    one_step(speed, 10)
    clock.now += 1
    assert speed.read()["tokens_per_second"] == 10.0


def test_time_of_a_pause_does_not_count(clock: SimpleNamespace) -> None:
    speed = Meter(CPU, 1, "bf16")
    one_step(speed, 10)
    clock.now += 1
    worked = speed.worked()
    with speed.paused("evaluate"):
        clock.now += 1000
    assert speed.worked() == worked
    assert speed.pauses == {"evaluate": 1000.0}
    assert speed.read()["tokens_per_second"] == 10.0


def test_there_is_no_share_of_the_bf16_peak_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "peak_flops", lambda device: 1e6)
    assert Meter(CPU, 4, "fp32").read()["mfu"] is None


def test_the_share_counts_all_devices(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter, "peak_flops", lambda device: 1e6)
    share = Meter(CPU, 4, "bf16")
    one_step(share, 1000)
    one_step(share, 2000, flops_per_token=500)  # in a shorter context
    clock.now += 1
    assert share.read()["mfu"] == 0.5  # 2e6 FLOP/s of 4e6


def test_memory_of_a_cpu_run_is_that_of_the_process() -> None:
    reading = Meter(CPU, 1, "bf16").read()
    resident = psutil.Process().memory_info().rss / 1e9
    assert reading["memory_gb"] == pytest.approx(resident, rel=0.2)


def test_steps_beside_a_save_are_compared_with_those_before(clock: SimpleNamespace) -> None:
    speed = Meter(CPU, 1, "bf16")
    assert speed.slowdown(100.0, 101.0) == (None, None)

    def step(seconds: float) -> None:
        with speed.step(1, 1):
            clock.now += seconds

    for seconds in (9.0, 1.0, 1.0, 1.0):  # the median: the first one compiles
        step(seconds)
    begin = clock.now
    assert speed.slowdown(begin, begin) == (None, None)
    step(1.5)
    step(1.1)
    end = clock.now - 0.1  # the save is on the disk before the second step ends
    step(1.0)
    assert speed.slowdown(begin, end) == (pytest.approx(0.5), pytest.approx(0.3))
    assert speed.slowdown(begin, begin) == (pytest.approx(0.5), pytest.approx(0.5))
