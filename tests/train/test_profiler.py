"""Writing a profile is time of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dtt.artifacts.jobdir import JobDir
from dtt.base.ranks import Ranks
from dtt.config.model import ModelConfig
from dtt.config.train import ProfileConfig
from dtt.mesh.dist import start
from dtt.model import families
from dtt.train.profiler import Profiler
from dtt.train.supervise.watchdog import Watchdog
from dtt.train.throughput import ThroughputMeter


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
