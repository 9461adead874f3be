"""dtt on a machine with several GPUs starts a process on each, and says so."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.tiny_job import write_job

from dtt.base import local
from dtt.launch import own_gpus
from dtt.main import commands


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The commands that are started, on a machine that pretends eight GPUs."""
    commands: list[list[str]] = []

    def run(argv: Sequence[str], *_: object, **__: object) -> int:
        commands.append(list(argv))
        return 75

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "run", run)
    monkeypatch.setattr(own_gpus, "_has_gpus", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "RANK"):
        monkeypatch.delenv(name, raising=False)
    return commands


@pytest.mark.parametrize(
    ("arguments", "env", "processes"),
    [
        ([], {}, 8),
        (["launch.gpus_per_node=2"], {}, 2),
        (["launch.gpus_per_node=16"], {}, 8),
        (["launch.gpus_per_node=1"], {}, 1),
        (["train.device=cpu"], {}, 1),
        (["pipeline.train_processes=3"], {}, 3),
        ([], {"SLURM_JOB_ID": "1"}, 1),
        ([], {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}, 1),
        (["no.such.key=1"], {}, 1),  # `dtt train` refuses it
    ],
)
def test_a_process_starts_on_each_gpu_that_is_chosen(
    started: list[list[str]],
    arguments: list[str],
    env: dict[str, str],
    processes: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    typed = ["train", "-c", "quickstart", *arguments]
    monkeypatch.setattr(sys, "argv", ["dtt", *typed])
    caplog.set_level("INFO")
    options = "quickstart", arguments, (), None, None, None
    if processes == 1:
        own_gpus.start_training(*options)
        assert started == []
        return
    with pytest.raises(SystemExit) as ended:
        own_gpus.start_training(*options)
    assert ended.value.code == 75
    assert started == [local.torchrun_argv(processes, typed)]
    assert f"a process on each of {processes} GPUs" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "processes"),
    [
        (["exports/run", "--tasks", "arc_easy"], 8),
        (["jobs/run", "--tasks", "arc_easy", "--watch"], 0),  # beside a training
        (["compare", "jobs/a", "jobs/b", "--tasks", "arc_easy"], 0),
    ],
)
def test_an_evaluation_takes_all_gpus(
    started: list[list[str]], arguments: list[str], processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["dtt", "eval", *arguments])
    with pytest.raises(SystemExit) as ended:
        commands("eval")(["eval", *arguments], prog_name="dtt")
    if processes:
        assert ended.value.code == 75
        assert started == [local.torchrun_argv(processes, ["eval", *arguments])]
    else:
        assert ended.value.code == 66  # there is no such job
        assert started == []


@pytest.mark.parametrize(
    ("memory", "environment", "processes"),
    [
        (100_000, {}, 8),
        (10**6, {}, 0),  # one GPU holds the weights
        (100_000, {"SLURM_JOB_ID": "1"}, 0),
        (100_000, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}, 0),
    ],
)
def test_a_model_that_one_gpu_cannot_hold_generates_on_all(
    started: list[list[str]],
    memory: int,
    environment: dict[str, str],
    processes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    gpu = SimpleNamespace(total_memory=memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    job = str(write_job(tmp_path))  # with 214 kB of weights
    typed = ["generate", job, "-p", "x"]
    monkeypatch.setattr(sys, "argv", ["dtt", *typed])
    if not processes:
        own_gpus.start_generation(job)
        own_gpus.start_generation("jobs/nothing")
        assert started == []
        return
    with pytest.raises(SystemExit) as ended:
        commands("generate")(typed, prog_name="dtt")
    assert ended.value.code == 75
    assert started == [local.torchrun_argv(processes, typed)]
    [line] = capsys.readouterr().err.splitlines()
    assert "starting a process on each of 8 GPUs (" in line
    assert "GB of weights" in line


def test_one_gpu_needs_no_other_process(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    own_gpus.start_evaluation()
    own_gpus.start_generation("jobs/run")
    assert started == []
