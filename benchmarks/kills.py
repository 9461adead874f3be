"""Check that runs killed repeatedly end bit for bit like undisturbed runs.

    python benchmarks/kills.py [KILLS] [SEED]

Runs of one and of two ranks (DDP replicas or FSDP2 shards) with Muon, dropout, accumulation,
evaluation, samples and asynchronous saves. A random rank gets SIGKILL at a random moment and the
same command is started again, up to ten times per run; then the run may end. Every checkpoint file
of the last step and every loss is compared with those of an undisturbed run. As under torchrun, the
other rank then gets SIGTERM, and SIGKILL if it does not end (it may be blocked in a collective).
Anything else that a run needs to resume counts as a manual step.
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from jobs import differences, make_tokens, results, wait_until
from runs import Run, Torchrun

from dtt.artifacts.jobdir import JobDir

STEPS = 120
KILLS_PER_JOB = 10
FSDP2 = ("parallel.shard=2",)


def settings(tokens: Path, name: str, layout: Sequence[str]) -> list[str]:
    """Return the arguments of a run."""
    return [
        "train", f"data.tokens={tokens}", f"name={name}", "model.dim=32", "model.n_layers=2",
        "model.n_heads=2", "model.dropout=0.1", f"train.steps={STEPS}", "train.seq_len=32",
        "train.micro_batch=2", "train.global_batch_tokens=256", "train.eval_every=7",
        "train.log_every=3", "train.sample_every=10", "train.sample_tokens=4",
        "checkpoint.every=4", "schedule.warmup=2", *layout,
    ]  # fmt: skip


def last_step(job: JobDir) -> int:
    """Return the newest recorded step."""
    return job.last_step() or 0


def kill_random_rank(run: Run, job: JobDir, rng: random.Random, phases: Counter[str]) -> bool:
    """Kill a random rank of a run within its next steps; return False if it ended first."""
    rank = rng.randrange(run.ranks)
    ahead = max(0, rng.randrange(-4, 16))
    target = last_step(job) + ahead
    wait_until(lambda: not run.running() or last_step(job) >= target, 60)
    delay = rng.random() * (0.15 if ahead else 1.5)  # steps are short, start-up is long
    wait_until(lambda: not run.running(), delay)
    if rank not in run.running():
        return False
    unobserved = "unknown, under torchrun" if isinstance(run, Torchrun) else "start-up"
    phases[run.phases.current(rank) or unobserved] += 1
    run.kill(rank)
    return True


def run_with_kills(
    run: Callable[[], Run], job: JobDir, max_kills: int, rng: random.Random, phases: Counter[str]
) -> tuple[int, int]:
    """Run a job to its end through up to `max_kills` kills.

    Return the number of kills and of manual steps.
    """
    kills = manual = 0
    while True:
        started = run().start()
        kills += kills < max_kills and kill_random_rank(started, job, rng, phases)
        manual += not started.wait(180)
        if started.killed_in:
            print(
                f"{job.root.name}: ranks needed SIGKILL in {', '.join(started.killed_in)}",
                file=sys.stderr,
            )
        codes = set(started.codes.values())
        if codes == {0}:
            return kills, manual
        if codes - {0, 1, -signal.SIGKILL}:
            print(f"{job.root.name}: ended with {codes}", file=sys.stderr)
            return kills, manual + 1


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    rng = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    kinds: dict[str, tuple[type[Run], int, tuple[str, ...]]] = {
        "1 rank": (Run, 1, ()),
        "2 ranks": (Run, 2, ()),
        "2 ranks, torchrun": (Torchrun, 2, ()),
        "2 ranks, FSDP2": (Run, 2, FSDP2),
        "2 ranks, FSDP2, torchrun": (Torchrun, 2, FSDP2),
    }
    kills: Counter[str] = Counter()
    jobs: Counter[str] = Counter()
    phases: Counter[str] = Counter()
    different = manual = 0
    with tempfile.TemporaryDirectory(prefix="dtt-kills-") as name:
        folder = Path(name)
        tokens = make_tokens(folder)
        references: dict[tuple[int, tuple[str, ...]], dict[str, Any]] = {}
        for i, (ranks, layout) in enumerate({kind[1:] for kind in kinds.values()}):
            job = JobDir(folder / f"jobs/undisturbed-{i}")
            run = Run(folder, ranks, settings(tokens, job.root.name, layout)).start()
            run.wait(300)
            assert set(run.codes.values()) == {0}, (folder / "log").read_text()
            references[ranks, layout] = results(job, STEPS)
        for kind in cycle(kinds):
            if kills.total() >= count:
                break
            start, ranks, layout = kinds[kind]
            job = JobDir(folder / f"jobs/{jobs.total()}-disturbed")
            make = partial(start, folder, ranks, settings(tokens, job.root.name, layout))
            max_kills = min(KILLS_PER_JOB, count - kills.total())
            job_kills, job_manual = run_with_kills(make, job, max_kills, rng, phases)
            jobs[kind] += 1
            kills[kind] += job_kills
            manual += job_manual
            if names := differences(job, STEPS, references[ranks, layout]):
                different += 1
                print(f"{job.root.name}: different: {', '.join(names)}", file=sys.stderr)
    print(f"{'':<26}{'jobs':>6}{'kills':>7}")
    for kind in kinds:
        print(f"{kind:<26}{jobs[kind]:>6}{kills[kind]:>7}")
    print("killed during:", ", ".join(f"{what} {n}" for what, n in phases.most_common()))
    print(f"{kills.total()} kills: {different} jobs that differ in any bit, {manual} manual steps")


if __name__ == "__main__":
    main()
