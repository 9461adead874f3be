"""`dtt doctor` tells what is there, names what is wrong, and its exit code says which it is."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forked import ForkedDtt
from support.running import Dtt

from dtt import __version__
from dtt.base.errors import ExitCode
from dtt.verify.forked_ranks import rendezvous

NODE = socket.gethostname()


def test_a_single_process_checks_everything_but_collectives(dtt: Dtt) -> None:
    found = json.loads(dtt("doctor", "--json", "--device", "cpu").stdout)
    assert (found["fit"], found["problems"], found["exchanges"]) == (True, [], [])
    (process,) = found["processes"]
    assert process["node"] == NODE
    assert process["environment"]["dtt"].startswith(__version__)
    assert process["environment"]["torch"] == torch.__version__
    assert process["disk"]["path"] == str(dtt.folder)
    assert [one["device"] for one in process["devices"]] == ["cpu"]
    assert list(dtt.folder.iterdir()) == []


@pytest.mark.slow
def test_problems_are_reported_after_all_checks(dtt: Dtt) -> None:
    done = dtt("doctor", "--path", "/proc/1", "--device", "cuda", expect=ExitCode.UNFIT)
    assert "environment\n  dtt " in done.stdout
    assert "no problems found" not in done.stdout
    assert "2 problems\nthe file system does not allow us to write a file\n" in done.stderr
    assert "torch sees no GPU" in done.stderr
    options = ["--processes=1", "--path=/proc/1", "--json", "--device=cpu"]
    done = dtt.wait(dtt.start("doctor", *options))
    assert done.returncode == ExitCode.UNFIT
    assert "dtt: this machine is not fit" in done.stderr.partition("ChildFailedError")[2]
    found = json.loads(done.stdout)
    assert not found["fit"]
    (problem,) = found["problems"]
    assert "where: /proc/1 on node" in problem
    assert found["processes"][0]["devices"]


@pytest.mark.slow
def test_two_ranks_of_torchrun_run_collectives_and_rank_0_reports(dtt: Dtt) -> None:
    done = dtt.wait(dtt.start("doctor", "--processes", 2, "--device", "cpu"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert f"  {NODE}: 2 x cpu, " in done.stdout
    assert "  processes     2 (torchrun)" in lines
    assert lines.count("environment") == 1
    assert sum(line.startswith("  all_reduce ") for line in lines) == 9
    assert sum(line.startswith("  swap within a node ") for line in lines) == 2
    assert lines[-1] == "no problems found"


@pytest.mark.slow
def test_rank_0_of_srun_reports_the_bad_disk_of_another_node(dtt: Dtt, tmp_path: Path) -> None:
    store, processes = rendezvous(), []
    for rank, folder in enumerate((tmp_path, "/proc/1")):
        variables: dict[str, Any] = {
            "SLURM_PROCID": rank, "SLURM_LOCALID": 0, "SLURM_STEP_ID": 0, "SLURM_NODEID": rank,
            "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,  # ours: rank 0 binds no port
        }  # fmt: skip
        env = {name: str(value) for name, value in variables.items()}
        command = ["doctor", "--device", "cpu", "--path", str(folder), "--json"]
        processes.append(ForkedDtt(command, dtt.folder, env))
    first, second = map(dtt.wait, processes)
    assert (first.returncode, second.returncode) == (ExitCode.UNFIT, 0), first.stderr
    assert second.stdout == ""
    found = json.loads(first.stdout)
    assert len(found["exchanges"]) == 47
    unwritable, unshared = found["problems"]
    assert f"/proc/1 on node {NODE}" in unwritable
    assert "rank 1 does not see the files of rank 0" in unshared


def test_processes_option_is_refused_under_a_launcher(dtt: Dtt) -> None:
    launcher = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    done = dtt("doctor", "--processes", 2, expect=ExitCode.USAGE, **launcher)
    assert "torchrun has already started 2 processes" in done.stderr


def test_an_unknown_device_is_refused(dtt: Dtt) -> None:
    done = dtt("doctor", "--device=gpu", expect=ExitCode.USAGE)
    assert "--device gpu is not one of auto, cpu, cuda" in done.stderr
