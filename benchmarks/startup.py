"""How long until a command line answers: dtt's and its peers' `--help`, in interleaved runs.

    python benchmarks/startup.py [RUNS]

Interleaved, so that a busy moment of the machine falls on all alike; the first round warms the file
cache and is not counted. Peers that are not installed beside dtt are left out.
"""

from __future__ import annotations

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


def main() -> None:
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
