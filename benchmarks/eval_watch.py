"""Count the checkpoints that watches of a job miss or evaluate twice.

    ./env.sh python benchmarks/eval_watch.py [CHECKPOINTS] [WATCHES]

A job saves a checkpoint (default: 20 of them) every few steps and keeps only the newest two, while
several watches (default: two) evaluate each of them. An evaluation takes longer than the training
between two checkpoints, so most are deleted by the job before they are evaluated: only the hard
links of the watches keep them. Every checkpoint must be evaluated once, and no link may be left.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from jobs import DTT, dtt, make_tokens, wait_until

from dtt.artifacts.jobdir import JobDir
from dtt.checkpoint import store
from dtt.track import jsonl

EVERY = 20
"""Steps between checkpoints."""
QUESTIONS = 1500


def write_task(folder: Path) -> None:
    """Write a task with `QUESTIONS` questions."""
    rows = ({"n": i, "next": i + 1, "wrong": 7 * i} for i in range(QUESTIONS))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "next.yaml").write_text(
        "type: multiple_choice\ndata: {file: rows.jsonl}\nprompt: 'after {n} comes'\n"
        "choices: ['{next}', '{wrong}']\ngold: 0\n"
    )


def main() -> None:
    """Train, watch, and print the counts; exit with 1 if one is wrong."""
    given = [int(argument) for argument in sys.argv[1:]]
    checkpoints, watches = (*given, *(20, 2)[len(given) :])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tokens = make_tokens(folder)
        write_task(folder)
        settings = [
            f"data.tokens={tokens}", "name=t", "model.dim=64", "model.n_layers=2",
            "model.n_heads=2", f"train.steps={checkpoints * EVERY}", "train.seq_len=64",
            "train.micro_batch=4", "train.global_batch_tokens=256", "train.eval_every=0",
            "train.sample_tokens=0", f"checkpoint.every={EVERY}", "checkpoint.keep_last=2",
            "schedule.warmup=2", "eval.batch_tokens=256",
        ]  # fmt: skip
        job = JobDir(folder / "jobs/t")
        job.root.mkdir(parents=True)
        # As `dtt submit train` does: the watches may then start before the training.
        job.config.write_text(dtt("config", "show", *settings, folder=folder))
        found = measure(folder, job, settings, watches)
    print("| measurement | value |\n| --- | --- |")
    for name, value in found.items():
        print(f"| {name} | {value} |")
    expected = {"checkpoints": checkpoints, "evaluated": checkpoints, "twice": 0, "links left": 0}
    sys.exit(any(found[name] != value for name, value in expected.items()))


def measure(folder: Path, job: JobDir, settings: list[str], watches: int) -> dict[str, object]:
    """Run the job and its watches; return the counts and the times."""
    command = [*DTT, "eval", "jobs/t", "--watch", "--tasks", "next.yaml", "--json"]
    logs = [folder / f"watch-{number}" for number in range(watches)]
    running = []
    for log in logs:
        with log.with_suffix(".out").open("w") as out, log.with_suffix(".err").open("w") as err:
            running.append(subprocess.Popen(command, cwd=folder, stdout=out, stderr=err))
    errors = [log.with_suffix(".err") for log in logs]
    if not wait_until(lambda: all("watching" in e.read_text() for e in errors), 120, 0.1):
        raise RuntimeError("\n".join(e.read_text() for e in errors))
    began, most = time.monotonic(), 0
    training = subprocess.Popen(
        [*DTT, "train", *settings], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while training.poll() is None:
        most = max(most, len([*job.evals.glob("*/checkpoint-*")]))
        time.sleep(0.1)
    trained = time.monotonic() - began
    codes = [process.wait(timeout=600) for process in running]
    if training.returncode or any(codes):
        raise RuntimeError("\n".join(e.read_text() for e in errors))
    shares = [
        [json.loads(line)["step"] for line in log.with_suffix(".out").read_text().splitlines()]
        for log in logs
    ]
    steps = Counter(step for share in shares for step in share)
    return {
        "checkpoints": len({record["step"] for record in jsonl.read(job.metrics, "save")}),
        "kept by the job": len(store.steps(job.checkpoints)),
        "evaluated": len(steps),
        "twice": sum(count > 1 for count in steps.values()),
        "by each watch": ", ".join(str(len(share)) for share in shares),
        "most that waited at once": most,
        "links left": len([*job.evals.glob("*/checkpoint-*")]),
        "seconds of training": round(trained, 1),
        "seconds until all were evaluated": round(time.monotonic() - began, 1),
    }


if __name__ == "__main__":
    main()
