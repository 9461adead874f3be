"""Count the jobs that differ after SIGKILLs of random processes, launchers included.

    python benchmarks/kill_any.py [KILLS] [SEED]

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
from kills import content, differs, settings
from runs import make_tokens, wait_until

from dtt.launch import local
from dtt.runtime.jobdir import JobDir

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
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get(MARK) == self._mark
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def strike(self, rng: random.Random) -> str | None:
        """Kill a random one and return its role; None if all had ended."""
        for process in rng.sample(alive := self.alive(), len(alive)):
            try:
                what = _role(process)
                process.kill()
            except psutil.Error:
                continue
            return what
        return None

    def left(self, since: float) -> list[str]:
        """Wait for the end of all; kill and return the roles of those left after `LIMIT` s.

        `LIMIT` counts from `since`, a time of `time.monotonic`.
        """
        wait_until(lambda: not self.alive(), max(0.0, since + LIMIT - time.monotonic()), pause=0.05)
        found = self.alive()
        for process in found:
            process.kill()
        return [_role(process) for process in found]


def _role(process: psutil.Process) -> str:
    """Return the role of a process in the job."""
    command = " ".join(process.cmdline())
    for name in ("torch.distributed.run", "hydra_pmi_proxy", "mpiexec", "mpirun"):
        if name in command.partition(" dtt")[0]:
            return {"torch.distributed.run": "torchrun", "mpiexec": "mpirun"}.get(name, name)
    env = process.environ()
    return "rank" if "RANK" in env or "PMI_RANK" in env else "starting"


def _moment(rng: random.Random, length: float) -> float:
    """Return the time of a kill, in seconds from the start; a third fall into the first two."""
    return rng.random() * (min(2.0, length) if rng.random() < 1 / 3 else length)


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

    def struck(self, kind: str, what: str, after: float) -> None:
        """Count a kill."""
        self.kills[f"{kind}: {what}"] += 1
        self.early += after < 1.0
        print(f"{self.kills.total()}: {kind}, {what} after {after:.1f} s", flush=True)

    def ended(self, processes: Processes, since: float) -> None:
        """Wait for the end of all processes, and count those left as a manual step."""
        if left := processes.left(since):
            self.manual.append(f"left after {LIMIT:.0f} s: {', '.join(left)}")
            print(self.manual[-1], flush=True)
        self.slowest = max(self.slowest, time.monotonic() - since)


def over(process: subprocess.Popen[bytes]) -> bool:
    """Return True if a process has ended."""
    return process.poll() is not None


def start_training(folder: Path, name: str, ranks: int, tokens: Path) -> subprocess.Popen[bytes]:
    """Start `dtt train` under torchrun; its output is appended to a log of the job."""
    argv = local.torchrun_argv(ranks, settings(tokens, name, ()))
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(argv, cwd=folder, stdout=log, stderr=log)


def train(folder: Path, tokens: Path, kills: int, rng: random.Random, tally: Tally) -> None:
    """Kill processes of training jobs."""
    right, lengths = {}, {}
    for ranks in (1, 2):
        began = time.monotonic()
        whole = start_training(folder, f"undisturbed-{ranks}", ranks, tokens)
        assert whole.wait(PATIENCE) == 0, (folder / f"undisturbed-{ranks}.log").read_text()
        lengths[ranks] = time.monotonic() - began
        right[ranks] = content(JobDir(folder / f"jobs/undisturbed-{ranks}"))
    for number in count():
        if kills <= 0:
            return
        ranks, name = 2 - number % 2, f"disturbed-{number}"
        most = min(KILLS_PER_JOB, kills)
        kills -= disturb(folder, name, ranks, tokens, most, lengths[ranks], rng, tally)
        tally.jobs += 1
        tally.different += differs(JobDir(folder / f"jobs/{name}"), right[ranks])


def disturb(
    folder: Path,
    name: str,
    ranks: int,
    tokens: Path,
    kills: int,
    length: float,
    rng: random.Random,
    tally: Tally,
) -> int:
    """Run a job to its end through up to `kills` kills, and return how many there were.

    `length`: duration of the job without kills, in seconds.
    """
    refused = struck = 0
    before: tuple[Processes, float] | None = None
    while True:
        processes, began = Processes(), time.monotonic()
        launcher = start_training(folder, name, ranks, tokens)
        if before is not None:
            tally.ended(*before)
            before = None
        moment = began + (_moment(rng, length) if struck < kills else PATIENCE)
        wait_until(partial(over, launcher), moment - time.monotonic(), pause=0.01)
        if launcher.poll() is None and (what := processes.strike(rng)) is not None:
            killed = time.monotonic()
            tally.struck(f"train, {ranks} ranks", what, killed - began)
            struck += 1
            wait_until(partial(over, launcher), LIMIT)
            if rng.random() < 0.5:
                tally.ended(processes, killed)
            else:
                before = processes, killed
        elif launcher.wait() == 0:
            return struck
        else:
            tail = "\n".join((folder / f"{name}.log").read_text().splitlines()[-30:])
            tally.manual.append(f"{name} was refused or failed:\n{tail}")
            print(tally.manual[-1], flush=True)
            refused += 1
            if refused == 3:
                return struck


def tokenize(folder: Path, kills: int, rng: random.Random, tally: Tally) -> None:
    """Kill processes of `dtt tokenize` runs."""
    tokenize_kills.write_corpus(folder)
    began = time.monotonic()
    whole = tokenize_kills.Job(folder, "undisturbed", "mpirun", 1)
    assert whole.wait(PATIENCE) is not None, whole.said()
    length = time.monotonic() - began
    assert whole.succeeded(), whole.said()
    expected = tokenize_kills.sums(folder / "undisturbed")
    while kills > 0:
        ranks, out = rng.choice([1, 2, 3]), folder / "out"
        processes, began = Processes(), time.monotonic()
        job = tokenize_kills.Job(folder, out.name, "mpirun", ranks)
        job.wait(_moment(rng, length))
        what = processes.strike(rng) if job.running() else None
        if what is not None:
            kills -= 1
            killed = time.monotonic()
            tally.struck(f"tokenize, {ranks} ranks", what, killed - began)
            job.wait(LIMIT)
            if rng.random() < 0.5:
                tally.ended(processes, killed)
            again_processes = Processes()
            again = tokenize_kills.Job(folder, out.name, "mpirun", rng.choice([1, 2, 3]))
            tally.ended(processes, killed)
            if again.wait(PATIENCE) is None or not again.succeeded():
                tally.manual.append(f"tokenize, the rerun failed: {again.said()[-1000:]}")
                print(tally.manual[-1], flush=True)
            tally.jobs += 1
            tally.different += tokenize_kills.sums(out) != expected
            again_processes.left(time.monotonic())
        job.wait(PATIENCE)
        shutil.rmtree(out, ignore_errors=True)


def main() -> None:
    """Kill, run again and compare; print the counts."""
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    rng = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    tally, began = Tally(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dtt-kill-any-") as name:
        folder = Path(name)
        train(folder, make_tokens(folder), kills - kills // 2, rng, tally)
        tokenize(folder, kills // 2, rng, tally)
    for what, number in sorted(tally.kills.items()):
        print(f"{what:<34}{number:>5}")
    print(
        f"{tally.kills.total()} kills, {tally.early} of them in the first second, in "
        f"{time.monotonic() - began:.0f} s: {tally.different} of {tally.jobs} jobs differ, "
        f"{len(tally.manual)} manual steps; all processes had ended {tally.slowest:.1f} s after "
        "a kill at the latest"
    )
    sys.exit(bool(tally.different or tally.manual))


if __name__ == "__main__":
    main()
