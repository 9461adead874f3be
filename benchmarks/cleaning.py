"""Time `dtt clean` and datatrove's MinHash on the same documents.

    python benchmarks/cleaning.py FOLDER [--copies 1] [--peers-python PYTHON]

PYTHON has datatrove. Times complete commands on the Parquet files of FOLDER (column `text`),
`--copies` times, each copy with other words in place of every fourth one. Prints the largest memory
of a process of dtt.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from measurement import DTT, Table, dtt, parser_of

from dtt.base import local

HERE = Path(__file__).parent
THRESHOLD = 0.8
FILES = 4


def run_datatrove(work: Path, python: str) -> None:
    """Run the four stages on `in`."""
    shutil.rmtree(work / "datatrove", ignore_errors=True)
    command = [
        python,
        str(HERE / "peers.py"),
        "deduplicate",
        str(work / "in"),
        str(work / "datatrove"),
    ]
    subprocess.run(command, check=True, capture_output=True)


def speed(work: Path, folder: Path, copies: int, python: str | None) -> None:
    """Print the seconds of each tool and the peak memory."""
    files = sorted(folder.glob("*.parquet"))
    texts = [
        text for file in files for text in pq.read_table(file, columns=["text"])[0].to_pylist()
    ]
    (work / "in").mkdir()
    size = sum(write_varied(work / "in", texts, copy, copies) for copy in range(copies))
    dtt("download", "-d", "in", folder=work)
    command = [*DTT, "clean", "-d", "in", f"clean.near.threshold={THRESHOLD}", "-q"]
    seconds = {"dtt clean, 1 rank": timed(command, work)}
    both = local.mpi_argv(2, command)
    if both is not None:
        for selection in (work / "data/corpus/in").glob("selection-*"):
            shutil.rmtree(selection)
        seconds["dtt clean, 2 ranks"] = timed(both, work)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    if python:
        start = time.perf_counter()
        run_datatrove(work, python)
        seconds["datatrove, 2 workers"] = time.perf_counter() - start
    count = copies * len(texts)
    print(f"{count:,} documents, {size / 1e6:.1f} MB; a rank: {peak / 1e3:.0f} MB")
    table = Table("", 30, {"seconds": 9, "MB/s": 8, "factor": 9})
    slowest = max(seconds.values())
    for name, took in seconds.items():
        table.row(name, f"{took:.1f}", f"{size / 1e6 / took:.1f}", f"{slowest / took:.1f}x")


def write_varied(folder: Path, texts: list[str], copy: int, copies: int) -> int:
    """Write a copy of texts with other words in place of every fourth one; return its bytes."""
    if copy > 0:
        texts = [" ".join(f"{word}{copy}" if i % 4 == 0 else word
                          for i, word in enumerate(text.split(" "))) for text in texts]  # fmt: skip
    parts = -(-FILES // copies)
    for part in range(parts):
        rows = range(part, len(texts), parts)
        table = {"text": [texts[i] for i in rows], "id": [f"{copy}-{i}" for i in rows]}
        pq.write_table(pa.table(table), folder / f"{copy:04d}-{part}.parquet", row_group_size=500)
    return sum(len(text.encode()) for text in texts)


def timed(command: list[str], folder: Path) -> float:
    """Run a command and return its seconds."""
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env=os.environ)
    return time.perf_counter() - start


def main() -> None:
    """Run the comparison in a temporary folder."""
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--peers-python", dest="python")
    arguments = vars(parser.parse_args())
    with tempfile.TemporaryDirectory(prefix="dtt-cleaning-") as folder:
        speed(Path(folder), **arguments)


if __name__ == "__main__":
    main()
