"""Compare `dtt clean` with datatrove's MinHash: what is removed, and how long it takes.

    python benchmarks/cleaning.py oracle [--documents 7000] [--peers-python PYTHON]
    python benchmarks/cleaning.py speed FOLDER [--copies 1] [--peers-python PYTHON]
    python benchmarks/cleaning.py documents FOLDER [--megabytes 10] [--sizes 88 300 1700 12000]

PYTHON has datatrove. `oracle` plants exact and near copies (edits of up to 20 % of the words),
chains, common headers and shuffled words into random documents, and compares all pairs by brute
force. It prints how many documents were removed, how many of them have no kept document with a
Jaccard similarity of at least 0.8 (lost), and how many pairs of kept documents reach it (missed).

`speed` times complete commands on the Parquet files of FOLDER (column `text`), `--copies` times,
each copy with other words in place of every fourth one.

`documents` cuts the same texts into documents of so many bytes. It prints the speed of one core, by
processor time, best of three: of signatures (shingles, sketches and band keys) and of pass 1 of a
unit of Parquet and of JSON lines; and the peak memory of the latter.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from measurement import DTT, Table, dtt, parser_of

from dtt.base import local
from dtt.base.malloc import keep
from dtt.clean.shingles import shingles
from dtt.clean.sketches import band_keys, bands_and_rows, sketches
from dtt.clean.steps import Steps
from dtt.clean.unit_pass import BATCH_BYTES, BATCH_DOCUMENTS, pass_one
from dtt.config.clean import CleanConfig, NearConfig
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.documents import read_batches
from dtt.data.corpus.units import Corpus

HERE = Path(__file__).parent
THRESHOLD = 0.8
FILES = 4
SIZES = [88, 300, 1700, 12000]


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


def documents(work: Path, folder: Path, megabytes: int, sizes: list[int]) -> None:
    """Print the speed of pass 1 by the size of documents."""
    files = [pq.read_table(path, columns=["text"]) for path in sorted(folder.glob("*.parquet"))]
    novels = b" ".join(text.encode() for file in files for text in file[0].to_pylist())
    columns = {"documents": 11, "signatures": 13, "Parquet": 12, "JSON lines": 12, "peak": 9}
    table = Table("bytes", 8, columns)
    for size in sizes:
        starts = (start % (len(novels) - size) for start in range(0, megabytes * 10**6, size))
        texts = [novels[start : start + size].decode(errors="ignore") for start in starts]
        here = work / str(size)
        here.mkdir()
        pq.write_table(pa.table({"text": texts}), here / "a.parquet", row_group_size=len(texts))
        with (here / "b.jsonl").open("w") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        found = []
        for name, corpus in (("a.parquet", "a"), ("b.jsonl", "b")):
            dtt("download", "-d", name, folder=here)
            # A process each, because their memory is measured.
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                found.append(pool.submit(measure_unit, here / "data/corpus" / corpus).result())
        (signatures, parquet, _), (_, lines, peak) = found
        speeds = [f"{value / 1e6:.1f} MB/s" for value in (signatures, parquet, lines)]
        table.row(f"{size:,}", f"{len(texts):,}", *speeds, f"{peak / 1e6:.0f} MB")
        shutil.rmtree(here)


def measure_unit(folder: Path) -> tuple[float, float, int]:
    """Return the bytes a second of signatures and of pass 1 of a unit, and the peak memory."""
    keep()  # as in the command
    corpus = Corpus(folder)
    unit = corpus.units(256 * 10**6)[0]
    section = CleanConfig(near=NearConfig(threshold=THRESHOLD))
    steps, bad = Steps(folder / "selection-x"), BadDocuments()
    bands, rows = bands_and_rows(THRESHOLD)

    def one_pass() -> None:
        pass_one(section, corpus, unit, (), None, steps, "unit", bad)

    def signatures() -> None:
        for texts in batches:
            band_keys(sketches(shingles(texts, 5), len(texts), bands * rows), bands, rows)

    def seconds(work: Callable[[], None]) -> float:
        found = []
        for _ in range(3):
            start = time.process_time()
            work()
            found.append(time.process_time() - start)
        return min(found)

    whole = seconds(one_pass)
    status = Path("/proc/self/status").read_text().split("\n")
    peak = next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    batches = [
        batch[start : start + BATCH_DOCUMENTS]
        for batch in read_batches(corpus, unit, bad, BATCH_BYTES)
        for start in range(0, len(batch), BATCH_DOCUMENTS)
    ]
    size = sum(len(text) for batch in batches for text in batch)
    return size / seconds(signatures), size / whole, peak


def timed(command: list[str], folder: Path) -> float:
    """Run a command and return its seconds."""
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env=os.environ)
    return time.perf_counter() - start


def main() -> None:
    """Run a comparison in a temporary folder."""
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("oracle", "speed", "documents"):
        command = commands.add_parser(name)
        if name != "oracle":
            command.add_argument("folder", type=Path)
        if name != "documents":
            command.add_argument("--peers-python")
        match name:
            case "oracle":
                command.add_argument("--documents", type=int, default=7000)
            case "speed":
                command.add_argument("--copies", type=int, default=1)
            case "documents":
                command.add_argument("--megabytes", type=int, default=10)
                command.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dtt-cleaning-") as name:
        match options.command:
            case "oracle":
                oracle(Path(name), options.documents, options.peers_python)
            case "speed":
                speed(Path(name), options.folder.resolve(), options.copies, options.peers_python)
            case "documents":
                documents(Path(name), options.folder.resolve(), options.megabytes, options.sizes)


if __name__ == "__main__":
    main()
