"""Compare the start of the data loaders of dtt and megatron-core, and dtt's speed by shards.

    python benchmarks/dataloader.py [--shards 10 1000 10000] [--tokens 1e12]
                                    [--peers-python PYTHON] [--work FOLDER]
    python benchmarks/dataloader.py --turns 5 [--shards 10 10000] [--tokens 1e9] [--seconds 5]
                                    [--work FOLDER]

Start: time from opening the files to the first batch. The files are sparse: the `.bin` files hold
only zeros and use no disk blocks, the `.idx` files list documents of a million tokens (shorter
documents would enlarge Megatron's index and leave dtt's start-up time unchanged). Ratios compare
with dtt at the same number of shards.

With --turns: throughput of dtt on random ids in the page cache, in documents of about 600 tokens.
Each number of shards is read once per turn, in alternating order; a ratio is the time per token
relative to the first number of shards in the same turn.

megatron-core is imported from the environment of --peers-python; if it is missing, its rows report
a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from measurement import Table, parser_of
from peers import BATCH, SEQ_LEN, first_batch

from dtt.artifacts.corpus import CorpusSource
from dtt.artifacts.manifests import SplitCounts, TokenShard, TokensManifest
from dtt.artifacts.token_folders import index_bytes
from dtt.config.run import RunConfig
from dtt.data.samples import compatibility
from dtt.data.samples.dataset import open_dataset
from dtt.data.samples.loader import BatchReader, training_batches
from dtt.data.token_file import HEADER, MAGIC, VERSION, TokenFileWriter, bin_path, idx_path

VOCAB_SIZE, END, GLOBAL_BATCH = 50_257, 0, 512
PEERS = Path(__file__).with_name("peers.py")
SPARSE_DOCUMENT = 1_000_000
LIMIT = 900
"""Timeout of a worker process, in seconds."""


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
    entries = []
    for number in range(shards):
        stem = folder / f"train-{number:05d}"
        idx_path(stem).write_bytes(index)
        with bin_path(stem).open("wb") as file:
            file.truncate(2 * documents * length)
        entries.append(shard(stem, documents, documents * length))
    write_manifest(folder, entries)


def write_real(folder: Path, shards: int, tokens: int) -> None:
    """Write shards of random ids in documents of lognormal lengths."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    entries = []
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
        entries.append(shard(stem, len(lengths), len(ids)))
    write_manifest(folder, entries)


def first_error(text: str) -> str:
    """Return the first error in `text`; later errors are its consequences."""
    match = re.search(r"^(?:\[rank0\]: )?([\w.]+(?:Error|Exception)\b.*)", text, re.MULTILINE)
    return match[1] if match else "no error message"


def batches(folder: Path, mixture: bool) -> Iterator[int]:
    """Yield the tokens of each batch of `dtt train`; `mixture`: two sources, document masks."""
    sources: list[dict[str, object]] = [{"path": folder, "name": "a"}]
    if mixture:
        sources = [sources[0] | {"weight": 0.7}, {"path": folder, "name": "b", "weight": 0.3}]
    data = {"type": "tokens", "sources": tuple(sources), "mask_documents": mixture}
    train = {
        "seq_len": SEQ_LEN, "global_batch_tokens": GLOBAL_BATCH * SEQ_LEN, "micro_batch": BATCH,
        "steps": 10**9,
    }  # fmt: skip
    cfg = RunConfig.model_validate({"data": data, "train": train})
    for problem in compatibility.file_problems(folder):  # as at the start of every run
        raise problem
    reader = BatchReader(0, 1, BATCH, torch.device("cpu"))
    for batch in training_batches(open_dataset(cfg), reader, 0):
        for micro_batch in batch.micro_batches:
            yield micro_batch.tokens.numel()


def work(folder: Path, mixture: bool, seconds: float) -> dict[str, float]:
    """Return the figures of the first batch, then tokens per second of wall and of CPU time."""
    figures = first_batch(lambda path: batches(path, mixture), folder)
    if seconds:
        endless = batches(folder, mixture)
        rates(endless, seconds)  # warms caches and memory maps
        figures["rate"], figures["cpu_rate"] = rates(endless, seconds)
    return figures


def rates(endless: Iterator[int], seconds: float) -> tuple[float, float]:
    """Return tokens per second of wall time and of CPU time, over at least one batch."""
    start, cpu_start, tokens = time.perf_counter(), time.process_time(), next(endless)
    while time.perf_counter() - start < seconds:
        tokens += next(endless)
    return tokens / (time.perf_counter() - start), tokens / (time.process_time() - cpu_start)


def run(command: Sequence[object]) -> dict[str, float]:
    """Run a worker and return its figures; raise RuntimeError with its first error if it fails."""
    argv, env = list(map(str, command)), os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            argv, check=False, capture_output=True, text=True, timeout=LIMIT, env=env
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no batch after {LIMIT} s") from None
    if done.returncode:
        raise RuntimeError(first_error(done.stderr))
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def dtt(folder: Path, name: str, seconds: float) -> list[object]:
    """Return the command of a worker of dtt."""
    return [sys.executable, __file__, "--worker", folder, name, "--seconds", seconds]


def compare(peers: str, folder: Path, shards: int, tokens: int) -> None:
    """Measure the time to the first batch on sparse files."""
    write_sparse(folder, shards, tokens)
    print(f"\n{shards:,} shards, {tokens:,} tokens")
    table = Table("", 34, {"first batch": 13, "ratio": 9, "files": 7, "MB": 7})
    # Megatron indexes whole epochs: slightly more samples than one epoch would double the index.
    half_an_epoch = tokens // SEQ_LEN // 2
    reference = None
    megatron: list[object] = [peers, PEERS, "load", folder, half_an_epoch]
    for label, command in (
        ("dtt", dtt(folder, "plain", 0)),
        ("megatron-core, index built", megatron),
        ("megatron-core, index kept", megatron),
    ):
        try:
            figures = run(command)
        except RuntimeError as error:
            table.row(label, note=f"failed: {error}")
            continue
        seconds = figures["first_batch"]
        reference = reference or seconds
        table.row(
            label, f"{seconds:.2f} s", f"{seconds / reference:.1f}",
            f"{figures['descriptors']:.0f}", f"{figures['memory'] / 1e6:.0f}",
        )  # fmt: skip


def throughput(folder: Path, shards: list[int], tokens: int, seconds: float, turns: int) -> None:
    """Measure dtt on the same number of tokens in different numbers of shards.

    Prints medians of interleaved runs.
    """
    for number in shards:
        write_real(folder / str(number), number, tokens)
    print(f"{tokens:,} tokens, T = {SEQ_LEN}, medians of {turns} runs of {seconds:g} s in turn")
    columns = {
        "first batch": 13, "M tokens/s": 12, "ratio": 8, "from, to": 14,
        "per core": 10, "ratio ": 8, "from, to ": 14,
    }  # fmt: skip
    for name in ("plain", "mixture"):
        runs: dict[int, list[dict[str, float]]] = {number: [] for number in shards}
        for turn in range(turns):
            for number in shards[:: -1 if turn % 2 else 1]:
                runs[number].append(run(dtt(folder / str(number), name, seconds)))
        print(f"\n{name}")
        table = Table("shards", 10, columns)
        for number, figures in runs.items():
            cells = [f"{statistics.median(run['first_batch'] for run in figures):.2f} s"]
            for key in ("rate", "cpu_rate"):
                pairs = zip(runs[shards[0]], figures, strict=True)
                ratios = sorted(reference[key] / run[key] for reference, run in pairs)
                cells.append(f"{statistics.median(run[key] for run in figures) / 1e6:.1f}")
                cells.append(f"{statistics.median(ratios):.2f}")
                cells.append(f"{ratios[0]:.2f}, {ratios[-1]:.2f}")
            table.row(f"{number:,}", *cells)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shards", type=int, nargs="+", default=[10, 1_000, 10_000])
    parser.add_argument("--tokens", type=float, help="default: 1e12, with --turns 1e9")
    parser.add_argument("--seconds", type=float, default=5, help="of a run, with --turns")
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--turns", type=int, help="compare numbers of shards, dtt alone")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        folder, name = args.worker
        print(json.dumps(work(Path(folder), name == "mixture", args.seconds)))
        return
    tokens = int(args.tokens or (1e9 if args.turns else 1e12))
    if args.turns:
        with tempfile.TemporaryDirectory(dir=args.work) as folder:
            throughput(Path(folder), args.shards, tokens, args.seconds, args.turns)
        return
    print("ratio: times as long as dtt. files: open file descriptors")
    for shards in args.shards:
        with tempfile.TemporaryDirectory(dir=args.work) as folder:
            compare(args.peers_python, Path(folder, "tokens"), shards, tokens)


if __name__ == "__main__":
    main()
