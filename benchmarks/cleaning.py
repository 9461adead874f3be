"""Compare `dtt clean` with datatrove's MinHash: what is removed, and how long it takes.

    python benchmarks/cleaning.py oracle [--documents 7000] [--peers-python PYTHON]
    python benchmarks/cleaning.py speed FOLDER [--copies 1] [--peers-python PYTHON]

PYTHON has datatrove. `oracle` plants exact and near copies (edits of up to 20 % of the words),
chains, common headers and shuffled words into random documents, and compares all pairs by brute
force. It prints how many documents were removed, how many of them have no kept document with a
Jaccard similarity of at least 0.8 (lost), and how many pairs of kept documents reach it (missed).

`speed` times complete commands on the Parquet files of FOLDER (column `text`), `--copies` times,
each copy with other words in place of every fourth one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
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


def write(folder: Path, texts: list[str]) -> None:
    """Write texts, with their numbers as ids, to FILES Parquet files."""
    folder.mkdir()
    size = -(-len(texts) // FILES)
    for number in range(FILES):
        part = range(number * size, min((number + 1) * size, len(texts)))
        table = {"text": [texts[i] for i in part], "id": [str(i) for i in part]}
        pq.write_table(pa.table(table), folder / f"{number}.parquet", row_group_size=500)


def kept_by_dtt(work: Path) -> set[int]:
    """Return the documents that `dtt clean` keeps."""
    dtt("download", "-d", "in", folder=work)
    options = ("-d", "in", f"clean.near.threshold={THRESHOLD}", "--json")
    facts = json.loads(dtt("clean", *options, folder=work))
    manifest = json.loads((work / facts["selection"] / "selection.json").read_text())
    kept, first = set(), 0
    for number, unit in enumerate(manifest["units"]):
        gone: set[int] = set()
        if unit["sha256"] is not None:
            table = pq.read_table(work / facts["selection"] / f"{number:05d}.removed.parquet")
            gone = set(table["document"].to_pylist())
        kept |= {first + i for i in range(unit["documents"]) if i not in gone}
        first += unit["documents"]
    return kept


def kept_by_datatrove(work: Path, python: str) -> set[int]:
    """Return the documents that datatrove keeps."""
    run_datatrove(work, python)
    files = (work / "datatrove/kept").glob("*.jsonl")
    return {int(json.loads(line)["id"]) for file in files for line in file.open()}


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


def oracle(work: Path, documents: int, python: str | None) -> None:
    """Print the errors of each tool on planted documents."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    from support.planted_copies import (  # type: ignore[import-not-found]
        planted,
        similar_pairs,
    )

    texts = planted(documents)
    write(work / "in", texts)
    pairs = {pair for pair, value in similar_pairs(texts).items() if value >= THRESHOLD}
    twins: dict[int, set[int]] = {}
    for a, b in pairs:
        twins.setdefault(a, set()).add(b)
        twins.setdefault(b, set()).add(a)
    # Documents without a shingle are equal or not.
    same: dict[str, list[int]] = {}
    for i, text in enumerate(texts):
        if words := " ".join(text.split()):
            same.setdefault(words, []).append(i)
    for group in same.values():
        for i in group:
            twins.setdefault(i, set()).update(set(group) - {i})
    print(
        f"{documents:,} documents, {len(pairs):,} pairs with a similarity of at least {THRESHOLD}"
    )
    table = Table("", 14, {"removed": 9, "lost": 7, "missed": 8})
    found = {"dtt clean": kept_by_dtt(work)}
    if python:
        found["datatrove"] = kept_by_datatrove(work, python)
    for name, kept in found.items():
        gone = set(range(documents)) - kept
        lost = sum(not twins.get(i, set()) & kept for i in gone)
        missed = sum(a in kept and b in kept for a, b in pairs)
        table.row(name, f"{len(gone):,}", f"{lost:,}", f"{missed:,}")


def speed(work: Path, folder: Path, copies: int, python: str | None) -> None:
    """Print the seconds of each tool."""
    texts = [
        text if copy == 0 else " ".join(f"{word}{copy}" if i % 4 == 0 else word
                                        for i, word in enumerate(text.split(" ")))
        for copy in range(copies)
        for file in sorted(folder.glob("*.parquet"))
        for text in pq.read_table(file, columns=["text"])[0].to_pylist()
    ]  # fmt: skip
    write(work / "in", texts)
    size = sum(len(text.encode()) for text in texts)
    dtt("download", "-d", "in", folder=work)
    command = [*DTT, "clean", "-d", "in", f"clean.near.threshold={THRESHOLD}", "-q"]
    both = local.mpi_argv(2, command)
    seconds = {"dtt clean, 1 rank": timed(command, work)}
    if both is not None:
        for selection in (work / "data/corpus/in").glob("selection-*"):
            shutil.rmtree(selection)
        seconds["dtt clean, 2 ranks"] = timed(both, work)
    if python:
        start = time.perf_counter()
        run_datatrove(work, python)
        seconds["datatrove, 2 workers"] = time.perf_counter() - start
    print(f"{len(texts):,} documents, {size / 1e6:.1f} MB")
    table = Table("", 22, {"seconds": 9, "MB/s": 8, "factor": 9})
    slowest = max(seconds.values())
    for name, took in seconds.items():
        table.row(name, f"{took:.1f}", f"{size / 1e6 / took:.1f}", f"{slowest / took:.1f}x")


def timed(command: list[str], folder: Path) -> float:
    """Run a command and return its seconds."""
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env=os.environ)
    return time.perf_counter() - start


def main() -> None:
    """Run a comparison in a temporary folder."""
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("oracle", "speed"):
        command = commands.add_parser(name)
        command.add_argument("--peers-python")
        if name == "oracle":
            command.add_argument("--documents", type=int, default=7000)
        else:
            command.add_argument("folder", type=Path)
            command.add_argument("--copies", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dtt-cleaning-") as name:
        if options.command == "oracle":
            oracle(Path(name), options.documents, options.peers_python)
        else:
            speed(Path(name), options.folder.resolve(), options.copies, options.peers_python)


if __name__ == "__main__":
    main()
