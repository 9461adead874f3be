"""Compare on-the-fly tokenization: dtt and streaming with `datasets`, on the same files.

    python benchmarks/on_the_fly.py [--data FOLDER] [--tokenizer FILE] [--seconds 10]

Both read Parquet, encode with the same tokenizer, append an end-of-document token, and cut the
token stream into sequences of 1024. `datasets` streams, maps `tokenizers` over batches of 1000
documents and groups them as in transformers' run_clm.py. Each runs in one process with one thread,
one after the other.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from dtt.config.data import DownloadConfig
from dtt.data.corpus import Corpus
from dtt.data.download import download
from dtt.data.encoder import Encoder
from dtt.data.sources.row import Documents
from dtt.data.sources.text import TextSource

SEQ_LEN = 1024
SEQUENCES = 64
"""Sequences read at once, as by a training step of one process."""
FEEDERS = ("datasets", "dtt hf", "dtt gigatoken")


def of_dtt(data: Path, tokenizer: Path, engine: Any, work: Path) -> Iterator[int]:
    """Yield the number of tokens of each batch of dtt, endlessly."""
    download(DownloadConfig(dataset=str(data), split="train"), work / "corpus")
    encoder = Encoder(tokenizer.read_bytes(), None, tokenizer, engine)
    documents = Documents(Corpus(work / "corpus"))
    source = TextSource(
        documents, encoder, name="text", seq_len=SEQ_LEN, seed=0, validation_fraction=0.0
    )
    for place in range(0, sys.maxsize, SEQUENCES):
        yield source.read(source.samples_at(place, SEQUENCES)).size


def of_datasets(data: Path, tokenizer: Path) -> Iterator[int]:
    """Yield the number of tokens of each batch of `datasets`, endlessly."""
    from datasets import load_dataset
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(tokenizer))
    end = [encoder.token_to_id("<|endoftext|>")]

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        encodings = encoder.encode_batch_fast(batch["text"], add_special_tokens=False)
        row = list(chain.from_iterable(e.ids + end for e in encodings))
        stop = len(row) // SEQ_LEN * SEQ_LEN
        return {"ids": [row[i : i + SEQ_LEN] for i in range(0, stop, SEQ_LEN)]}

    files = sorted(map(str, data.glob("train-*.parquet")))
    while True:
        rows = load_dataset("parquet", data_files=files, split="train", streaming=True)
        columns = rows.column_names
        batches = rows.map(encode, batched=True, remove_columns=columns).with_format("numpy")
        for batch in batches.iter(SEQUENCES):
            yield batch["ids"].size


def measure(feeder: str, data: Path, tokenizer: Path, seconds: float) -> None:
    """Print tokens per second and peak memory in MB; the first batch is not counted."""
    with tempfile.TemporaryDirectory() as work:
        if feeder == "datasets":
            batches = of_datasets(data, tokenizer)
        else:
            batches = of_dtt(data, tokenizer, feeder.split()[1], Path(work))
        next(batches)
        tokens, start = 0, time.perf_counter()
        while (spent := time.perf_counter() - start) < seconds:
            tokens += next(batches)
    print(tokens / spent, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> None:
    """Measure each in a separate process and print a table."""
    shared = Path(os.environ.get("DTT_SHARED", Path(__file__).parents[2] / "shared")) / "data"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, default=shared / "novels")
    parser.add_argument("--tokenizer", type=Path, default=shared / "tokenizers/gpt2/tokenizer.json")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--feeder", choices=FEEDERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.feeder:
        measure(args.feeder, args.data, args.tokenizer, args.seconds)
        return
    env = os.environ | {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    first = None
    print(f"{'':<16}{'tokens/s':>14}{'ratio':>10}{'memory':>10}")
    for feeder in FEEDERS:
        argv = [sys.executable, __file__, *sys.argv[1:], "--feeder", feeder]
        out = subprocess.run(argv, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
        speed, memory = map(float, out.split()[-2:])
        first = first or speed
        print(f"{feeder:<16}{speed:>14,.0f}{speed / first:>9.1f}x{memory:>7.0f} MB", flush=True)


if __name__ == "__main__":
    main()
