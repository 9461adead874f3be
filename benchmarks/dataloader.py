"""Compare the data loaders of dtt, megatron-core and litdata on the same tokens.

    python benchmarks/dataloader.py [--shards 10 1000 10000] [--tokens 4e8] [--start-tokens 1e12]
                                    [--seconds 5] [--peers-python PYTHON] [--work FOLDER]
    python benchmarks/dataloader.py --turns 5 [--shards 10 10000] [--tokens 1e8] [--seconds 5]

Start: time from opening the files to the first batch. The files are sparse: the `.bin` files hold
only zeros and use no disk blocks, the `.idx` files list documents of a million tokens (shorter
documents would enlarge Megatron's index and leave dtt's start-up time unchanged). Throughput:
random ids in the page cache, documents of about 600 tokens. Ratios compare with dtt at the same
number of shards.

With --turns, dtt alone reads each number of shards once per turn, in alternating order; a ratio is
the time per token relative to the first number of shards in the same turn.

Peers are imported from the environment of --peers-python; missing ones are reported as failed.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from feeders import END, SEQ_LEN

from dtt.artifacts import CorpusSource, SplitCounts, TokenShard, TokensManifest
from dtt.data.fit import index_bytes
from dtt.data.tokenfile import HEADER, MAGIC, VERSION, TokenFileWriter, bin_path, idx_path

VOCAB_SIZE = 50_257
FEEDERS = Path(__file__).with_name("feeders.py")
SPARSE_DOCUMENT = 1_000_000
LIMIT = 900
"""Timeout of a feeder process, in seconds."""


def shard(stem: Path, documents: int, tokens: int) -> TokenShard:
    return TokenShard(
        split="train",
        stem=stem.name,
        counts=SplitCounts(documents=documents, tokens=tokens, bytes=4 * tokens),
        bin_sha256="0" * 64,
        idx_sha256="0" * 64,
    )


def write_manifest(folder: Path, shards: list[TokenShard]) -> None:
    manifest = TokensManifest(
        key=folder.name, key_parts={}, corpus=CorpusSource(kind="local", id="benchmark"),
        tokenizer_sha256="0" * 64, vocab_size=VOCAB_SIZE, dtype="uint16", end_of_document=END,
        shards=tuple(shards), skipped_documents=0, empty_documents=0,
    )  # fmt: skip
    (folder / manifest.filename).write_text(manifest.dump())


def write_sparse(folder: Path, shards: int, tokens: int) -> None:
    """Write sparse shards: documents of zeros that use no disk blocks."""
    folder.mkdir()
    documents = max(1, tokens // shards // SPARSE_DOCUMENT)
    length = tokens // shards // documents
    numbers = np.arange(documents + 1)
    index = (
        HEADER.pack(MAGIC, VERSION, 8, documents, documents + 1)
        + np.full(documents, length, "<i4").tobytes()
        + (2 * length * numbers[:-1]).astype("<i8").tobytes()
        + numbers.astype("<i8").tobytes()
    )
    assert len(index) == index_bytes(documents, documents + 1)
    made = []
    for number in range(shards):
        stem = folder / f"train-{number:05d}"
        idx_path(stem).write_bytes(index)
        with bin_path(stem).open("wb") as file:
            file.truncate(2 * documents * length)
        made.append(shard(stem, documents, documents * length))
    write_manifest(folder, made)


def write_real(folder: Path, shards: int, tokens: int) -> None:
    """Write shards of random ids in documents of lognormal lengths."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    made = []
    for number in range(shards):
        stem, size = folder / f"train-{number:05d}", tokens // shards
        lengths = np.maximum(2, rng.lognormal(5.9, 1, size // 100 + 10).astype(np.int64))
        lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), size)) + 1]
        ends = np.cumsum(lengths)
        ids = rng.integers(1, VOCAB_SIZE, int(ends[-1]), dtype=np.uint16)
        ids[ends - 1] = END
        with TokenFileWriter(stem, VOCAB_SIZE) as writer:
            writer.append(ids, lengths)
            writer.close()
        made.append(shard(stem, len(lengths), len(ids)))
    write_manifest(folder, made)


def first_error(text: str) -> str:
    """Return the first error in `text`; later errors are its consequences."""
    found = re.search(r"^(?:\[rank0\]: )?([\w.]+(?:Error|Exception)\b.*)", text, re.MULTILINE)
    return found[1] if found else "nothing said"


def run(python: str, name: str, folder: Path, seconds: float, samples: int = 0) -> dict[str, float]:
    """Run a feeder and return its figures; raise RuntimeError with its first error if it fails."""
    command = [python, str(FEEDERS), name, str(folder), str(seconds), str(samples)]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no batch after {LIMIT} s") from None
    if done.returncode:
        raise RuntimeError(first_error(done.stderr))
    content: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return content


class Table:
    """A table printed row by row; ratios compare with the first row under the same heading."""

    def __init__(self) -> None:
        self._ours: dict[str, float] | None = None

    def begin(self, title: str) -> None:
        """Print a heading; the next row becomes the reference for the ratios."""
        self._ours = None
        print(
            f"\n{title}\n{'':<34}{'first batch':>13}{'ratio':>9}{'files':>7}{'MB':>7}"
            f"{'M tokens/s':>12}{'per core':>10}{'ratio':>8}",
            flush=True,
        )

    def row(self, label: str, python: str, name: str, folder: Path, *options: float) -> None:
        """Run a feeder and print its figures; with a duration of 0, only the start."""
        try:
            found = run(python, name, folder, options[0], *map(int, options[1:]))
        except RuntimeError as error:
            print(f"{label:<34}  failed: {error}", flush=True)
            return
        ours = self._ours = self._ours or found
        line = (
            f"{label:<34}{found['first_batch']:>11.2f} s"
            f"{found['first_batch'] / ours['first_batch']:>9.1f}"
            f"{found['descriptors']:>7.0f}{found['memory'] / 1e6:>7.0f}"
        )
        if options[0]:
            line += (
                f"{found['rate'] / 1e6:>12.1f}{found['cpu_rate'] / 1e6:>10.1f}"
                f"{ours['cpu_rate'] / found['cpu_rate']:>8.1f}"
            )
        print(line, flush=True)


def start(table: Table, peers: str, folder: Path, shards: int, tokens: int) -> None:
    """Measure the time to the first batch on sparse files."""
    write_sparse(folder, shards, tokens)
    table.begin(f"start: {shards:,} shards, {tokens:,} tokens")
    table.row("dtt", sys.executable, "dtt", folder, 0)
    # Megatron indexes whole epochs: slightly more samples than one epoch would double the index.
    half_an_epoch = tokens // SEQ_LEN // 2
    for label in ("megatron-core, index built", "megatron-core, index kept"):
        table.row(label, peers, "megatron", folder, 0, half_an_epoch)


def throughput(
    table: Table, peers: str, folder: Path, shards: int, tokens: int, seconds: float
) -> None:
    """Measure tokens per second on files of random ids, after a warm-up."""
    write_real(folder, shards, tokens)
    table.begin(f"throughput: {shards:,} shards, {tokens:,} tokens, T = {SEQ_LEN}")
    for label, name in (
        ("dtt", "dtt"),
        ("dtt, masks, mixture", "dtt-masked-mixture"),
        ("dtt, the same, best-fit, packing", "dtt-best-fit"),
        ("dtt, the same, best-fit, packed", "dtt-best-fit"),
    ):
        table.row(label, sys.executable, name, folder, seconds)
    half_an_epoch = tokens // SEQ_LEN // 2
    table.row("megatron-core", peers, "megatron", folder, seconds, half_an_epoch)
    table.row(
        "megatron-core, positions reset", peers, "megatron-masked", folder, seconds, half_an_epoch
    )
    chunks = folder.with_name(f"{folder.name}-litdata")
    command = [peers, str(FEEDERS), "write-litdata", str(folder), str(chunks)]
    # If this fails, the litdata row below fails too and prints the reason.
    subprocess.run(command, check=False, capture_output=True)
    table.row("litdata", peers, "litdata", chunks, seconds)


def in_turns(work: Path, shards: list[int], tokens: int, seconds: float, turns: int) -> None:
    """Measure dtt on the same number of tokens in different numbers of shards.

    Prints medians of interleaved runs.
    """
    for number in shards:
        write_real(work / str(number), number, tokens)
    print(f"{tokens:,} tokens, T = {SEQ_LEN}, medians of {turns} runs of {seconds:g} s in turn")
    for name in ("dtt", "dtt-masked-mixture"):
        found: dict[int, list[dict[str, float]]] = {number: [] for number in shards}
        for turn in range(turns):
            for number in shards[:: -1 if turn % 2 else 1]:
                found[number].append(run(sys.executable, name, work / str(number), seconds))
        head = f"{'shards':>8}{'first batch':>13}{'M tokens/s':>12}{'ratio':>8}{'from, to':>14}"
        print(f"\n{name}\n{head}{'per core':>10}{'ratio':>8}{'from, to':>14}")
        for number, runs in found.items():
            start = statistics.median(run["first_batch"] for run in runs)
            line = f"{number:>8,}{start:>11.2f} s"
            for key, width in (("rate", 12), ("cpu_rate", 10)):
                pairs = zip(found[shards[0]], runs, strict=True)
                ratios = sorted(first[key] / ours[key] for first, ours in pairs)
                line += f"{statistics.median(run[key] for run in runs) / 1e6:>{width}.1f}"
                line += f"{statistics.median(ratios):>8.2f}{ratios[0]:>8.2f}{ratios[-1]:>6.2f}"
            print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=int, nargs="+", default=[10, 1_000, 10_000])
    parser.add_argument("--tokens", type=float, default=4e8)
    parser.add_argument("--start-tokens", type=float, default=1e12)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--turns", type=int, help="compare numbers of shards, dtt alone")
    args = parser.parse_args()
    if args.turns:
        with tempfile.TemporaryDirectory(dir=args.work) as work:
            in_turns(Path(work), args.shards, int(args.tokens), args.seconds, args.turns)
        return
    table = Table()
    print("ratio: times as long as dtt; dtt's tokens per core over theirs. files: descriptors held")
    for shards in args.shards:
        with tempfile.TemporaryDirectory(dir=args.work) as work:
            start(table, args.peers_python, Path(work, "t"), shards, int(args.start_tokens))
    for shards in args.shards:
        with tempfile.TemporaryDirectory(dir=args.work) as work:
            throughput(
                table, args.peers_python, Path(work, "t"), shards, int(args.tokens), args.seconds
            )


if __name__ == "__main__":
    main()
