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

from runs import Run, Torchrun, make_tokens, wait_until

from dtt.checkpoint import store
from dtt.errors import DttError
from dtt.runtime.jobdir import JobDir
from dtt.track import jsonl

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


def reached(job: JobDir) -> int:
    """Return the newest recorded step."""
    return job.last_step() or 0


def killed(run: Run, job: JobDir, rng: random.Random, doing: Counter[str]) -> bool:
    """Kill a random rank of a run within its next steps; return False if it ended first."""
    rank = rng.randrange(run.ranks)
    ahead = max(0, rng.randrange(-4, 16))
    target = reached(job) + ahead
    wait_until(lambda: not run.running() or reached(job) >= target, 60)
    moment = rng.random() * (0.15 if ahead else 1.5)  # steps are short, start-up is long
    wait_until(lambda: not run.running(), moment)
    if rank not in run.running():
        return False
    unseen = "unknown, under torchrun" if isinstance(run, Torchrun) else "start-up"
    doing[run.board.doing(rank) or unseen] += 1
    run.kill(rank)
    return True


def content(job: JobDir) -> dict[str, Any]:
    """Return what must be equal: the files of the last checkpoint, and all losses and samples."""
    folder = store.folder_of(job.checkpoints, STEPS)
    names = [file.path for file in store.verify(folder).manifest.files]
    found: dict[str, Any] = {name: (folder / name).read_bytes() for name in names}
    position = store.verify(folder).position()
    position.pop("run_id", None)  # differs between jobs
    records = [r for r in jsonl.read(job.metrics) if r["kind"] in ("train", "eval", "sample")]
    return found | {store.POSITION: position, "metrics": records}


def disturbed(
    run: Callable[[], Run], job: JobDir, most: int, rng: random.Random, doing: Counter[str]
) -> tuple[int, int]:
    """Run a job to its end through up to `most` kills.

    Return the number of kills and of manual steps.
    """
    kills = manual = 0
    while True:
        started = run().start()
        kills += kills < most and killed(started, job, rng, doing)
        manual += not started.wait(180)
        if started.put_down:
            print(f"{job.root.name}: put down in {', '.join(started.put_down)}", file=sys.stderr)
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
    doing: Counter[str] = Counter()
    different = manual = 0
    with tempfile.TemporaryDirectory(prefix="dtt-kills-") as name:
        folder = Path(name)
        tokens = make_tokens(folder)
        right = {}
        for i, (ranks, layout) in enumerate({kind[1:] for kind in kinds.values()}):
            job = JobDir(folder / f"jobs/undisturbed-{i}")
            run = Run(folder, ranks, settings(tokens, job.root.name, layout)).start()
            run.wait(300)
            assert set(run.codes.values()) == {0}, (folder / "log").read_text()
            right[ranks, layout] = content(job)
        for kind in cycle(kinds):
            if kills.total() >= count:
                break
            start, ranks, layout = kinds[kind]
            job = JobDir(folder / f"jobs/{jobs.total()}-disturbed")
            make = partial(start, folder, ranks, settings(tokens, job.root.name, layout))
            most = min(KILLS_PER_JOB, count - kills.total())
            struck, by_hand = disturbed(make, job, most, rng, doing)
            jobs[kind] += 1
            kills[kind] += struck
            manual += by_hand
            different += differs(job, right[ranks, layout])
    print(f"{'':<26}{'jobs':>6}{'kills':>7}")
    for kind in kinds:
        print(f"{kind:<26}{jobs[kind]:>6}{kills[kind]:>7}")
    print("killed during:", ", ".join(f"{what} {n}" for what, n in doing.most_common()))
    print(f"{kills.total()} kills: {different} jobs that differ in any bit, {manual} manual steps")


def differs(job: JobDir, right: dict[str, Any]) -> bool:
    """Return True if the results of a finished job differ from `right`; print where."""
    try:
        found = content(job)
    except DttError as error:
        print(f"{job.root.name}: {error}", file=sys.stderr)
        return True
    wrong = [name for name in right.keys() | found.keys() if found.get(name) != right.get(name)]
    if wrong:
        print(f"{job.root.name}: other {', '.join(sorted(wrong))}", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    main()
