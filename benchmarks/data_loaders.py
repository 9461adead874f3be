"""Data loaders of dtt and Megatron over the same token files: the workers of `dataloader.py`.

    python benchmarks/data_loaders.py NAME FOLDER SECONDS [MEGATRON_SAMPLES]

Prints as JSON: seconds from the call that opens the files (imports excluded) to the first batch,
the file descriptors open at that point, then tokens per second of wall time and of CPU time, and
peak memory. One process, one OpenMP thread, and whatever the loader itself starts.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from measurement import peak_memory

SEQ_LEN = 1024
BATCH = 32
GLOBAL_BATCH = 512
END = 0

Loader = Callable[[Path], Iterator[int]]
"""A function from a folder to an endless iterator of the number of tokens of each batch."""


def dtt(*, mixture: bool = False) -> Loader:
    """Return the loader of `dtt train`; `mixture` means two sources and document masking."""
    import torch

    from dtt.config.run import RunConfig
    from dtt.data.samples import compatibility
    from dtt.data.samples.dataset import open_dataset
    from dtt.data.samples.loader import BatchReader, training_batches

    def load(folder: Path) -> Iterator[int]:
        sources: list[dict[str, Any]] = [{"path": folder, "name": "a"}]
        if mixture:
            sources = [sources[0] | {"weight": 0.7}, {"path": folder, "name": "b", "weight": 0.3}]
        cfg = RunConfig.model_validate(
            {
                "data": {
                    "type": "tokens",
                    "sources": tuple(sources),
                    "mask_documents": mixture,
                },
                "train": {
                    "seq_len": SEQ_LEN,
                    "global_batch_tokens": GLOBAL_BATCH * SEQ_LEN,
                    "micro_batch": BATCH,
                    "steps": 10**9,
                },
            }
        )
        for problem in compatibility.file_problems(folder):  # as at the start of every run
            raise problem
        reader = BatchReader(0, 1, BATCH, torch.device("cpu"), mask_documents=mixture)
        for batch in training_batches(open_dataset(cfg), reader, 0):
            for micro_batch in batch.micro_batches:
                yield micro_batch.tokens.numel()

    return load


def megatron(samples: int) -> Loader:
    """Return GPTDataset over a blend of all shards, Megatron's way to read many files.

    Its indices are cached in the token folder.
    """
    import torch
    import torch.distributed
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    # Megatron queries its rank even in a single process.
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1
    )

    class Tokenizer:
        vocab_size, eod, pad, unique_identifiers = 50257, END, -1, {"class": "none"}

    def load(folder: Path) -> Iterator[int]:
        stems = [str(path.with_suffix("")) for path in sorted(folder.glob("*.idx"))]
        config = GPTDatasetConfig(
            random_seed=0,
            sequence_length=SEQ_LEN,
            blend=(stems, None),
            split="1",
            path_to_cache=str(folder / "megatron-cache"),
            tokenizer=Tokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        sizes = [samples, None, None]
        train = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]
        first = 0
        while True:
            rows = [train[(first + i) % len(train)]["tokens"] for i in range(BATCH)]
            yield torch.stack(rows).numel()
            first += BATCH

    return load


def loader(name: str, samples: int) -> Loader:
    """Return the loader called `name`, with its imports done."""
    match name:
        case "dtt":
            return dtt()
        case "dtt-masked-mixture":
            return dtt(mixture=True)
        case "megatron":
            return megatron(samples)
        case _:
            raise ValueError(name)


def measure(load: Loader, folder: Path, seconds: float) -> dict[str, float]:
    """Return the figures that the module's docstring lists."""
    start = time.perf_counter()
    batches = load(folder)
    next(batches)
    first = time.perf_counter() - start
    descriptors = len(list(Path("/dev/fd").iterdir()))
    rates(batches, seconds)  # warms caches and memory maps
    rate, cpu_rate = rates(batches, seconds)
    return {
        "first_batch": first,
        "descriptors": descriptors,
        "rate": rate,
        "cpu_rate": cpu_rate,
        "memory": peak_memory(),
    }


def rates(batches: Iterator[int], seconds: float) -> tuple[float, float]:
    """Return tokens per second of wall time and of CPU time, over at least one batch."""
    start, cpu_start, tokens = time.perf_counter(), time.process_time(), next(batches)
    while time.perf_counter() - start < seconds:
        tokens += next(batches)
    return tokens / (time.perf_counter() - start), tokens / (time.process_time() - cpu_start)


def main() -> None:
    name, folder, seconds, *rest = sys.argv[1:]
    load = loader(name, int(rest[0]) if rest else 0)
    print(json.dumps(measure(load, Path(folder), float(seconds))))


if __name__ == "__main__":
    main()
