"""Count the commands that end differently after SIGKILLs.

    python benchmarks/kills.py WORK [KILLS] [SEED]

WORK is one of

    train      `dtt train` under torchrun, on one rank, two replicas, shards, stages or ranks that
               share experts, with Muon,
               dropout, accumulation, evaluation, samples and asynchronous saves
    tokenize   `dtt tokenize` on one to three ranks, under mpirun or with the file-based rendezvous
               of a plain `srun`; each start has another number of ranks
    clean      `dtt clean` of exact and near duplicates, on one to three ranks like tokenize
    eval       `dtt eval` on tasks of every type, in one or two processes
    pipeline   `dtt pipeline`: three stages of pretraining and one of fine-tuning, in one or two
               processes; done stages must not be started again

The victim is any process of the command (its launcher, MPI's process manager, a rank), or all of
them, as when a node is lost. A kill comes at a random time, often in the first two seconds, or
within a second after a file that the command writes at a border of its phases. Then the same
command runs again: in half of the cases as soon as the launcher has ended, otherwise after all
processes have. After up to ten kills it runs to its end.

All results are compared bit for bit with those of an undisturbed command. Anything else that it
needs to continue counts as a manual step, such as ending a process that is left 30 s after a kill,
or repeating a command that was refused. All runs must execute the same code: do not edit the source
meanwhile.
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count, cycle
from pathlib import Path

import psutil
from killable import WORKS, Results, Work
from measurement import parser_of, wait_until

LIMIT = 30.0
"""Seconds after a kill in which all processes of a command must have ended."""
PATIENCE = 600.0
"""Timeout of an undisturbed command, in seconds."""
KILLS_PER_JOB = 10
BORDER_SECONDS = 1.0
"""Longest time between the appearance of a file at a border and the kill."""
MARK = "KILLS_START"
"""Environment variable that all processes of one start inherit.

A name with the prefix DTT_ would be read as a configuration key.
"""
STARTS = count()


class Command:
    """One start of a command, with all of its processes, even those with another parent."""

    def __init__(self, work: Work, folder: Path, variant: str) -> None:
        """Start the command in `folder`; its output is appended to `folder/log`."""
        self._mark = f"{os.getpid()}-{next(STARTS)}"
        self.started = time.monotonic()
        self._may_be_killed = partial(work.may_be_killed, folder, variant)
        with (folder / "log").open("ab") as log:
            self._main = [
                subprocess.Popen(
                    argv, cwd=folder, env=os.environ | env | {MARK: self._mark},
                    stdout=log, stderr=log,
                )
                for argv, env in work.commands(variant)
            ]  # fmt: skip

    def ended(self) -> bool:
        """Return True if the processes that were started directly have ended."""
        return all(process.poll() is not None for process in self._main)

    def succeeded(self) -> bool:
        """Return True if all of them ended with code 0."""
        return all(process.poll() == 0 for process in self._main)

    def wait(self, due: Callable[[], object]) -> bool:
        """Wait until the command may be killed and `due()` holds; False if it ended before."""
        wait_until(lambda: self.ended() or (self._may_be_killed() and due()), PATIENCE, pause=0.002)
        return not self.ended()

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

    def kill(self, rng: random.Random) -> str | None:
        """Kill a random process, or all; return the role of the victim, None if all had ended."""
        victims = rng.sample(alive := self.alive(), len(alive))
        everything = len(alive) > 1 and rng.random() < 1 / 4
        roles = kill_all(victims if everything else victims[:1])
        return ("all" if everything else roles[0]) if roles else None


def kill_all(processes: Sequence[psutil.Process]) -> list[str]:
    """Kill processes, and return the roles of those that had not ended."""
    roles = []
    for process in processes:
        with suppress(psutil.Error):
            role = role_of(process)
            process.kill()
            roles.append(role)
    return roles


def role_of(process: psutil.Process) -> str:
    """Return the role of a process in its command."""
    program = " ".join(process.cmdline()).partition(" dtt")[0]
    for part, role in (
        ("torch.distributed.run", "torchrun"), ("hydra_pmi_proxy", "MPI's process manager"),
        ("mpiexec", "mpirun"), ("mpirun", "mpirun"),
    ):  # fmt: skip
        if part in program:
            return role
    ranks = {"RANK", "PMI_RANK", "SLURM_PROCID"}
    return "rank" if ranks & process.environ().keys() else "main process"


class Tally:
    """Counts and problems of all kills."""

    def __init__(self) -> None:
        self.kills: Counter[str] = Counter()
        """Kills by victim."""
        self.early = 0
        """Kills in the first second."""
        self.jobs = self.different = self.manual = 0
        self.slowest = 0.0
        """Seconds from a kill until all processes of that start had ended."""

    def add_kill(self, victim: str, after: float) -> None:
        """Count a kill, `after` seconds from the start."""
        self.kills[victim] += 1
        self.early += after < 1.0
        print(f"{self.kills.total()}: {victim} after {after:.1f} s", flush=True)

    def add_manual_step(self, description: str) -> None:
        """Count and print something that a command needed to continue."""
        self.manual += 1
        print(description, flush=True)

    def add_job(self, name: str, differing: Sequence[str]) -> None:
        """Count a finished job; `differing` names the results that differ."""
        self.jobs += 1
        self.different += bool(differing)
        if differing:
            print(f"{name}: different: {', '.join(differing)}", flush=True)

    def wait_for_end(self, command: Command, since: float) -> None:
        """Wait for the end of all processes; count those left as a manual step, and kill them."""
        limit = max(0.0, since + LIMIT - time.monotonic())
        if not wait_until(lambda: not command.alive(), limit, pause=0.05):
            left = kill_all(command.alive())
            self.add_manual_step(f"left after {LIMIT:.0f} s: {', '.join(left)}")
        self.slowest = max(self.slowest, time.monotonic() - since)

    def report(self, seconds: float) -> None:
        """Print the counts."""
        for victim, number in sorted(self.kills.items()):
            print(f"{victim:<40}{number:>5}")
        print(
            f"{self.kills.total()} kills in {seconds:.0f} s, {self.early} in the first second of a "
            f"start: {self.different} of {self.jobs} jobs differ, {self.manual} manual steps; "
            f"all processes had ended {self.slowest:.1f} s later at the latest"
        )


def moment(work: Work, folder: Path, rng: random.Random, duration: float) -> Callable[[], object]:
    """Return a condition that holds when the next kill is due.

    `duration`: of the command without kills, in seconds.
    """
    when, start = rng.random(), time.monotonic()
    borders = [path for path in work.borders(folder) if not path.exists()]
    if when < 1 / 3 and borders:
        path, delay = rng.choice(borders), rng.random() * BORDER_SECONDS
        return lambda: path.exists() and not wait_until(lambda: False, delay)
    delay = rng.random() * (min(2.0, duration) if when > 2 / 3 else duration)
    return lambda: time.monotonic() > start + delay


def kill_and_repeat(
    work: Work, folder: Path, variant: str, kills: int, duration: float,
    rng: random.Random, tally: Tally,
) -> int:  # fmt: skip
    """Run a command to its end through up to `kills` kills, and return their number."""
    killed = failures = 0
    previous: tuple[Command, float] | None = None
    while failures < 3:
        if work.any_variant:
            variant = rng.choice(list(work.variants))
        command = Command(work, folder, variant)
        if previous is not None:
            tally.wait_for_end(*previous)
            previous = None
        due = moment(work, folder, rng, duration) if killed < kills else command.ended
        if command.wait(due) and (victim := command.kill(rng)) is not None:
            killed_at = time.monotonic()
            tally.add_kill(f"{variant}, {victim}", killed_at - command.started)
            killed += 1
            wait_until(command.ended, LIMIT)
            if work.overlaps and rng.random() < 0.5:
                previous = command, killed_at
            else:
                tally.wait_for_end(command, killed_at)
        elif wait_until(command.ended, PATIENCE) and command.succeeded():
            break
        else:
            failures += 1
            tail = "\n".join((folder / "log").read_text().splitlines()[-30:])
            tally.add_manual_step(f"{folder.name} was refused or failed:\n{tail}")
    return killed


def differences(actual: Results, expected: Results) -> list[str]:
    """Return the names whose values differ, or which only one of both has, sorted."""
    names = actual.keys() | expected.keys()
    return sorted(name for name in names if actual.get(name) != expected.get(name))


def records_only_in(some: Results, others: Results) -> list[object]:
    """Return the records of metrics.jsonl in `some` that `others` lacks."""
    found, known = some.get("metrics"), others.get("metrics")
    if not isinstance(found, list) or not isinstance(known, list):
        return []
    return [record for record in found if record not in known]


def undisturbed(work: Work, folder: Path, variant: str) -> tuple[Results, float]:
    """Return the results of a command that nothing disturbs, and its duration in seconds."""
    command = Command(work, folder, variant)
    assert wait_until(command.ended, PATIENCE), (folder / "log").read_text()
    assert command.succeeded(), (folder / "log").read_text()
    return work.results(folder), time.monotonic() - command.started


def main() -> None:
    """Kill, run again and compare; print the counts."""
    parser = parser_of(__doc__)
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("kills", nargs="?", type=int, default=100)
    parser.add_argument("seed", nargs="?", type=int, default=0)
    options = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    work = WORKS[options.work]()
    rng, tally, start = random.Random(options.seed), Tally(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dtt-kills-") as name:
        template = Path(name) / "template"
        template.mkdir()
        work.prepare(template)
        references: dict[str, tuple[Results, float]] = {}
        left = options.kills
        for number, variant in enumerate(cycle(work.variants)):
            if left <= 0:
                break
            if variant not in references:
                folder = Path(name) / f"undisturbed-{len(references)}"
                shutil.copytree(template, folder)
                references[variant] = undisturbed(work, folder, variant)
            expected, duration = references[variant]
            folder = Path(name) / f"disturbed-{number}"
            shutil.copytree(template, folder)
            most = min(KILLS_PER_JOB, left)
            left -= kill_and_repeat(work, folder, variant, most, duration, rng, tally)
            found = work.results(folder)
            tally.add_job(folder.name, differences(found, expected))
            # A rare difference is not seen again: its records say where to look.
            for who, some, others in (("only", found, expected), ("lacks", expected, found)):
                for record in records_only_in(some, others):
                    print(f"{folder.name} {who} {record}", flush=True)
            shutil.rmtree(folder)
    tally.report(time.monotonic() - start)
    sys.exit(bool(tally.different or tally.manual))


if __name__ == "__main__":
    main()
