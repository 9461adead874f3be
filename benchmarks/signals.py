"""Check that requests to save, or to save and stop, succeed in every phase of a run.

    python benchmarks/signals.py [REQUESTS] [SEED]

Runs of two ranks with accumulation, evaluation, samples and asynchronous saves get SIGTERM, SIGINT
or SIGUSR2 on a random rank, `control/stop` or `control/save`, each aimed at a phase. `fired` counts
requests by the phase of the rank when it received the signal, or of rank 0 when the file was
written. `saved` counts runs that ended with exit code 75 and a verified checkpoint at the step in
exit.json (in start-up there is nothing to save: exit code 75 alone); for `control/save`, requests
that were acknowledged and followed by a verified checkpoint while the run continued. Every other
run resumes a stopped one.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from jobs import make_tokens, wait_until
from runs import PHASES as ALL_PHASES
from runs import Run

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import DttError
from dtt.checkpoint import store

HOW = ("SIGTERM", "SIGINT", "SIGUSR2", "control/stop", "control/save")
PHASES = [name for name in ALL_PHASES if name]


def settings(tokens: Path, name: str) -> list[str]:
    """Return the arguments of a run whose phases take long enough to be hit."""
    return [
        "train", f"data.tokens={tokens}", f"name={name}", "model.dim=128", "model.n_layers=2",
        "model.n_heads=2", "train.steps=100000", "train.seq_len=64", "train.micro_batch=2",
        "train.global_batch_tokens=1024", "train.eval_every=8", "train.log_every=4",
        "train.sample_every=8", "train.sample_tokens=24", "checkpoint.every=3",
        "checkpoint.keep_last=4", "train.precision=fp32",
    ]  # fmt: skip


def request(run: Run, job: JobDir, how: str, phase: str, rng: random.Random) -> str | None:
    """Send a request while a rank is in `phase`.

    Return the rank's actual phase, or None if the run had ended.
    """
    alone = how.startswith("control") or phase == "sample"  # rank 0 handles these
    rank = 0 if alone else rng.randrange(run.ranks)
    wait_until(lambda: run.phases.current(rank) == phase or not run.running(), 60, pause=0.0002)
    time.sleep(rng.random() * (0.002 if phase == "save" else 0.02))
    if not run.running():
        return None
    if how.startswith("control"):
        actual = run.phases.current(rank)
        path = job.stop if how == "control/stop" else job.save
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"benchmark: {how} {phase}\n")
        return actual
    os.kill(run.pids[rank], signal.Signals[how])
    wait_until(lambda: run.phases.at_signal(rank) or rank not in run.running(), 30, pause=0.0002)
    # In start-up a separate thread handles the signal at once, so no phase is recorded.
    unrecorded = "start-up" if phase == "start-up" else "signal not received"
    return run.phases.at_signal(rank) or unrecorded


def stop_outcome(run: Run, job: JobDir, phase: str) -> str:
    """Return `saved`, or the reason why the stop request failed."""
    if not run.wait():
        return "did not end"
    if phase == "start-up":  # nothing to save
        return "saved" if set(run.codes.values()) == {75} else f"codes {run.codes}"
    record = job.exit_record(job.attempt())
    if record is None:
        return "no exit.json"
    if record["code"] != 75:
        return f"code {record['code']}: {record['reason'].splitlines()[0]}"
    return verify(job, record["step"])


def verify(job: JobDir, step: int | None) -> str:
    """Return `saved` if the checkpoint of `step` (None: step 0) verifies, else the error."""
    try:
        store.verify(store.folder_of(job.checkpoints, step or 0))
    except DttError as error:
        return str(error).splitlines()[0]
    return "saved"


def save_outcome(run: Run, job: JobDir) -> str:
    """Return `saved`, or the reason why the save request failed; the run continues after it."""

    def acknowledged() -> int | None:
        try:
            record = json.loads(job.acknowledged.read_bytes())
        except OSError:
            return None
        return int(record["step"]) if record["request"] == "save" else None

    if not wait_until(lambda: acknowledged() is not None or not run.running(), 60):
        return "not acknowledged"
    step = acknowledged()
    if step is None:
        return "ended"
    # The ranks agree on the request before a step and save after it.
    wanted = {step + 1, step} if step else {1}
    if not wait_until(lambda: wanted & set(store.steps(job.checkpoints)), 60):
        return f"no checkpoint of step {step + 1}"
    return verify(job, max(wanted & set(store.steps(job.checkpoints))))


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 240
    rng = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    fired: Counter[tuple[str, str]] = Counter()
    followed: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory(prefix="dtt-signals-") as name:
        folder = Path(name)
        tokens = make_tokens(folder)
        n = jobs = 0
        while fired.total() < count:
            how, phase = HOW[n % len(HOW)], PHASES[(n // len(HOW)) % len(PHASES)]
            jobs += n % 2 == 0
            n += 1
            job = JobDir(folder / f"jobs/job-{jobs}")
            job.acknowledged.unlink(missing_ok=True)
            run = Run(folder, 2, settings(tokens, job.root.name)).start()
            actual = request(run, job, how, phase, rng)
            if actual is None:
                print(f"{how}: the run ended before {phase}", file=sys.stderr)
                continue
            fired[actual, how] += 1
            if how == "control/save":
                outcome = save_outcome(run, job)
            else:
                outcome = stop_outcome(run, job, actual)
            followed[actual, how] += outcome == "saved"
            if outcome != "saved":
                print(f"{how} in {actual}: {outcome}", file=sys.stderr)
            for rank in run.running():
                os.kill(run.pids[rank], signal.SIGTERM)
            run.wait()
    print(f"{'saved of fired':<22}" + "".join(f"{how:>14}" for how in HOW) + f"{'all':>12}")
    rows = [*PHASES, *sorted({phase for phase, _ in fired} - set(PHASES))]
    for row in [*rows, "all"]:
        cells = []
        for how in [*HOW, "all"]:
            keys = [k for k in fired if row in (k[0], "all") and how in (k[1], "all")]
            cells.append(f"{sum(followed[k] for k in keys)} of {sum(fired[k] for k in keys)}")
        print(f"{row:<22}" + "".join(f"{cell:>14}" for cell in cells[:-1]) + f"{cells[-1]:>12}")
    print(f"{followed.total() / fired.total():.1%} of {fired.total()} requests were followed")


if __name__ == "__main__":
    main()
