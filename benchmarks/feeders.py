"""Data loaders of dtt, Megatron and litdata over the same token files.

    python benchmarks/feeders.py NAME FOLDER SECONDS [MEGATRON_SAMPLES]
    python benchmarks/feeders.py write-litdata FOLDER LITDATA_FOLDER

The first command prints as JSON: seconds from the call that opens the files (imports excluded) to
the first batch, the file descriptors open at that point, then tokens per second of wall time and of
CPU time, and peak memory. One process, one OpenMP thread, and whatever the loader itself starts.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SEQ_LEN = 1024
BATCH = 32
GLOBAL_BATCH = 512
END = 0

Feeder = Callable[[Path], Iterator[int]]
"""A function from a folder to an endless iterator of the number of tokens of each batch."""


def dtt(*, mixture: bool = False, packing: str = "concat") -> Feeder:
    """Return the loader of `dtt train`; `mixture` means two sources and document masking."""
    import torch

    from dtt.config.run import RunConfig
    from dtt.data import fit
    from dtt.data.dataset import open_dataset
    from dtt.data.loader import Share, training_batches

    def feed(folder: Path) -> Iterator[int]:
        sources: list[dict[str, Any]] = [{"path": folder, "name": "a"}]
        if mixture:
            sources = [sources[0] | {"weight": 0.7}, {"path": folder, "name": "b", "weight": 0.3}]
        cfg = RunConfig.model_validate(
            {
                "data": {
                    "type": "tokens",
                    "sources": tuple(sources),
                    "packing": packing,
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
        for problem in fit.file_problems(folder):  # as at the start of every run
            raise problem
        share = Share(0, 1, BATCH, torch.device("cpu"), mask_documents=mixture)
        for batch in training_batches(open_dataset(cfg), share, 0):
            for micro_batch in batch.micro_batches:
                yield micro_batch.tokens.numel()

    return feed


def megatron(samples: int, *, masks: bool = False) -> Feeder:
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

    def feed(folder: Path) -> Iterator[int]:
        stems = [str(path.with_suffix("")) for path in sorted(folder.glob("*.idx"))]
        config = GPTDatasetConfig(
            random_seed=0,
            sequence_length=SEQ_LEN,
            blend=(stems, None),
            split="1",
            path_to_cache=str(folder / "megatron-cache"),
            tokenizer=Tokenizer(),
            reset_position_ids=masks,
            reset_attention_mask=False,
            eod_mask_loss=masks,
            create_attention_mask=False,
        )
        sizes = [samples, None, None]
        train = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]
        first = 0
        while True:
            rows = [train[(first + i) % len(train)]["tokens"] for i in range(BATCH)]
            yield torch.stack(rows).numel()
            first += BATCH

    return feed


def litdata() -> Feeder:
    """Return StreamingDataset over chunks of tokens, shuffled."""
    import litdata as library
    from litdata.streaming.item_loader import TokensLoader

    def feed(folder: Path) -> Iterator[int]:
        dataset = library.StreamingDataset(
            input_dir=str(folder), item_loader=TokensLoader(block_size=SEQ_LEN), shuffle=True
        )
        while True:
            for batch in library.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=0):
                yield batch.numel()

    return feed


def litdata_tokens(path: str) -> Iterator[Any]:
    """Yield the ids of a shard, cut to complete samples, as litdata's TokensLoader requires."""
    import numpy as np
    import torch

    ids = np.fromfile(path, np.uint16).astype(np.int32)
    yield torch.from_numpy(ids[: len(ids) // SEQ_LEN * SEQ_LEN])


def write_litdata(source: Path, folder: Path) -> None:
    """Write the same tokens in litdata's format, one chunk per shard."""
    import litdata as library
    from litdata.streaming.item_loader import TokensLoader

    files = [str(path) for path in sorted(source.glob("*.bin"))]
    largest = max(Path(file).stat().st_size for file in files) // 2
    library.optimize(
        litdata_tokens, files, str(folder), chunk_size=largest, num_workers=1,
        item_loader=TokensLoader(),
    )  # fmt: skip


def feeder(name: str, samples: int) -> Feeder:
    """Return the feeder called `name`, with its imports done."""
    match name:
        case "dtt":
            return dtt()
        case "dtt-masked-mixture":
            return dtt(mixture=True)
        case "dtt-best-fit":
            return dtt(mixture=True, packing="best-fit")
        case "megatron":
            return megatron(samples)
        case "megatron-masked":
            return megatron(samples, masks=True)
        case "litdata":
            return litdata()
        case _:
            raise ValueError(name)


def measure(feed: Feeder, folder: Path, seconds: float) -> dict[str, float]:
    start = time.perf_counter()
    batches = feed(folder)
    next(batches)
    first = time.perf_counter() - start
    descriptors = len(list(Path("/dev/fd").iterdir()))
    stretch(batches, seconds)  # warms caches and memory maps
    rate, cpu_rate = stretch(batches, seconds)
    return {
        "first_batch": first,
        "descriptors": descriptors,
        "rate": rate,
        "cpu_rate": cpu_rate,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def stretch(batches: Iterator[int], seconds: float) -> tuple[float, float]:
    """Return tokens per second of wall time and of CPU time, over at least one batch."""
    begun, cpu, tokens = time.perf_counter(), time.process_time(), next(batches)
    while time.perf_counter() - begun < seconds:
        tokens += next(batches)
    return tokens / (time.perf_counter() - begun), tokens / (time.process_time() - cpu)


def main() -> None:
    name, folder, seconds, *rest = sys.argv[1:]
    if name == "write-litdata":
        write_litdata(Path(folder), Path(seconds))
        return
    feed = feeder(name, int(rest[0]) if rest else 0)
    print(json.dumps(measure(feed, Path(folder), float(seconds))))


if __name__ == "__main__":
    main()
