"""Check that a killed run with a time budget ends in time: annealed, validated and saved.

    python benchmarks/budget.py [--seconds 300] [--kills 2] [--seed 0] [--data DIR]

Trains a small Llama with `train.budget` on the novels in `$DTT_SHARED/data` (`../shared` by
default). The run gets SIGKILL at random moments, and the same command is started again. The time
compared with the budget is the wall time of all its processes, which this script measures.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jobs import DTT, SHARED_DATA, make_novel_tokens

from dtt.artifacts.jobdir import JobDir
from dtt.checkpoint import store
from dtt.config.load import load_job
from dtt.optim.schedule import Decay
from dtt.track import jsonl


def settings(tokens: Path, seconds: int) -> list[str]:
    """Return the arguments of the run."""
    return [
        "train", f"data.tokens={tokens}", "name=budget", f"train.budget={seconds}s",
        "train.steps=1_000_000", "schedule.warmup=20", "schedule.decay=20%", "model.dim=64",
        "model.n_layers=2", "model.n_heads=2", "train.seq_len=256", "train.micro_batch=4",
        "train.global_batch_tokens=1024", "train.eval_every=100", "train.eval_tokens=16384",
        "train.sample_tokens=16", "checkpoint.every=50",
    ]  # fmt: skip


def attempt(command: list[str], folder: Path, limit: float | None) -> tuple[float, int]:
    """Run `command` and kill it after `limit` seconds.

    Return its wall time in seconds and its exit code.
    """
    start = time.monotonic()
    with (folder / "log").open("a") as log:
        process = subprocess.Popen(command, cwd=folder, stderr=log, stdout=log)
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return time.monotonic() - start, process.returncode


def report(job: JobDir, seconds: float, budget: int) -> None:
    """Print the final state of the job."""
    newest = store.newest(job.checkpoints)
    assert newest is not None
    position = newest.position()
    decay = Decay(**position["decay"])
    peak = load_job(job.root).optim.lr
    rates = [record["lr"] / peak for record in jsonl.read(job.metrics, "train")]
    evals = list(jsonl.read(job.metrics, "eval"))
    stable = [record["loss"] for record in evals if record["step"] <= decay.begin]
    print(f"ended             {seconds:.1f} s of {budget} s: {budget - seconds:+.1f} s left")
    clocks = [json.loads(job.clock(n).read_bytes()) for n in range(1, job.attempt() + 1)]
    attempts = ", ".join(f"{clock['seconds']:.1f}" for clock in clocks)
    print(f"by dtt's clock    {attempts} s")
    print(f"steps             {newest.step}, planned {decay.end}; decay from {decay.begin + 1}")
    print(f"last rates        {', '.join(f'{rate:.4f}' for rate in rates[-3:])} of the peak")
    print(f"last validation   {evals[-1]['loss']:.4f} nats at step {evals[-1]['step']}")
    print(f"before the decay  {stable[-1]:.4f} nats")
    print(f"last checkpoint   step {newest.step}, verified")


def main() -> None:
    """Run, kill, resume and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=SHARED_DATA / "novels")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="dtt-budget-") as name:
        folder = Path(name)
        first_file = min(options.data.glob("train-*.parquet"))
        tokens = make_novel_tokens(folder, first_file, 2048)
        command = [*DTT, *settings(tokens, options.seconds)]
        # One kill at a random moment of each of equal parts of the budget, so the decay may be hit.
        part = options.seconds / (options.kills + 1)
        durations: list[float] = []
        for number in range(options.kills):
            kill_at = part * (number + rng.uniform(0.3, 1.3))
            seconds, code = attempt(command, folder, max(1.0, kill_at - sum(durations)))
            durations.append(seconds)
            print(f"attempt {number + 1}: {seconds:.1f} s, exit code {code}", flush=True)
        seconds, code = attempt(command, folder, None)
        durations.append(seconds)
        print(f"attempt {len(durations)}: {seconds:.1f} s, exit code {code}")
        if code != 0:
            sys.exit((folder / "log").read_text())
        report(JobDir(folder / "jobs/budget"), sum(durations), options.seconds)


if __name__ == "__main__":
    main()
