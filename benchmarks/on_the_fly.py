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
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from jobs import SHARED_DATA
from measurement import Table, peak_memory

from dtt.config.data import DownloadConfig
from dtt.data.corpus.download import download
from dtt.data.corpus.units import Corpus
from dtt.data.samples.encoded_documents import Documents
from dtt.data.samples.text_source import TextSource
from dtt.data.text.encoder import Encoder

SEQ_LEN = 1024
SEQUENCES = 64
"""Sequences read at once, as by a training step of one process."""
LOADERS = ("datasets", "dtt hf", "dtt gigatoken")


def of_dtt(data: Path, tokenizer: Path, engine: Any, work: Path) -> Iterator[int]:
    """Yield the number of tokens of each batch of dtt, endlessly."""
    download(DownloadConfig(dataset=str(data), split="train"), work / "corpus")
    encoder = Encoder(tokenizer.read_bytes(), None, tokenizer, engine)
    documents = Documents(Corpus(work / "corpus"))
    source = TextSource(
        documents, encoder, name="text", seq_len=SEQ_LEN, seed=0, validation_fraction=0.0
    )
    for position in range(0, sys.maxsize, SEQUENCES):
        yield source.read(source.samples_at(position, SEQUENCES)).ids.size


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


def measure(loader: str, data: Path, tokenizer: Path, seconds: float) -> None:
    """Print tokens per second and peak memory in MB; the first batch is not counted."""
    with tempfile.TemporaryDirectory() as work:
        if loader == "datasets":
            batches = of_datasets(data, tokenizer)
        else:
            batches = of_dtt(data, tokenizer, loader.split()[1], Path(work))
        next(batches)
        tokens, start = 0, time.perf_counter()
        while (spent := time.perf_counter() - start) < seconds:
            tokens += next(batches)
    print(tokens / spent, peak_memory() / 2**20)


def main() -> None:
    """Measure each in a separate process and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, default=SHARED_DATA / "novels")
    tokenizer = SHARED_DATA / "tokenizers/gpt2/tokenizer.json"
    parser.add_argument("--tokenizer", type=Path, default=tokenizer)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--loader", choices=LOADERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.loader:
        measure(args.loader, args.data, args.tokenizer, args.seconds)
        return
    env = os.environ | {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    reference = None
    table = Table("", 16, {"tokens/s": 14, "ratio": 10, "memory": 10})
    for loader in LOADERS:
        argv = [sys.executable, __file__, *sys.argv[1:], "--loader", loader]
        out = subprocess.run(argv, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
        speed, memory = map(float, out.split()[-2:])
        reference = reference or speed
        table.row(loader, f"{speed:,.0f}", f"{speed / reference:.1f}x", f"{memory:.0f} MB")


if __name__ == "__main__":
    main()
