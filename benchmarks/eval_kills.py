"""Count the result files that differ after SIGKILLs of `dtt eval`.

    python benchmarks/eval_kills.py [KILLS] [SEED]

A small job is evaluated on tasks of every type, in one or two processes. A random process gets
SIGKILL at a random time, most often when the files have grown by a random number of bytes; the
others must then end by themselves. The same command, with a random number of processes, continues
until nothing is left to do. Then all result files must equal those of an undisturbed evaluation,
bit for bit, and a new evaluation starts from nothing. All runs must execute the same code: do not
edit the source meanwhile.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from jobs import dtt, free_port, make_tokens, rank_environment, wait_until

from dtt import main

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch._dynamo",
        "dtt.evaluate.evaluation",
        "dtt.evaluate.tasks.runner",
        "dtt.jobs.attempt",
    ]
)
QUESTIONS = 1000
SHARE_AT_START = 0.1
"""Share of the kills that come while a process starts, or soon after."""
LIMIT = 60.0
"""Seconds within which the other process must have ended."""
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
TASKS = {
    "sums": 'type: multiple_choice\nprompt: "Q: {question}"\nchoices: "{choices}"\ngold: "{gold}"',
    "words": 'type: cloze\nprompt: "{question}"\nanswer: "{answer}"',
    "names": 'type: schema\nchoices: "{choices}"\nanswer: "{answer}"\ngold: "{gold}"',
    "pages": 'type: rolling\nanswer: "{text}"',
    "replies": 'type: generation\nprompt: "{question}"\nanswer: "{answer}"\nmax_tokens: 4',
}
EVALS = Path("jobs/run/evals")


def write_tasks(folder: Path) -> None:
    """Write a task of each type, all about the same rows."""
    drawn = random.Random(0)
    rows = [
        {
            "question": " ".join(drawn.choices(WORDS, k=drawn.randint(3, 20))),
            "choices": [" ".join(drawn.choices(WORDS, k=drawn.randint(1, 4))) for _ in range(4)],
            "gold": drawn.randrange(4),
            "answer": drawn.choice(WORDS),
            "text": " ".join(drawn.choices(WORDS, k=drawn.randint(3, 60))),
        }
        for _ in range(QUESTIONS)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, definition in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"{definition}\ndata: {{file: rows.jsonl}}\n")


def evaluate(folder: Path, env: dict[str, str]) -> None:
    """Become a process of `dtt eval`."""
    os.chdir(folder)
    os.environ.update(env)
    log = os.open("output.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = ["dtt", "eval", "jobs/run", "--tasks", ",".join(f"{name}.yaml" for name in TASKS)]
    main.main()


def start(folder: Path, ranks: int) -> list[ForkServerProcess]:
    """Start `dtt eval` on `ranks` processes, forked from one that has imported the libraries."""
    port = free_port()
    processes = [
        CONTEXT.Process(
            target=evaluate,
            args=(folder, rank_environment(rank, ranks, port) if ranks > 1 else {}),
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    return processes


def ended(processes: list[ForkServerProcess]) -> bool:
    """Return True if no process is left."""
    return all(process.exitcode is not None for process in processes)


def size(folder: Path) -> int:
    """Return the number of bytes in all result files."""
    return sum(path.stat().st_size for path in (folder / EVALS).glob("*/*.jsonl"))


def files(folder: Path) -> dict[str, bytes]:
    """Return the content of all result files."""
    return {path.name: path.read_bytes() for path in (folder / EVALS).glob("*/*.jsonl")}


def measure() -> None:
    """Kill, continue and compare until there were enough kills; exit with 1 after a difference."""
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    drawn, tally = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = make_tokens(folder)
        dtt(
            "train", f"data.tokens={tokens}", "model.dim=32", "model.n_layers=2", "model.n_heads=2",
            "train.steps=20", "train.seq_len=128", "train.global_batch_tokens=512",
            "train.micro_batch=4", "schedule.warmup=2", folder=folder,
        )  # fmt: skip
        write_tasks(folder)
        began = time.monotonic()
        processes = start(folder, 1)
        wait_until(lambda: any((folder / EVALS).glob("*/*.jsonl")), 600)
        before_first = time.monotonic() - began
        assert wait_until(lambda: ended(processes), 600)
        duration = time.monotonic() - began
        total = size(folder)
        expected = files(folder)
        assert len(expected) == len(TASKS), (folder / "output.log").read_text()
        print(
            f"undisturbed: {duration:.0f} s, the first file after {before_first:.0f} s", flush=True
        )
        shutil.rmtree(folder / EVALS)
        while tally["kills"] < kills:
            processes = start(folder, drawn.choice((1, 2)))
            if drawn.random() < SHARE_AT_START:
                wait_until(lambda: ended(processes), drawn.uniform(0, before_first))  # noqa: B023
            else:
                enough = size(folder) + drawn.uniform(0, total / 2)
                wait_until(lambda: ended(processes) or size(folder) > enough, 600)  # noqa: B023
            if not ended(processes):
                drawn.choice(processes).kill()
                tally["kills"] += 1
                if not wait_until(lambda: ended(processes), LIMIT, pause=0.01):  # noqa: B023
                    tally["left over"] += 1
                    for process in processes:
                        process.kill()
                continue
            tally["evaluations"] += 1
            tally["different"] += files(folder) != expected
            print(dict(tally), flush=True)
            shutil.rmtree(folder / EVALS)
        while not all(process.exitcode == 0 for process in processes):
            processes = start(folder, drawn.choice((1, 2)))
            wait_until(lambda: ended(processes), 600)  # noqa: B023
        tally["evaluations"] += 1
        tally["different"] += files(folder) != expected
    for what in ("kills", "evaluations", "different", "left over"):
        print(f"{what:<12} {tally[what]:>4}")
    sys.exit(bool(tally["different"] or tally["left over"]))


if __name__ == "__main__":
    measure()
