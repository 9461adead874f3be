"""Tokenize Parquet files with the alternatives to dtt, each in its own process.

    python benchmarks/tokenize_peers.py PEER TOKENIZER.json FOLDER OUT

Needs only the peer itself. tokenization.py starts it with the interpreter that has the peers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np

END = "<|endoftext|>"
WORKERS = 2


def texts(folder: Path) -> Iterator[list[str]]:
    """Yield batches of documents of the Parquet files, in order."""
    import pyarrow.parquet as pq

    for path in sorted(folder.glob("*.parquet")):
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(128, columns=["text"], use_threads=False):
                yield batch.column(0).to_pylist()


def write(out: Path, documents: Iterator[Any], end: int) -> None:
    """Write the concatenated ids, and the number of tokens of each document."""
    lengths = []
    with (out / "ids.bin").open("wb") as file:
        for ids in documents:
            with_end = np.array([*ids, end], np.uint16 if end < 65_500 else np.int32)
            file.write(with_end.tobytes())
            lengths.append(len(with_end))
    np.save(out / "lengths.npy", np.array(lengths))


def encoder_on_files(tokenizer: Path, folder: Path, out: Path) -> None:
    """Encode on one thread, discard the ids, and print MB/s without start-up."""
    from gigatoken import ParquetFileSource, Tokenizer

    size = sum(len(text.encode()) for batch in texts(folder) for text in batch)
    encoder = Tokenizer.from_json(tokenizer.read_bytes())
    start = time.perf_counter()
    for path in sorted(folder.glob("*.parquet")):
        encoder.encode_files(ParquetFileSource([path]), parallel=False)
    print(size / 1e6 / (time.perf_counter() - start))


def encoder_process(tokenizer: Path, folder: Path, out: Path, number: Path, of: Path) -> None:
    """Run process `number` of `of` encoders that share the files, and discard the ids."""
    from gigatoken import ParquetFileSource, Tokenizer

    encoder = Tokenizer.from_json(tokenizer.read_bytes())
    for path in sorted(folder.glob("*.parquet"))[int(number.name) :: int(of.name)]:
        encoder.encode_files(ParquetFileSource([path]), parallel=False)


def hf(tokenizer: Path, folder: Path, out: Path) -> None:
    """Encode with `tokenizers` and its own threads."""
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(tokenizer))
    batches = (encoder.encode_batch_fast(b, add_special_tokens=False) for b in texts(folder))
    write(out, (e.ids for batch in batches for e in batch), encoder.get_vocab()[END])


_worker: Any = None


def _start_worker(tokenizer: Path) -> None:
    global _worker  # noqa: PLW0603 - as in Megatron's preprocess_data.py
    from tokenizers import Tokenizer

    _worker = Tokenizer.from_file(str(tokenizer))


def _encode(text: str) -> list[int]:
    ids: list[int] = _worker.encode(text, add_special_tokens=False).ids
    return ids


def pool(tokenizer: Path, folder: Path, out: Path) -> None:
    """Encode like Megatron's tools/preprocess_data.py: `Pool.imap` by chunks of 32, one writer."""
    from tokenizers import Tokenizer

    end = Tokenizer.from_file(str(tokenizer)).get_vocab()[END]
    with Pool(WORKERS, _start_worker, (tokenizer,)) as workers:
        documents = (text for batch in texts(folder) for text in batch)
        write(out, workers.imap(_encode, documents, 32), end)


def datasets(tokenizer: Path, folder: Path, out: Path) -> None:
    """Encode with `datasets.map` over batches, then write the ids."""
    import datasets as hub
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(tokenizer))

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encodings = encoder.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"ids": [e.ids for e in encodings]}

    files = sorted(map(str, folder.glob("*.parquet")))
    rows = hub.load_dataset("parquet", data_files=files, split="train", cache_dir=str(out / "hf"))
    rows = rows.map(encode, batched=True, num_proc=WORKERS, remove_columns=rows.column_names)
    batches = rows.with_format("arrow").iter(1000)
    documents = (ids.values.to_numpy() for batch in batches for ids in batch["ids"])
    write(out, documents, encoder.get_vocab()[END])


def datatrove(tokenizer: Path, folder: Path, out: Path) -> None:
    """Run datatrove's tokenization pipeline, with the files distributed over processes."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import ParquetReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    steps = [
        ParquetReader(str(folder), glob_pattern="*.parquet"),
        DocumentTokenizer(str(out), str(tokenizer), eos_token=END, shuffle_documents=False),
    ]
    logs = str(out / "logs")
    LocalPipelineExecutor(steps, tasks=WORKERS, workers=WORKERS, logging_dir=logs).run()


PEERS: dict[str, Callable[..., None]] = {
    "encoder": encoder_on_files,
    "encoder-process": encoder_process,
    "hf": hf,
    "pool": pool,
    "datasets": datasets,
    "datatrove": datatrove,
}


if __name__ == "__main__":
    PEERS[sys.argv[1]](*map(Path, sys.argv[2:]))
