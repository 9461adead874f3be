"""Ranks end within seconds when their launcher has been killed, whatever they are doing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.running import Dtt, wait_until

from dtt.base.files import exclusive

Settings = Callable[..., list[str]]
HANG = "import time\nfrom dtt.mesh.process import command\nwith command(): time.sleep(600)"


def running(process: psutil.Process) -> bool:
    """Return True unless a process has ended, collected by its parent or not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def watched(process: psutil.Process) -> bool:
    """Return True if a thread beside the main one is there: the one that watches the launcher."""
    return running(process) and process.num_threads() > 1


@pytest.fixture
def clean() -> Iterator[list[psutil.Process]]:
    """Processes that must not outlive the test."""
    started: list[psutil.Process] = []
    yield started
    for process in started:
        if running(process):
            process.kill()


def torchrun(dtt: Dtt, *arguments: object, **env: str) -> subprocess.Popen[str]:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2)
    return dtt.start_python(*launcher, "-m", "dtt.main", *arguments, **env)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["imports", "rendezvous", "steps"])
def test_ranks_end_with_torchrun_in_every_phase_and_let_go_of_the_job(
    dtt: Dtt, tiny: Settings, clean: list[psutil.Process], phase: str
) -> None:
    """In the rendezvous rank 0 waits in C++ for rank 1, which comes late."""
    job = dtt.folder / "jobs/t"
    late = "import os, time; time.sleep(600 * (os.environ.get('RANK') == '1'))"
    (dtt.folder / "sitecustomize.py").write_text(late if phase == "rendezvous" else "")
    agent = torchrun(
        dtt, "train", *tiny(train__steps=100_000), PYTHONPATH=str(dtt.folder), OMP_NUM_THREADS="1"
    )
    launcher = psutil.Process(agent.pid)
    wait_until(lambda: len(launcher.children()) == 2)
    ranks = launcher.children()
    clean.extend(ranks)
    if phase == "rendezvous":
        wait_until((job / "attempts/1").exists)
        time.sleep(1)
        ranks = [process for process in ranks if process.environ()["RANK"] == "0"]
    elif phase == "steps":
        wait_until((job / "metrics.jsonl").exists)
        wait_until(lambda: '"train"' in (job / "metrics.jsonl").read_text())
    agent.kill()
    wait_until(lambda: not any(map(running, ranks)))
    with exclusive(job, "dtt train", patience=200):  # as the next start of the job does
        pass
    for process in clean:  # one may still sleep before its first line of dtt
        if running(process):
            process.kill()
    if phase != "imports":
        assert "torchrun has ended, and with it this rank" in Dtt.wait(agent).stderr
        record = json.loads((job / "attempts/1/attempt.json").read_text())
        assert record["code"] == 78
        assert record["reason"].startswith("torchrun has ended")


@pytest.mark.parametrize("victim", ["mpirun", "the process manager"])
def test_ranks_end_with_mpirun_and_its_process_manager(
    clean: list[psutil.Process], victim: str
) -> None:
    mpirun = shutil.which("mpirun", path=Path(sys.executable).parent)
    if mpirun is None:
        pytest.skip("no mpirun")
    job = subprocess.Popen([mpirun, "-n", "2", sys.executable, "-c", HANG])
    launcher = psutil.Process(job.pid)
    wait_until(lambda: len(launcher.children(recursive=True)) == 3)
    (manager,) = launcher.children()
    ranks = manager.children()
    clean.extend([*ranks, manager, launcher])
    wait_until(lambda: all(map(watched, ranks)))
    (launcher if victim == "mpirun" else manager).kill()
    wait_until(lambda: not any(map(running, ranks)))
    job.kill()
    job.wait()


AS_TASK = """
import os, subprocess, sys
env = os.environ | {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "1"}
wrapper = ["bash", "-c", "\\"$@\\"; exit", "bash"]
subprocess.run([*wrapper, sys.executable, "-c", sys.argv[1]], env=env)
"""


def test_a_task_of_srun_ends_with_its_step_daemon_also_below_a_shell(
    clean: list[psutil.Process],
) -> None:
    daemon = subprocess.Popen([sys.executable, "-c", AS_TASK, HANG], stderr=subprocess.PIPE)
    launcher = psutil.Process(daemon.pid)
    wait_until(lambda: len(launcher.children(recursive=True)) == 2)
    below = launcher.children(recursive=True)
    clean.extend(below)
    task = below[-1]
    wait_until(lambda: watched(task))
    daemon.kill()
    wait_until(lambda: not running(task))
    assert daemon.stderr is not None
    assert b"Slurm's step daemon has ended" in daemon.stderr.read()


@pytest.mark.slow
def test_ranks_that_a_person_started_outlive_the_shell(clean: list[psutil.Process]) -> None:
    by_hand = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    shell = subprocess.run(
        ["bash", "-c", '"$0" -c "$1" >/dev/null 2>&1 & echo $!', sys.executable, HANG],
        env=os.environ | by_hand, capture_output=True, text=True, check=True,
    )  # fmt: skip
    rank = psutil.Process(int(shell.stdout))
    clean.append(rank)
    time.sleep(3)
    assert running(rank)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_the_rendezvous_ends_a_rank_at_once(
    dtt: Dtt, tiny: Settings, clean: list[psutil.Process], number: signal.Signals
) -> None:
    """torchrun sends it on; without a thread that acts on it, it takes 30 s and a SIGKILL."""
    late = "import os, signal, time\nif os.environ.get('RANK') == '1':\n"
    late += f"    signal.signal({int(number)}, signal.SIG_IGN)\n    time.sleep(600)"
    (dtt.folder / "sitecustomize.py").write_text(late)
    job = dtt.folder / "jobs/t"
    agent = torchrun(
        dtt, "train", *tiny(train__steps=100_000), PYTHONPATH=str(dtt.folder), OMP_NUM_THREADS="1"
    )
    wait_until((job / "attempts/1").exists)
    ranks = psutil.Process(agent.pid).children()
    clean.extend([*ranks, psutil.Process(agent.pid)])
    time.sleep(1)
    waiting, late_one = sorted(ranks, key=lambda process: process.environ()["RANK"])
    agent.send_signal(number)
    wait_until(lambda: not running(waiting))
    late_one.kill()
    stopped = Dtt.wait(agent)
    assert "stopped before the first step of this attempt" in stopped.stderr
    record = json.loads((job / "attempts/1/attempt.json").read_text())
    assert (record["code"], number.name in record["reason"]) == (75, True)
