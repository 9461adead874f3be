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
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from data_loaders import END, SEQ_LEN
from measurement import Table

from dtt.artifacts.corpus import CorpusSource
from dtt.artifacts.manifests import SplitCounts, TokenShard, TokensManifest
from dtt.artifacts.shard_files import index_bytes
from dtt.data.token_file import HEADER, MAGIC, VERSION, TokenFileWriter, bin_path, idx_path

VOCAB_SIZE = 50_257
LOADERS = Path(__file__).with_name("data_loaders.py")
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


def run(python: str, name: str, folder: Path, seconds: float, samples: int = 0) -> dict[str, float]:
    """Run a worker and return its figures; raise RuntimeError with its first error if it fails."""
    command = [python, str(LOADERS), name, str(folder), str(seconds), str(samples)]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no batch after {LIMIT} s") from None
    if done.returncode:
        raise RuntimeError(first_error(done.stderr))
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def first_batch(peers: str, folder: Path, shards: int, tokens: int) -> None:
    """Measure the time to the first batch on sparse files."""
    write_sparse(folder, shards, tokens)
    print(f"\n{shards:,} shards, {tokens:,} tokens")
    table = Table("", 34, {"first batch": 13, "ratio": 9, "files": 7, "MB": 7})
    # Megatron indexes whole epochs: slightly more samples than one epoch would double the index.
    half_an_epoch = tokens // SEQ_LEN // 2
    reference = None
    for label, python, name in (
        ("dtt", sys.executable, "dtt"),
        ("megatron-core, index built", peers, "megatron"),
        ("megatron-core, index kept", peers, "megatron"),
    ):
        try:
            figures = run(python, name, folder, 0, half_an_epoch)
        except RuntimeError as error:
            table.row(label, note=f"failed: {error}")
            continue
        seconds = figures["first_batch"]
        reference = reference or seconds
        table.row(
            label, f"{seconds:.2f} s", f"{seconds / reference:.1f}",
            f"{figures['descriptors']:.0f}", f"{figures['memory'] / 1e6:.0f}",
        )  # fmt: skip


def throughput(work: Path, shards: list[int], tokens: int, seconds: float, turns: int) -> None:
    """Measure dtt on the same number of tokens in different numbers of shards.

    Prints medians of interleaved runs.
    """
    for number in shards:
        write_real(work / str(number), number, tokens)
    print(f"{tokens:,} tokens, T = {SEQ_LEN}, medians of {turns} runs of {seconds:g} s in turn")
    columns = {
        "first batch": 13, "M tokens/s": 12, "ratio": 8, "from, to": 14,
        "per core": 10, "ratio ": 8, "from, to ": 14,
    }  # fmt: skip
    for name in ("dtt", "dtt-masked-mixture"):
        runs: dict[int, list[dict[str, float]]] = {number: [] for number in shards}
        for turn in range(turns):
            for number in shards[:: -1 if turn % 2 else 1]:
                runs[number].append(run(sys.executable, name, work / str(number), seconds))
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=int, nargs="+", default=[10, 1_000, 10_000])
    parser.add_argument("--tokens", type=float, help="default: 1e12, with --turns 1e9")
    parser.add_argument("--seconds", type=float, default=5, help="of a run, with --turns")
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--turns", type=int, help="compare numbers of shards, dtt alone")
    args = parser.parse_args()
    tokens = int(args.tokens or (1e9 if args.turns else 1e12))
    if args.turns:
        with tempfile.TemporaryDirectory(dir=args.work) as work:
            throughput(Path(work), args.shards, tokens, args.seconds, args.turns)
        return
    print("ratio: times as long as dtt. files: open file descriptors")
    for shards in args.shards:
        with tempfile.TemporaryDirectory(dir=args.work) as work:
            first_batch(args.peers_python, Path(work, "tokens"), shards, tokens)


if __name__ == "__main__":
    main()
