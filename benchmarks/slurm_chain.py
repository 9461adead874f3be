"""Measure the cost of real Slurm time limits: a job with them against the same job without.

    ./env.sh python benchmarks/slurm_chain.py [LIMITS]

Runs inside dtt's environment, which has torchrun on PATH. Needs $SLURM_CONF of a Slurm with two
nodes and short limits, such as start-slurm.sh creates. The limit is one minute, Slurm's minimum,
and dtt is asked to save 30 s before it; Slurm checks limits about twice a minute. The job is long
enough to reach LIMITS (3) of them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jobs import METRICS, differences, dtt, make_tokens, require_programs, results
from measurement import Table

from dtt.artifacts.jobdir import JobDir
from dtt.base import local
from dtt.track import jsonl

LEAD_SECONDS = 30
"""Seconds before a time limit at which dtt is asked to save."""
PROBE_STEPS = 200


def train_without_slurm(folder: Path, arguments: list[str]) -> None:
    """Train on two processes of this machine, in `folder`."""
    command = local.torchrun_argv(2, ["train", *arguments])
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def seconds_per_step(folder: Path) -> float:
    """Return the mean duration of a training step, measured by a job without Slurm."""
    train_without_slurm(folder, settings("probe", PROBE_STEPS))
    records = jsonl.read(JobDir(folder / "jobs/probe").metrics, "perf")
    return statistics.fmean([record["seconds_per_step"] for record in records][1:])


def settings(name: str, steps: int) -> list[str]:
    """Return the settings of a small model with a checkpoint every 500 steps."""
    return [
        f"name={name}", f"train.steps={steps}", "data.tokens=tokens", "model.dim=16",
        "model.n_layers=2", "model.n_heads=2", "model.dropout=0.1", "train.seq_len=32",
        "train.micro_batch=4", "train.global_batch_tokens=256", "train.eval_every=500",
        "train.sample_tokens=0", "train.log_every=20", "checkpoint.every=500",
    ]  # fmt: skip


def train_through_slurm(folder: Path, steps: int) -> float:
    """Submit the job, wait for its end and return the seconds; it resumes after each limit."""
    start = time.monotonic()
    limits = ("launch.nodes=2", "launch.time=1", f"launch.lead_seconds={LEAD_SECONDS}")
    dtt("submit", "train", *settings("limited", steps), *limits, "-y", folder=folder)
    while state(folder) != "done":
        time.sleep(2)
    return time.monotonic() - start


def state(folder: Path) -> str:
    """Return the state of the job."""
    status: dict[str, str] = json.loads(
        dtt("job", "status", "jobs/limited", "--json", folder=folder)
    )
    return status["state"]


def print_attempts(job: JobDir) -> None:
    """Print a row for each attempt of the job."""
    table = Table("attempt", 9, {"exit code": 11, "step": 8})
    for number in range(1, job.attempt() + 1):
        record = job.exit_record(number)
        assert record is not None
        reasons = [line.strip() for line in record["reason"].splitlines() if "why:" in line]
        reason = reasons[0].removeprefix("why:").strip() if reasons else record["reason"]
        table.row(str(number), str(record["code"]), str(record["step"]), note=reason)


def main() -> None:
    """Train with limits and without, and compare."""
    require_programs("torchrun", "sbatch")
    limits = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="dtt-slurm-") as name:
        folder = Path(name)
        make_tokens(folder)
        steps = round(limits * LEAD_SECONDS / seconds_per_step(folder))
        with_limits = train_through_slurm(folder, steps)
        start = time.monotonic()
        train_without_slurm(folder, settings("free", steps))
        without = time.monotonic() - start
        limited, free = JobDir(folder / "jobs/limited"), JobDir(folder / "jobs/free")
        print_attempts(limited)
        differing = differences(limited, steps, results(free, steps))
        print(f"{steps} steps: {with_limits:.0f} s with limits, {without:.0f} s without")
        print(f"final weights and states equal bit for bit: {set(differing) <= {METRICS}}")
        print(f"metrics equal: {METRICS not in differing}")
        if differing:
            sys.exit(f"different: {', '.join(differing)}")


if __name__ == "__main__":
    main()
