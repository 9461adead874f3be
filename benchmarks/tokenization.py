"""Measure the speed of tokenization: dtt, its encoder alone, and other tools.

    python benchmarks/tokenization.py [--data DIR] [--peers-python PYTHON] [--runs N]
    python benchmarks/tokenization.py --gigabytes N   on the novels, repeated to N GB
    python benchmarks/tokenization.py --memory        peak memory on 1 and on 20 copies of the text

Every figure is the time of a process with all of its workers, from start to end, as the median of
interleaved runs. This includes the encoder alone, which reads the same Parquet files itself and
discards the ids (`encoder x 1`, `x 2`; peer `encoder-process`). The last lines give the encoder's
speed on these files without start-up (peer `encoder`), and dtt's speed relative to it, with and
without dtt's start-up. All tools use two processes or workers where they allow it; `1 core` is a
process pinned to one core, as the encoder is. The ids of all tools must be equal.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from measurement import SHARED_DATA, Table, column_medians, parser_of
from xxhash import xxh3_64_intdigest

from dtt.artifacts.manifests import TokensManifest
from dtt.data.text.tokenizer import open_tokenizer
from dtt.data.token_file import TokenFile, bin_path, token_dtype

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
PACKAGES = {
    "encoder": "gigatoken",
    "encoder-process": "gigatoken",
    "hf": "tokenizers",
    "pool": "tokenizers",
}
"""Package of each peer that is named differently."""
DTT_RUNS = {"dtt, 1 core": 1, "dtt, 1 rank": 1, "dtt, 2 ranks": 2}
"""Number of ranks of each way to run dtt."""
ENVIRONMENT = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
ENVIRONMENT.pop("PYTHONDONTWRITEBYTECODE", None)  # without bytecode, every start is slow


@dataclass
class Corpus:
    """Parquet files, dtt's download of them, and the measured times."""

    name: str
    folder: Path
    """Folder that holds only the Parquet files."""
    downloaded: Path
    text_bytes: int
    times: dict[str, list[float]] = field(default_factory=dict)
    rates: dict[str, list[float]] = field(default_factory=dict)
    """MB/s from the first unit to the manifest, as dtt itself reports them."""


def make_corpus(name: str, files: list[Path], work: Path, repeats: int = 1) -> Corpus:
    """Copy the files `repeats` times and download them with dtt."""
    folder = work / name
    folder.mkdir()
    for i in range(repeats):
        for path in files:
            shutil.copy(path, folder / f"{i:03d}-{path.name}")
    run([BIN / "dtt", "download", "-d", folder, f"download.out={work / 'corpora' / name}"])
    columns = (pq.read_table(path, columns=["text"])["text"] for path in files)
    text_bytes = repeats * sum(pc.sum(pc.binary_length(column)).as_py() for column in columns)
    return Corpus(name, folder, work / "corpora" / name, text_bytes)


def run(command: list[str | Path]) -> str:
    """Run a command, which must succeed, and return its standard output."""
    done = subprocess.run(
        list(map(str, command)), check=False, capture_output=True, text=True, env=ENVIRONMENT
    )
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done.stdout


def on_one_core(command: list[str | Path]) -> list[str | Path]:
    """Return the command, pinned to one core if `taskset` is available."""
    if not shutil.which("taskset"):
        return command
    return ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0))), *command]


def dtt(corpus: Corpus, tokenizer: Path, out: Path, ranks: int) -> list[str | Path]:
    """Return the command; all documents go into one split, as the peers hold out none."""
    start: list[str | Path] = [BIN / "mpirun", "-n", str(ranks)] if ranks > 1 else []
    keys = {
        "download.out": corpus.downloaded,
        "tokenize.out": out,
        "tokenize.validation_fraction": 0,
        "tokenizer.type": "file",
        "tokenizer.path": tokenizer,
    }
    values = (f"{key}={value}" for key, value in keys.items())
    return [*start, BIN / "dtt", "tokenize", "--json", *values]


def documents(out: Path, end: int) -> Iterator[npt.NDArray[np.uint32]]:
    """Yield the ids of every document in `out`, in the format of any of the tools."""
    if TokensManifest.exists(out):
        for shard in TokensManifest.read(out).shards:
            file = TokenFile(out / shard.stem)
            yield from np.split(np.fromfile(bin_path(file.stem), file.dtype), file.bounds()[1:-1])
    elif (out / "ids.bin").exists():
        ids = np.fromfile(out / "ids.bin", token_dtype(end + 1))
        yield from np.split(ids, np.cumsum(np.load(out / "lengths.npy"))[:-1])
    else:
        for path in out.glob("*.ds"):
            ends = np.fromfile(f"{path}.index", "<u8")
            width = path.stat().st_size // max(int(ends.max(initial=0)), 1)
            if len(ends):
                yield from np.split(np.fromfile(path, f"<u{width}"), ends[:-1].astype(np.int64))


def fingerprint(out: Path, end: int) -> tuple[int, int, int]:
    """Return the number of documents and tokens, and an order-independent sum of hashes."""
    count = tokens = total = 0
    for ids in documents(out, end):
        count, tokens = count + 1, tokens + len(ids)
        total += xxh3_64_intdigest(ids.astype(np.uint32).tobytes())
    return count, tokens, total % 2**64


def compare(corpus: Corpus, tokenizer: Path, peers: dict[str, list[str | Path]], runs: int) -> None:
    """Time dtt and its peers in turns, compare their ids and print a table."""
    end = open_tokenizer(tokenizer).get_vocab()["<|endoftext|>"]
    fingerprints: dict[str, tuple[int, int, int]] = {}
    encoder_speeds: list[list[float]] = []
    for number in range(runs + 1):  # the first only warms the file cache and bytecode
        with tempfile.TemporaryDirectory() as scratch:
            for name, ranks in DTT_RUNS.items():
                out = Path(scratch, name)
                command = dtt(corpus, tokenizer, out, ranks)
                seconds, output = timed(on_one_core(command) if "core" in name else command)
                if number > 0:
                    corpus.times.setdefault(name, []).append(seconds)
                    rate = json.loads(output)["mb_per_second"]
                    corpus.rates.setdefault(name, []).append(rate)
                fingerprints[name] = fingerprint(out, end)
            for name, command in peers.items() if number > 0 else ():
                out = Path(scratch, name)
                out.mkdir()
                command = [*command, tokenizer, corpus.folder, out]
                if name == "encoder-process":
                    for n in (1, 2):
                        seconds = seconds_of_processes(command, n)
                        corpus.times.setdefault(f"encoder x {n}", []).append(seconds)
                elif name == "encoder":
                    encoder_speeds.append(
                        [encoder_speed(on_one_core(command), 1), encoder_speed(command, 2)]
                    )
                else:
                    corpus.times.setdefault(name, []).append(timed(command)[0])
                    fingerprints[name] = fingerprint(out, end)
    report(corpus, fingerprints)
    report_shares(corpus, column_medians(encoder_speeds))
    if len(set(fingerprints.values())) > 1:
        sys.exit("ids differ")


def encoder_speed(command: list[str | Path], processes: int) -> float:
    """Return the total speed of `processes` concurrent encoders, in MB/s."""
    with ThreadPoolExecutor(processes) as pool:
        return sum(map(float, pool.map(run, [command] * processes)))


def seconds_of_processes(command: list[str | Path], processes: int) -> float:
    """Return the seconds until the last of `processes` encoders, which share the files, ends."""
    commands = [[*command, str(number), str(processes)] for number in range(processes)]
    start = time.perf_counter()
    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(run, commands))
    return time.perf_counter() - start


def timed(command: list[str | Path]) -> tuple[float, str]:
    """Run a command; return its seconds and its output."""
    start = time.perf_counter()
    output = run(command)
    return time.perf_counter() - start, output


def report(corpus: Corpus, fingerprints: dict[str, tuple[int, int, int]]) -> None:
    """Print a row for each tool."""
    megabytes = corpus.text_bytes / 1e6
    count, tokens, _ = expected = fingerprints["dtt, 1 rank"]
    print(f"\n{corpus.name}: {megabytes:.1f} MB, {count:,} documents, {tokens:,} tokens")
    columns = {"seconds": 9, "MB/s": 8, "tokens/s": 13, "dtt, 2 ranks": 14, "  ids": 5}
    table = Table("", 14, columns)
    reference = statistics.median(corpus.times["dtt, 2 ranks"])
    for name, times in corpus.times.items():
        seconds = statistics.median(times)
        ids = "discarded"
        if name in fingerprints:
            actual = fingerprints[name]
            ids = "equal" if actual == expected else f"DIFFERENT: {actual}"
        table.row(
            name, f"{seconds:.2f}", f"{megabytes / seconds:.1f}", f"{tokens / seconds:,.0f}",
            f"{seconds / reference:.1f}x", note=ids,
        )  # fmt: skip


def report_shares(corpus: Corpus, speeds: list[float]) -> None:
    """Print dtt's share of the encoder's speed; `speeds` are those of one and of two encoders."""
    megabytes = corpus.text_bytes / 1e6
    for name, ranks in DTT_RUNS.items() if speeds else ():
        speed = speeds[ranks - 1]
        share = megabytes / statistics.median(corpus.times[name]) / speed
        share_after_start = statistics.median(corpus.rates[name]) / speed
        print(
            f"encoder x {ranks:<12}{speed:>8.1f}  from the files, without start-up; "
            f"{name}: {share:.0%} of it, {share_after_start:.0%} without start-up"
        )


PRINT_PEAK_OF_CHILD = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def peak_memory(command: list[str | Path]) -> float:
    """Return the peak memory of a command, in MB.

    A small process starts it, because Linux counts the parent's memory as the child's at first.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    return int(run([sys.executable, "-c", PRINT_PEAK_OF_CHILD, *command])) * unit / 1e6


def memory(files: list[Path], tokenizer: Path, work: Path) -> None:
    """Measure memory on a file with a single row group, and on one 20 times as long.

    Each is one unit of work.
    """
    table = pa.concat_tables(pq.read_table(path, columns=["text"]) for path in files)
    peaks = []
    for copies in (1, 20):
        path = work / f"copies{copies}.parquet"
        repeated = pa.concat_tables([table] * copies)
        pq.write_table(repeated, path, row_group_size=len(repeated), compression="zstd")
        corpus = make_corpus(f"memory{copies}", [path], work)
        peaks.append(peak_memory(dtt(corpus, tokenizer, work / f"out{copies}", 1)))
        print(f"{corpus.text_bytes / 1e6:>8.0f} MB of text: peak of {peaks[-1]:.0f} MB")
    print(f"20 copies of the text take {peaks[1] / peaks[0]:.2f} times the memory")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, default=SHARED_DATA)
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--peers", default="encoder,encoder-process,datatrove,pool,datasets,hf")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--gigabytes", type=int)
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args()
    data = options.data
    tokenizer = data / "tokenizers/gpt2/tokenizer.json"
    novels = sorted((data / "novels").glob("train-*.parquet"))
    multilingual = sorted((data / "multilingual").glob("*.parquet"))
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if options.memory:
            memory(novels, tokenizer, work)
            return
        peers = dict(installed(options.peers_python, options.peers.split(",")))
        if options.gigabytes:
            corpus = make_corpus("novels, repeated", novels, work, 14 * options.gigabytes)
            compare(corpus, tokenizer, peers, options.runs)
            return
        for name, files in (("novels", novels), ("multilingual", multilingual)):
            compare(make_corpus(name, files, work), tokenizer, peers, options.runs)


def installed(python: str, names: list[str]) -> Iterator[tuple[str, list[str | Path]]]:
    """Yield the names and commands of the peers that `python` can import."""
    for name in names:
        package = PACKAGES.get(name, name)
        try:
            run([python, "-c", f"import {package}"])
        except subprocess.CalledProcessError:
            print(f"{name} is left out: {python} -m pip install {package}")
        else:
            yield name, [python, HERE / "peers.py", "tokenize", name]


if __name__ == "__main__":
    main()
