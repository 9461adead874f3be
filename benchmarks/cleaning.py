"""Compare `dtt clean` with datatrove's MinHash: what is removed, and how long it takes.

    python benchmarks/cleaning.py oracle [--documents 7000] [--peers-python PYTHON]
    python benchmarks/cleaning.py speed FOLDER [--copies 1] [--peers-python PYTHON]
    python benchmarks/cleaning.py documents FOLDER [--megabytes 10] [--sizes 88 300 1700 12000]
    python benchmarks/cleaning.py languages FILE [--peers-python PYTHON]
    python benchmarks/cleaning.py learning [--seeds 5] [--steps 500]

PYTHON has datatrove. `oracle` plants exact and near copies (edits of up to 20 % of the words),
chains, common headers and shuffled words into random documents, and compares all pairs by brute
force. It prints how many documents were removed, how many of them have no kept document with a
Jaccard similarity of at least 0.8 (lost), and how many pairs of kept documents reach it (missed).

`speed` times complete commands on the Parquet files of FOLDER (column `text`), `--copies` times,
each copy with other words in place of every fourth one. It prints the largest memory of a process
of dtt.

`documents` cuts the same texts into documents of so many bytes. It prints the speed of one core, by
processor time, best of three: of signatures (shingles, sketches and band keys) and of pass 1 of a
unit of Parquet and of JSON lines; and the peak memory of the latter.

`languages` identifies the documents of a Parquet file with the columns `text` and `language`, and
pieces of their prose, and beside it lingua, if PYTHON has it.

`learning` trains the quickstart on its own corpus, on that corpus with near copies (30 % of the
text, of 3 % of the documents), and on the latter cleaned, for the same steps. It prints the losses
on documents that all of them lack.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import statistics
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
from dtt.base.malloc import keep_freed_memory
from dtt.clean.filters import SAMPLE, LanguageFilter
from dtt.clean.shingles import band_keys, bands_and_rows, shingles, sketches
from dtt.clean.steps import Steps
from dtt.clean.unit_pass import BATCH_DOCUMENTS, UNIT_BATCH_BYTES, PlacedUnit, pass_one
from dtt.config.clean import CleanConfig, LanguageConfig, NearConfig
from dtt.data.corpus.bad_documents import BadDocuments
from dtt.data.corpus.documents import read_batches
from dtt.data.corpus.units import Corpus

HERE = Path(__file__).parent
THRESHOLD = 0.8
FILES = 4
HELD_OUT, PLANTED, COPIED = 10, 0.3, 0.03
"""Every tenth document is held out; copies of 3 % of the documents are 30 % of all bytes."""
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


def oracle(work: Path, count: int, python: str | None) -> None:
    """Print the errors of each tool on planted documents."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    from support.planted_copies import (  # type: ignore[import-not-found]
        planted,
        similar_pairs,
    )

    texts = planted(count)
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
    print(f"{count:,} documents, {len(pairs):,} pairs with a similarity of at least {THRESHOLD}")
    table = Table("", 14, {"removed": 9, "lost": 7, "missed": 8})
    found = {"dtt clean": kept_by_dtt(work)}
    if python:
        found["datatrove"] = kept_by_datatrove(work, python)
    for name, kept in found.items():
        gone = set(range(count)) - kept
        lost = sum(not twins.get(i, set()) & kept for i in gone)
        missed = sum(a in kept and b in kept for a, b in pairs)
        table.row(name, f"{len(gone):,}", f"{lost:,}", f"{missed:,}")


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
    keep_freed_memory()  # as in the command
    corpus = Corpus(folder)
    unit = corpus.units(256 * 10**6)[0]
    section = CleanConfig(near=NearConfig(threshold=THRESHOLD))
    steps, bad = Steps(folder / "selection-x", ""), BadDocuments()
    bands, rows = bands_and_rows(THRESHOLD)

    def one_pass() -> None:
        pass_one(section, PlacedUnit(0, corpus, unit), (), None, steps, bad)

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
        for batch in read_batches(corpus, unit, bad, UNIT_BATCH_BYTES)
        for start in range(0, len(batch), BATCH_DOCUMENTS)
    ]
    size = sum(len(text) for batch in batches for text in batch)
    return size / seconds(signatures), size / whole, peak


def languages(file: Path, python: str | None) -> None:
    """Print the share of texts whose language is found, and MB/s of CPU time."""
    identifier = LanguageFilter(LanguageConfig(keep=("en",)))
    table = pq.read_table(file)
    rows = list(zip(*(table[name].to_pylist() for name in ("text", "language")), strict=True))
    output = Table("", 24, {"texts": 7, "py3langid": 11, "MB/s": 7, "lingua": 9, "MB/s ": 7})
    for length in (SAMPLE, 100, 30):
        known = [(text[:length], language) for text, language in rows]
        if length < SAMPLE:
            pieces = ((piece_of_prose(text, length), language) for text, language in rows)
            known = [(text, language) for text, language in pieces if text]
        texts, size = [text for text, _ in known], sum(len(text.encode()) for text, _ in known)
        start = time.process_time()
        found = [[identifier.identify(text)[0] for text in texts]]
        seconds = [time.process_time() - start]
        if python:
            command = [python, str(HERE / "peers.py"), "identify"]
            said = subprocess.run(
                command, input=json.dumps(texts), text=True, capture_output=True, check=True
            )
            peer = json.loads(said.stdout)
            found.append(peer["languages"])
            seconds.append(peer["seconds"])
        cells = []
        for each, took in zip(found, seconds, strict=True):
            right = sum(one == known[i][1].split("-")[0] for i, one in enumerate(each))
            cells += [f"{right / len(texts):.1%}", f"{size / took / 1e6:.2f}"]
        output.row(f"{length:,} characters", f"{len(texts):,}", *cells)


def piece_of_prose(text: str, length: int) -> str:
    """Return the beginning of a long enough paragraph in the middle of a Markdown text, or ""."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`|\{[^}]*\}|<[^>]*>|https?://\S+|\]\([^)]*\)", "", text)
    paragraphs = (paragraph.strip() for paragraph in text.split("\n\n"))
    prose = [one for one in paragraphs if len(one) >= length and one[0] not in "#*/-"]
    return prose[len(prose) // 2][:length] if prose else ""


def learning(work: Path, seeds: int, steps: int) -> None:
    """Print validation losses of the quickstart on its corpus, with planted copies, and cleaned."""
    dtt("download", "-c", "quickstart", folder=work)
    [file] = (work / "data/corpus/python-stdlib").glob("*.parquet")
    texts = pq.read_table(file, columns=["text"])[0].to_pylist()
    kept = [text for i, text in enumerate(texts) if i % HELD_OUT]
    corpora = {"original": kept, "held-out": texts[::HELD_OUT], "planted": with_copies(kept)}
    for name, documents in corpora.items():
        (work / name).mkdir()
        pq.write_table(pa.table({"text": documents}), work / name / "0.parquet")
        dtt("download", "-d", name, folder=work)
    # One tokenizer, so that the losses are comparable.
    tokenizer = "tokenizer.vocab_size=4096"
    for name in corpora:
        keys = f"tokenize.out={name}-tokens", "tokenize.validation_fraction=0", tokenizer
        dtt("tokenize", "-d", name, *keys, folder=work)
        tokenizer = "tokenizer={type: file, path: original-tokens}"
    cleaned = "-d", "planted", f"clean.near.threshold={THRESHOLD}"
    facts = json.loads(dtt("clean", *cleaned, "--json", folder=work))
    keys = "tokenize.out=cleaned-tokens", "tokenize.validation_fraction=0", tokenizer
    dtt("tokenize", *cleaned, *keys, folder=work)
    copies = len(corpora["planted"]) - len(kept)
    print(f"{len(kept):,} documents, {copies:,} copies planted, {facts['removed']} removed")
    table = Table("", 12, {f"seed {seed}": 9 for seed in range(seeds)} | {"mean": 9, "sd": 8})
    for name in ("original", "planted", "cleaned"):
        losses = [final_loss(work, name, seed, steps) for seed in range(seeds)]
        cells = [*losses, statistics.mean(losses), statistics.stdev(losses)]
        table.row(name, *(f"{cell:.4f}" for cell in cells))


def with_copies(texts: list[str]) -> list[str]:
    """Return texts and near copies of a few of them, shuffled: copies are PLANTED of all bytes."""
    rng = random.Random(0)
    copied = rng.sample(texts, max(1, round(COPIED * len(texts))))
    missing = PLANTED / (1 - PLANTED) * sum(map(len, texts))
    copies = []
    while missing > 0:
        words = re.split(r"(\W+)", rng.choice(copied))
        for place in rng.sample(range(0, len(words), 2), len(words) // 200):
            words[place] = f"x{rng.randrange(10**6)}"
        copies.append("".join(words))
        missing -= len(copies[-1])
    return rng.sample([*texts, *copies], len(texts) + len(copies))


def final_loss(work: Path, name: str, seed: int, steps: int) -> float:
    """Train the quickstart on a folder of tokens; return the loss on what was held out."""
    source = f"[{{path: {name}-tokens, validation: held-out-tokens}}]"
    keys = {
        "name": f"{name}-{seed}", "seed": seed, "data.sources": source, "train.steps": steps,
        "train.eval_every": 0, "train.eval_tokens": 200_000, "train.sample_tokens": 0,
        "checkpoint.every": steps,
    }  # fmt: skip
    dtt("train", "-c", "quickstart", *(f"{k}={v}" for k, v in keys.items()), folder=work)
    lines = (work / f"jobs/{name}-{seed}/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return float([line["loss"] for line in records if line["kind"] == "eval"][-1])


def timed(command: list[str], folder: Path) -> float:
    """Run a command and return its seconds."""
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env=os.environ)
    return time.perf_counter() - start


def main() -> None:
    """Run a comparison in a temporary folder."""
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    known = {run.__name__: run for run in (oracle, speed, documents, languages, learning)}
    options = {name: commands.add_parser(name) for name in known}
    options["oracle"].add_argument("--documents", dest="count", type=int, default=7000)
    options["speed"].add_argument("--copies", type=int, default=1)
    options["documents"].add_argument("--megabytes", type=int, default=10)
    options["documents"].add_argument("--sizes", type=int, nargs="+", default=SIZES)
    options["languages"].add_argument("file", type=Path)
    options["learning"].add_argument("--seeds", type=int, default=5)
    options["learning"].add_argument("--steps", type=int, default=500)
    for name in ("speed", "documents"):
        options[name].add_argument("folder", type=Path)
    for name in ("oracle", "speed", "languages"):
        options[name].add_argument("--peers-python", dest="python")
    arguments = vars(parser.parse_args())
    run: Callable[..., None] = known[arguments.pop("command")]
    with tempfile.TemporaryDirectory(prefix="dtt-cleaning-") as folder:
        run(Path(folder), **arguments)


if __name__ == "__main__":
    main()
