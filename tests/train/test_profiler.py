"""The share of exposed communication in a GPU's trace."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._C._autograd import DeviceType

from dtt.artifacts.jobdir import JobDir
from dtt.base.ranks import Ranks
from dtt.config.model import ModelConfig
from dtt.config.train import ProfileConfig
from dtt.mesh.dist import start
from dtt.model import families
from dtt.train.profiler import Profiler, exposed_share
from dtt.train.supervise.watchdog import Watchdog
from dtt.train.throughput import ThroughputMeter


def kernel(name: str, start: float, end: float, **other: object) -> SimpleNamespace:
    span = SimpleNamespace(start=start, end=end)
    reported = {"device_type": DeviceType.CUDA, "is_user_annotation": False} | other
    return SimpleNamespace(name=name, time_range=span, **reported)


def test_communication_that_overlaps_with_other_kernels_is_not_exposed() -> None:
    events = [
        kernel("gemm", 0, 4),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 2, 6),
        kernel("step 5", 0, 100, is_user_annotation=True),
        kernel("aten::mm", 0, 100, device_type=DeviceType.CPU),
        kernel("adamw", 8, 10),
    ]
    assert exposed_share(events) == pytest.approx(2 / 10)


def test_without_a_gpu_exposed_communication_is_unknown() -> None:
    assert exposed_share([kernel("aten::mm", 0, 1, device_type=DeviceType.CPU)]) is None


def test_writing_a_profile_is_not_reported_as_a_slow_or_hanging_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, job = start(Ranks(), "cpu"), JobDir(tmp_path)
    config = ModelConfig(dim=16, n_layers=2, n_heads=2)
    arch = families.get(config.family).architecture(config, 64, 32)
    meter = ThroughputMeter(arch, torch.float32, world)
    watchdog = Watchdog(job, world.ranks, 3, attempt=job.begin_attempt())
    phases, write = [], Profiler._write_trace

    def spied(profiler: Profiler, stem: Path) -> None:
        phases.append(watchdog._phase)
        write(profiler, stem)

    monkeypatch.setattr(Profiler, "_write_trace", spied)
    profiler = Profiler(ProfileConfig(steps=(2, 2)), world, job.profiles, meter, watchdog)
    with watchdog.phase("step"):
        for step in (1, 2, 3):
            with profiler.step(step):
                torch.ones(8, 8) @ torch.ones(8, 8)
    assert phases == ["profile"]
    assert meter.pauses.keys() == {"profile"}
    assert len(list(job.profiles.iterdir())) == 2
