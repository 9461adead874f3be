"""Count the jobs that differ after SIGKILLs of random processes, launchers included.

    ./env.sh python benchmarks/kill_any.py [KILLS] [SEED]

Runs inside dtt's environment, which has torchrun and mpirun on PATH.

Half of the kills hit `dtt train` under torchrun (one and two ranks), half `dtt tokenize` under
mpirun (one to three ranks). The victim is any process of the job: torchrun or mpirun itself, the
MPI process manager that starts the ranks, or a rank. A kill may come at any time after the start of
the launcher. Then the same command runs again: in half of the cases as soon as the launcher has
ended, otherwise after all processes have ended. A training job gets up to ten kills, then runs to
its end.

Every file and loss is compared with those of an undisturbed run. Anything else that a job needs to
continue counts as a manual step, such as ending a process that is left 30 s after a kill, or
repeating a command that was refused.
All runs must execute the same code: do not edit the source meanwhile.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from itertools import count
from pathlib import Path

import psutil
import tokenize_kills
from jobs import (
    differences,
    differing_names,
    make_tokens,
    require_programs,
    results,
    wait_until,
)
from kills import STEPS, settings

from dtt.artifacts.jobdir import JobDir
from dtt.base import local

LIMIT = 30.0
"""Seconds after a kill in which all processes of a job must have ended."""
PATIENCE = 600.0
"""Timeout of an undisturbed run, in seconds."""
KILLS_PER_JOB = 10
MARK = "KILL_ANY_START"
"""Environment variable that all processes of one start inherit.

A name with the prefix DTT_ would be read as a configuration key.
"""
STARTS = count()


class Processes:
    """All processes of one start, found by an inherited variable, even after reparenting."""

    def __init__(self) -> None:
        """Mark the environment, so that all processes started from now on belong to this object."""
        self._mark = f"{os.getpid()}-{next(STARTS)}"
        os.environ[MARK] = self._mark

    def alive(self) -> list[psutil.Process]:
        """Return the processes that have not ended."""
        alive = []
        for process in psutil.process_iter():
            try:
                marked = process.environ().get(MARK) == self._mark
                if marked and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
            except psutil.Error:
                continue
        return alive

    def kill_random(self, rng: random.Random) -> str | None:
        """Kill a random one and return its role; None if all had ended."""
        for process in rng.sample(alive := self.alive(), len(alive)):
            try:
                role = _role(process)
                process.kill()
            except psutil.Error:
                continue
            return role
        return None

    def wait_and_kill(self, since: float) -> list[str]:
        """Wait for the end of all; kill and return the roles of those left after `LIMIT` s.

        `LIMIT` counts from `since`, a time of `time.monotonic`.
        """
        wait_until(lambda: not self.alive(), max(0.0, since + LIMIT - time.monotonic()), pause=0.05)
        leftover = self.alive()
        for process in leftover:
            process.kill()
        return [_role(process) for process in leftover]


def _role(process: psutil.Process) -> str:
    """Return the role of a process in the job."""
    command = " ".join(process.cmdline())
    for name in ("torch.distributed.run", "hydra_pmi_proxy", "mpiexec", "mpirun"):
        if name in command.partition(" dtt")[0]:
            return {"torch.distributed.run": "torchrun", "mpiexec": "mpirun"}.get(name, name)
    env = process.environ()
    return "rank" if "RANK" in env or "PMI_RANK" in env else "starting"


def _random_delay(rng: random.Random, duration: float) -> float:
    """Return the time of a kill, in seconds from the start; a third fall into the first two."""
    return rng.random() * (min(2.0, duration) if rng.random() < 1 / 3 else duration)


class Tally:
    """Counts and problems of all kills."""

    def __init__(self) -> None:
        """Start with zero counts."""
        self.kills: Counter[str] = Counter()
        self.early = 0
        """Kills in the first second."""
        self.jobs = self.different = 0
        self.manual: list[str] = []
        self.slowest = 0.0
        """Seconds from a kill until all processes of that start had ended."""

    def add_kill(self, kind: str, role: str, after: float) -> None:
        """Count a kill."""
        self.kills[f"{kind}: {role}"] += 1
        self.early += after < 1.0
        print(f"{self.kills.total()}: {kind}, {role} after {after:.1f} s", flush=True)

    def add_manual_step(self, description: str) -> None:
        """Count and print something that a job needed to continue."""
        self.manual.append(description)
        print(description, flush=True)

    def add_job(self, name: str, differing: list[str]) -> None:
        """Count a finished job; `differing` names the results that differ from the reference."""
        self.jobs += 1
        self.different += bool(differing)
        if differing:
            print(f"{name}: different: {', '.join(differing)}", flush=True)

    def wait_for_end(self, processes: Processes, since: float) -> None:
        """Wait for the end of all processes, and count those left as a manual step."""
        if leftover := processes.wait_and_kill(since):
            self.add_manual_step(f"left after {LIMIT:.0f} s: {', '.join(leftover)}")
        self.slowest = max(self.slowest, time.monotonic() - since)


def ended(process: subprocess.Popen[bytes]) -> bool:
    """Return True if a process has ended."""
    return process.poll() is not None


def start_training(folder: Path, name: str, ranks: int, tokens: Path) -> subprocess.Popen[bytes]:
    """Start `dtt train` under torchrun; its output is appended to a log of the job."""
    argv = local.torchrun_argv(ranks, settings(tokens, name, ()))
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(argv, cwd=folder, stdout=log, stderr=log)


def train(folder: Path, tokens: Path, kills: int, rng: random.Random, tally: Tally) -> None:
    """Kill processes of training jobs."""
    references, durations = {}, {}
    for ranks in (1, 2):
        start = time.monotonic()
        launcher = start_training(folder, f"undisturbed-{ranks}", ranks, tokens)
        assert launcher.wait(PATIENCE) == 0, (folder / f"undisturbed-{ranks}.log").read_text()
        durations[ranks] = time.monotonic() - start
        references[ranks] = results(JobDir(folder / f"jobs/undisturbed-{ranks}"), STEPS)
    for number in count():
        if kills <= 0:
            return
        ranks, name = 2 - number % 2, f"disturbed-{number}"
        max_kills = min(KILLS_PER_JOB, kills)
        kills -= run_with_kills(
            folder, name, ranks, tokens, max_kills, durations[ranks], rng, tally
        )
        tally.add_job(name, differences(JobDir(folder / f"jobs/{name}"), STEPS, references[ranks]))


def run_with_kills(
    folder: Path,
    name: str,
    ranks: int,
    tokens: Path,
    max_kills: int,
    duration: float,
    rng: random.Random,
    tally: Tally,
) -> int:
    """Run a job to its end through up to `max_kills` kills, and return their number.

    `duration`: of the job without kills, in seconds.
    """
    failures = kills = 0
    previous: tuple[Processes, float] | None = None
    while True:
        processes, start = Processes(), time.monotonic()
        launcher = start_training(folder, name, ranks, tokens)
        if previous is not None:
            tally.wait_for_end(*previous)
            previous = None
        end = start + (_random_delay(rng, duration) if kills < max_kills else PATIENCE)
        wait_until(partial(ended, launcher), end - time.monotonic(), pause=0.01)
        if launcher.poll() is None and (role := processes.kill_random(rng)) is not None:
            killed_at = time.monotonic()
            tally.add_kill(f"train, {ranks} ranks", role, killed_at - start)
            kills += 1
            wait_until(partial(ended, launcher), LIMIT)
            if rng.random() < 0.5:
                tally.wait_for_end(processes, killed_at)
            else:
                previous = processes, killed_at
        elif launcher.wait() == 0:
            return kills
        else:
            tail = "\n".join((folder / f"{name}.log").read_text().splitlines()[-30:])
            tally.add_manual_step(f"{name} was refused or failed:\n{tail}")
            failures += 1
            if failures == 3:
                return kills


def tokenize(folder: Path, kills: int, rng: random.Random, tally: Tally) -> None:
    """Kill processes of `dtt tokenize` runs."""
    tokenize_kills.write_corpus(folder)
    start = time.monotonic()
    undisturbed = tokenize_kills.Job(folder, "undisturbed", "mpirun", 1)
    assert undisturbed.wait(PATIENCE) is not None, undisturbed.output()
    duration = time.monotonic() - start
    assert undisturbed.succeeded(), undisturbed.output()
    expected = tokenize_kills.checksums(folder / "undisturbed")
    while kills > 0:
        ranks, out = rng.choice([1, 2, 3]), folder / "out"
        processes, start = Processes(), time.monotonic()
        job = tokenize_kills.Job(folder, out.name, "mpirun", ranks)
        job.wait(_random_delay(rng, duration))
        role = processes.kill_random(rng) if job.running() else None
        if role is not None:
            kills -= 1
            killed_at = time.monotonic()
            tally.add_kill(f"tokenize, {ranks} ranks", role, killed_at - start)
            job.wait(LIMIT)
            if rng.random() < 0.5:
                tally.wait_for_end(processes, killed_at)
            rerun_processes = Processes()
            rerun = tokenize_kills.Job(folder, out.name, "mpirun", rng.choice([1, 2, 3]))
            tally.wait_for_end(processes, killed_at)
            if rerun.wait(PATIENCE) is None or not rerun.succeeded():
                tally.add_manual_step(f"tokenize, the rerun failed: {rerun.output()[-1000:]}")
            tally.add_job("tokenize", differing_names(tokenize_kills.checksums(out), expected))
            rerun_processes.wait_and_kill(time.monotonic())
        job.wait(PATIENCE)
        shutil.rmtree(out, ignore_errors=True)


def main() -> None:
    """Kill, run again and compare; print the counts."""
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    rng = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    require_programs("torchrun", "mpirun")
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    tally, start = Tally(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dtt-kill-any-") as name:
        folder = Path(name)
        train(folder, make_tokens(folder), kills - kills // 2, rng, tally)
        tokenize(folder, kills // 2, rng, tally)
    for victim, number in sorted(tally.kills.items()):
        print(f"{victim:<34}{number:>5}")
    print(
        f"{tally.kills.total()} kills, {tally.early} of them in the first second, in "
        f"{time.monotonic() - start:.0f} s: {tally.different} of {tally.jobs} jobs differ, "
        f"{len(tally.manual)} manual steps; all processes had ended {tally.slowest:.1f} s after "
        "a kill at the latest"
    )
    sys.exit(bool(tally.different or tally.manual))


if __name__ == "__main__":
    main()
