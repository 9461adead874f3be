"""Count the stages of training that differ after SIGKILLs of a pipeline, borders included.

    ./env.sh python benchmarks/stage_kills.py [KILLS] [SEED]

Runs inside dtt's environment, which has torchrun on PATH.

`dtt pipeline` downloads and tokenizes two small corpora and conversations, trains `STAGES` on them
one after the other, in one or two processes, and exports the last. Half of the kills come at a
random time, half within a second after the files of a border appear: the last checkpoint of a
stage, its exit record, or the first files of the next stage. The victims are one process (the
pipeline, torchrun or a rank) or all of them, as when a node is lost. Then the same command runs
again, up to ten times; then it runs to its end.

The last checkpoint of every stage, and all of its losses and samples, are compared bit for bit with
those of an undisturbed pipeline. A stage must not be started again once it is done. Anything else
that a pipeline needs to continue counts as a manual step. All runs must execute the same code: do
not edit the source meanwhile.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from jobs import DTT, differences, require_programs, results, wait_until, write_documents
from kill_any import KILLS_PER_JOB, LIMIT, PATIENCE, Processes, Tally, ended

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ExitCode

COMMON: dict[str, Any] = {
    "name": "chain",
    "model": {"dim": 32, "n_layers": 2, "n_heads": 2, "dropout": 0.1},
    "download": {"dataset": "counting.jsonl"},
    "tokenizer": {"vocab_size": 300, "chat_tokens": True},
    "tokenize": {"validation_fraction": 0.1, "unit_bytes": 8192},
    "train": {
        "seq_len": 32, "micro_batch": 2, "global_batch_tokens": 256, "eval_every": 7,
        "log_every": 3, "sample_every": 10, "sample_tokens": 4, "ema_decay": 0.9,
    },
    "checkpoint": {"every": 4},
    "schedule": {"warmup": 2},
}  # fmt: skip
STAGES: list[dict[str, Any]] = [
    {"name": "pretrain", "optim": {"lr": 1e-3}, "train": {"steps": 40}},
    {
        "name": "midtrain", "seed": 1, "download": {"dataset": "counting-again.jsonl"},
        "optim": {"lr": 5e-4}, "train": {"steps": 30}, "init": {"optimizer": "carry"},
    },
    {
        "name": "long", "optim": {"lr": 1e-4}, "train": {"steps": 20, "seq_len": 64},
        "init": {"average": True},
    },
    {
        "name": "sft", "data": {"type": "chat"}, "download": {"dataset": "questions.jsonl"},
        "optim": {"lr": 1e-4},
        "train": {"epochs": 2, "seq_len": 64, "eval_answer_tokens": 8},
    },
]  # fmt: skip
"""Entries of `stages`; each may have any keys of the configuration."""
STEPS = {"pretrain": 40, "midtrain": 30, "long": 20, "sft": 102}
BORDER_SECONDS = 1.0
"""Longest time between the appearance of a file of a border and the kill."""


def write_conversations(path: Path) -> None:
    """Write 300 conversations, each with one question and an answer of varying length."""
    with path.open("w") as file:
        for i in range(300):
            question = {"role": "user", "content": f"Count to {i % 17}."}
            answer = {"role": "assistant", "content": " ".join(map(str, range(1, i % 17 + 1)))}
            file.write(json.dumps({"messages": [question, answer]}) + "\n")


class Chain:
    """A pipeline in a folder of its own, which is started until it ends."""

    def __init__(self, folder: Path, processes: int) -> None:
        """Write the corpora and the configuration; training runs in `processes` processes."""
        folder.mkdir()
        for name, step in (("counting", 7), ("counting-again", 3)):
            write_documents(folder / f"{name}.jsonl", step)
        write_conversations(folder / "questions.jsonl")
        config = COMMON | {"stages": STAGES, "pipeline": {"train_processes": processes}}
        (folder / "chain.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        self.folder = folder
        self.log = folder / "log"

    def start(self) -> subprocess.Popen[bytes]:
        """Start the pipeline; its output is appended to the log."""
        with self.log.open("ab") as log:
            argv = [*DTT, "pipeline", "-c", "chain.yaml"]
            return subprocess.Popen(argv, cwd=self.folder, stdout=log, stderr=log)

    def jobs(self) -> dict[str, tuple[JobDir, int]]:
        """Return the job of each stage and its number of steps, by name."""
        folder = self.folder / "jobs/chain"
        return {name: (JobDir(folder / name), steps) for name, steps in STEPS.items()}

    def borders(self) -> list[Path]:
        """Return the files that appear at the borders of stages, and do not exist yet."""
        paths = []
        for job, steps in self.jobs().values():
            checkpoint = job.checkpoints / f"step-{steps:06d}"
            exit_record = job.attempt_dir(job.attempt() or 1) / "exit.json"
            paths += [job.stage, job.config, checkpoint, exit_record]
        return [path for path in paths if not path.exists()]

    def results(self) -> dict[str, dict[str, Any]]:
        """Return the results of each stage by name."""
        return {name: results(job, steps) for name, (job, steps) in self.jobs().items()}

    def different(self, reference: dict[str, dict[str, Any]]) -> list[str]:
        """Return the results that differ from `reference`, and the stages that were redone."""
        found = []
        for name, (job, steps) in self.jobs().items():
            found += [f"{name}: {what}" for what in differences(job, steps, reference[name])]
            codes = [job.exit_record(number) for number in range(1, job.attempt())]
            if any(record is not None and record["code"] == ExitCode.DONE for record in codes):
                found.append(f"{name}: started again after it was done")
        return found


def kill_time(chain: Chain, rng: random.Random, duration: float) -> Callable[[], object]:
    """Return a condition that holds when the next kill is due."""
    borders = chain.borders()
    if borders and rng.random() < 0.5:
        path, delay = rng.choice(borders), rng.random() * BORDER_SECONDS
        return lambda: path.exists() and not wait_until(lambda: False, delay)
    due = time.monotonic() + rng.random() * duration
    return lambda: time.monotonic() > due


def kill(processes: Processes, rng: random.Random) -> str | None:
    """Kill a random process, or all; return the role of the victim, None if all had ended."""
    if rng.random() < 0.5:
        return processes.kill_random(rng)
    victims = processes.alive()
    for victim in victims:
        victim.kill()
    return "all" if victims else None


def run_with_kills(
    chain: Chain, max_kills: int, duration: float, rng: random.Random, tally: Tally
) -> int:
    """Run a pipeline to its end through up to `max_kills` kills, and return their number.

    `duration`: of the pipeline without kills, in seconds.
    """
    kills = failures = 0
    while True:
        processes, start = Processes(), time.monotonic()
        pipeline = chain.start()
        due = kill_time(chain, rng, duration) if kills < max_kills else lambda: False
        wait_until(partial(_either, pipeline, due), PATIENCE, pause=0.002)
        if pipeline.poll() is None and (role := kill(processes, rng)) is not None:
            killed_at = time.monotonic()
            tally.add_kill("pipeline", role, killed_at - start)
            kills += 1
            wait_until(partial(ended, pipeline), LIMIT)
            tally.wait_for_end(processes, killed_at)
        elif pipeline.wait() == 0:
            return kills
        else:
            tail = "\n".join(chain.log.read_text().splitlines()[-30:])
            tally.add_manual_step(f"{chain.folder.name} was refused or failed:\n{tail}")
            failures += 1
            if failures == 3:
                return kills


def _either(pipeline: subprocess.Popen[bytes], due: Callable[[], object]) -> bool:
    return ended(pipeline) or bool(due())


def skip_seconds(chain: Chain) -> float:
    """Return the seconds in which a finished pipeline finds that all of its stages are done."""
    start, seconds = time.monotonic(), float("inf")
    argv = [*DTT, "pipeline", "-c", "chain.yaml"]
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(argv, cwd=chain.folder, text=True, **pipes) as again:
        assert again.stderr is not None
        for line in again.stderr:
            if line.startswith("[1/"):
                seconds = time.monotonic() - start
                assert "export" in line, line
        assert again.wait() == 0
    return seconds


def main() -> None:
    """Kill, run again and compare; print the counts."""
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    rng = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    require_programs("torchrun")
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    tally, begin = Tally(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dtt-stage-kills-") as name:
        references, durations, skipped = {}, {}, 0.0
        for processes in (1, 2):
            chain, start = (
                Chain(Path(name) / f"undisturbed-{processes}", processes),
                time.monotonic(),
            )
            assert chain.start().wait(PATIENCE) == 0, chain.log.read_text()
            durations[processes] = time.monotonic() - start
            references[processes] = chain.results()
            skipped = skip_seconds(chain)
        for number in count():
            if kills <= 0:
                break
            processes = 1 + number % 2
            chain = Chain(Path(name) / f"disturbed-{number}", processes)
            most = min(KILLS_PER_JOB, kills)
            kills -= run_with_kills(chain, most, durations[processes], rng, tally)
            tally.add_job(chain.folder.name, chain.different(references[processes]))
    for victim, number in sorted(tally.kills.items()):
        print(f"{victim:<34}{number:>5}")
    print(
        f"{tally.kills.total()} kills of pipelines of {len(STAGES)} stages in "
        f"{time.monotonic() - begin:.0f} s: {tally.different} of {tally.jobs} differ, "
        f"{len(tally.manual)} manual steps; {len(STAGES)} done stages were skipped in "
        f"{skipped:.1f} s"
    )
    sys.exit(bool(tally.different or tally.manual))


if __name__ == "__main__":
    main()
