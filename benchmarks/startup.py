"""Measure the start-up time of command lines: `--help` of dtt and its peers.

    python benchmarks/startup.py [RUNS]
    python benchmarks/startup.py train RUNS KEY=VALUE…

The second command prints a breakdown of the time from `dtt train KEY=VALUE…` to the end of the
first step. Runs are interleaved, so that other load on the machine affects all alike; the first
round warms the file cache and is not counted. Peers that are not installed beside dtt are left out.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

BIN = Path(sys.executable).parent
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "dtt --help": [str(BIN / "dtt"), "--help"],
    "python -m dtt.main --help": [sys.executable, "-m", "dtt.main", "--help"],
    "torchrun --help": [str(BIN / "torchrun"), "--help"],
    "transformers --help": [str(BIN / "transformers"), "--help"],
    "litgpt --help": [str(BIN / "litgpt"), "--help"],
    "tune --help": [str(BIN / "tune"), "--help"],
}


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def training(runs: int, arguments: list[str]) -> None:
    """Print the start-up phases of one-step runs, without the first, which warms the file cache."""
    found: list[dict[str, float]] = []
    job = Path("jobs/startup")
    given = [f"name={job.name}", "train.steps=1", "train.sample_tokens=0"]
    for _ in range(runs + 1):
        shutil.rmtree(job, ignore_errors=True)
        command = [str(BIN / "dtt"), "train", *arguments, *given]
        subprocess.run(command, check=True, capture_output=True)
        records = map(json.loads, (job / "metrics.jsonl").read_text().splitlines())
        found.append(next(r["seconds"] for r in records if r["kind"] == "start"))
    print(f"{runs} runs, seconds{'median':>16}{'min':>8}{'max':>8}")
    for phase in [*found[0], "all"]:
        seconds = [sum(run.values()) if phase == "all" else run[phase] for run in found[1:]]
        print(f"{phase:<26}{statistics.median(seconds):>8.2f}{min(seconds):>8.2f}", end="")
        print(f"{max(seconds):>8.2f}")


def main() -> None:
    if sys.argv[1:2] == ["train"]:
        training(int(sys.argv[2]), sys.argv[3:])
        return
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    present = {name: command for name, command in COMMANDS.items() if Path(command[0]).exists()}
    times: dict[str, list[float]] = {name: [] for name in present}
    for round_ in range(runs + 1):
        for name, command in present.items():
            taken = seconds(command)
            if round_ > 0:
                times[name].append(1e3 * taken)
    ours = statistics.median(times["dtt --help"])
    print(f"{runs} runs each, ms{'median':>18}{'min':>8}{'max':>8}{'ratio':>8}")
    for name, ms in times.items():
        median = statistics.median(ms)
        print(f"{name:<28}{median:>8.0f}{min(ms):>8.0f}{max(ms):>8.0f}{median / ours:>8.2f}")


if __name__ == "__main__":
    main()
