"""Measure the cost of real Slurm time limits: a job with them against the same job without.

    python benchmarks/slurm_chain.py [LIMITS]

Needs $SLURM_CONF of a Slurm with two nodes and short limits, such as start-slurm.sh creates. The
limit is one minute, Slurm's minimum, and dtt is asked to save 30 s before it; Slurm checks limits
about twice a minute. The job is long enough to reach LIMITS (3) of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SECONDS_BEFORE_A_LIMIT = 30
PROBE_STEPS = 200


def dtt(*arguments: str) -> str:
    """Return the output of a dtt command."""
    command = [sys.executable, "-m", "dtt.main", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def train(keys: list[str]) -> None:
    """Train on two processes, without Slurm."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc_per_node=2", "-m", "dtt.main", "train", *keys]
    subprocess.run(command, check=True, capture_output=True)


def settings(name: str, steps: int) -> list[str]:
    """Return the settings of a small model with a checkpoint every 500 steps."""
    return [
        f"name={name}", f"train.steps={steps}", "data.tokens=tokens", "model.dim=16",
        "model.n_layers=2", "model.n_heads=2", "model.dropout=0.1", "train.seq_len=32",
        "train.micro_batch=4", "train.global_batch_tokens=256", "train.eval_every=500",
        "train.sample_tokens=0", "train.log_every=20", "checkpoint.every=500",
    ]  # fmt: skip


def make_tokens() -> None:
    lines = (" ".join(str((i * 7 + j * j) % 97) for j in range(40)) for i in range(2000))
    Path("text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    dtt("download", "-d", "text.jsonl")
    dtt(
        "tokenize", "-d", "text.jsonl", "tokenizer.vocab_size=300", "tokenize.out=tokens",
        "tokenize.validation_fraction=0.1",
    )  # fmt: skip


def records(job: Path, *kinds: str) -> list[dict[str, Any]]:
    lines = (job / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] in kinds]


def through_slurm(steps: int) -> float:
    """Submit the job, wait for its end and return the seconds; it continues after each limit."""
    began = time.monotonic()
    limits = ("launch.nodes=2", "launch.time=1", f"launch.lead_seconds={SECONDS_BEFORE_A_LIMIT}")
    dtt("submit", "train", *settings("limited", steps), *limits, "-y")
    while json.loads(dtt("job", "status", "jobs/limited", "--json"))["state"] != "done":
        time.sleep(2)
    return time.monotonic() - began


def tensors(job: Path, steps: int) -> dict[str, bytes]:
    folder = job / f"checkpoints/step-{steps:06d}"
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def main() -> None:
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make_tokens()
        train(settings("probe", PROBE_STEPS))
        perf = records(Path("jobs/probe"), "perf")[1:]
        seconds_per_step = sum(record["seconds_per_step"] for record in perf) / len(perf)
        steps = round(wanted * SECONDS_BEFORE_A_LIMIT / seconds_per_step)
        took = through_slurm(steps)
        began = time.monotonic()
        train(settings("free", steps))
        without = time.monotonic() - began
        limited, free = Path("jobs/limited"), Path("jobs/free")
        print(f"{'attempt':<9}{'exit code':<11}{'step':<8}reason")
        for path in sorted((limited / "attempts").iterdir()):
            record = json.loads((path / "exit.json").read_text())
            why = [x.strip() for x in record["reason"].splitlines() if "why:" in x]
            reason = why[0].removeprefix("why:").strip() if why else record["reason"]
            print(f"{path.name:<9}{record['code']:<11}{record['step']:<8}{reason}")
        same = tensors(limited, steps) == tensors(free, steps) != {}
        measured = ("train", "eval")
        print(f"{steps} steps: {took:.0f} s with limits, {without:.0f} s without")
        print(f"final weights and states equal bit for bit: {same}")
        print(f"metrics equal: {records(limited, *measured) == records(free, *measured)}")


if __name__ == "__main__":
    main()
