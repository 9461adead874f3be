"""Measure the start-up time of command lines: `--help` of dtt and its peers.

    python benchmarks/startup.py [RUNS]

Runs are interleaved; the first round warms the file cache and is not counted. Peers that are not
installed beside dtt are left out.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from measurement import Table, in_turns

BIN = Path(sys.executable).parent
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "dtt --help": [str(BIN / "dtt"), "--help"],
    "torchrun --help": [str(BIN / "torchrun"), "--help"],
    "transformers --help": [str(BIN / "transformers"), "--help"],
}


def seconds(command: list[str]) -> float:
    """Return the wall time of a command."""
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    present = {name: command for name, command in COMMANDS.items() if Path(command[0]).exists()}
    times = in_turns({name: partial(seconds, command) for name, command in present.items()}, runs)
    reference = statistics.median(times["dtt --help"])
    table = Table(f"{runs} runs each, ms", 28, {"median": 8, "min": 8, "max": 8, "ratio": 8})
    for name, spent in times.items():
        median = statistics.median(spent)
        cells = (f"{1e3 * value:.0f}" for value in (median, min(spent), max(spent)))
        table.row(name, *cells, f"{median / reference:.2f}")


if __name__ == "__main__":
    main()
