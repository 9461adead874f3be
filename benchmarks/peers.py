"""The tools that dtt is compared with, each in a separate process of its own environment.

    python benchmarks/peers.py tokenize PEER TOKENIZER.json FOLDER OUT [NUMBER OF]
    python benchmarks/peers.py deduplicate FOLDER OUT
    python benchmarks/peers.py train PEER SHAPE PRECISION THREADS
    python benchmarks/peers.py load FOLDER SAMPLES

Needs only the peer itself and torch or numpy, not dtt: tokenization.py, training.py and
dataloader.py start it with the interpreter that has the peers.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pool
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor, nn


def peak_memory() -> int:
    """Return the peak resident memory of this process, in bytes (Linux)."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# ---- tokenizing Parquet files --------------------------------------------------------------------


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


TOKENIZERS: dict[str, Callable[..., None]] = {
    "encoder": encoder_on_files,
    "encoder-process": encoder_process,
    "hf": hf,
    "pool": pool,
    "datasets": datasets,
    "datatrove": datatrove,
}


# ---- deduplication -------------------------------------------------------------------------------


def deduplicate(folder: Path, out: Path) -> None:
    """Run the four stages of datatrove's MinHash on Parquet files with the columns `text` and `id`.

    Writes the documents that stay as JSON lines to OUT/kept.
    """
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import (
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.pipeline.readers import ParquetReader
    from datatrove.pipeline.writers import JsonlWriter

    config = MinhashConfig()  # 5-grams, 14 buckets of 8 hashes, as for FineWeb
    files = len(list(folder.glob("*.parquet")))
    reader = ParquetReader(str(folder), glob_pattern="*.parquet")
    sums, buckets, gone = (str(out / name) for name in ("signatures", "buckets", "removed"))
    stages: list[tuple[list[Any], int]] = [
        ([reader, MinhashDedupSignature(sums, config)], files),
        ([MinhashDedupBuckets(sums, buckets, config=config)], config.num_buckets),
        ([MinhashDedupCluster(buckets, gone, config)], 1),
        (
            [reader, MinhashDedupFilter(gone), JsonlWriter(str(out / "kept"), compression=None)],
            files,
        ),
    ]
    for number, (steps, tasks) in enumerate(stages):
        logs = str(out / f"logs-{number}")
        LocalPipelineExecutor(steps, tasks=tasks, workers=WORKERS, logging_dir=logs).run()


# ---- training ------------------------------------------------------------------------------------
# Each worker is a generator. It does its set-up before the first `yield`, then one complete step
# per `next`, including clipping and a read of the loss, as in the libraries' own loops.


Shape = dict[str, Any]
Steps = Iterator[float]

SHAPES: dict[str, Shape] = {
    "gpt2-124m": {
        "family": "gpt2", "dim": 768, "n_layers": 12, "n_heads": 12, "ffn_dim": 3072,
        "vocab_size": 50304, "seq_len": 512, "batch": 2,
    },
    "llama-34m": {
        "family": "llama", "dim": 512, "n_layers": 8, "n_heads": 8, "ffn_dim": 1408,
        "vocab_size": 16384, "seq_len": 512, "batch": 8,
    },
    "qwen3-moe-71m": {
        "family": "qwen3_moe", "dim": 512, "n_layers": 8, "n_heads": 8, "ffn_dim": 1408,
        "vocab_size": 16384, "seq_len": 512, "batch": 4, "n_experts": 16, "experts_per_token": 4,
        "expert_ffn_dim": 256,
    },
}  # fmt: skip


def step_on_request(steps: Steps) -> None:
    """Run a step for every line of standard input, and print its seconds and loss as JSON."""
    next(steps)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        if line.strip() == "end":
            break
        start = time.perf_counter()
        loss = next(steps)
        print(json.dumps({"seconds": time.perf_counter() - start, "loss": loss}), flush=True)
    print(json.dumps({"peak": peak_memory()}), flush=True)


def batches(shape: Shape) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random tokens and their successors as targets, each [B, T]."""
    import torch

    generator = torch.Generator().manual_seed(0)
    while True:
        size = shape["batch"], shape["seq_len"] + 1
        ids = torch.randint(0, shape["vocab_size"], size, generator=generator)
        yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loop(
    model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor], shape: Shape, precision: str
) -> Steps:
    """Run the common training loop: autocast, backward, clip, fused AdamW."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    data = batches(shape)
    yield 0.0
    while True:
        tokens, targets = next(data)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_of(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def hf_model(shape: Shape) -> Any:
    """Return the model of the shape in transformers, without dropout."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    if shape["family"] == "gpt2":
        config = GPT2Config(
            n_embd=shape["dim"], n_layer=shape["n_layers"], n_head=shape["n_heads"],
            vocab_size=shape["vocab_size"], n_positions=shape["seq_len"],
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )  # fmt: skip
        return GPT2LMHeadModel(config)
    sizes: dict[str, Any] = {
        "hidden_size": shape["dim"], "num_hidden_layers": shape["n_layers"],
        "num_attention_heads": shape["n_heads"],
        "num_key_value_heads": shape.get("n_kv_heads", shape["n_heads"]),
        "intermediate_size": shape["ffn_dim"], "vocab_size": shape["vocab_size"],
        "max_position_embeddings": shape["seq_len"], "tie_word_embeddings": True,
        "use_cache": False,
    }  # fmt: skip
    if shape["family"] == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes))
    sizes |= {
        "head_dim": shape["dim"] // shape["n_heads"], "num_experts": shape["n_experts"],
        "num_experts_per_tok": shape["experts_per_token"],
        "moe_intermediate_size": shape["expert_ffn_dim"], "norm_topk_prob": True,
        "output_router_logits": True,
    }  # fmt: skip
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))


def transformers_loop(shape: Shape, precision: str) -> Steps:
    """Train the model and loss of transformers in a plain loop."""
    model = hf_model(shape).train()

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=tokens, labels=targets, shift_labels=targets).loss
        return loss

    return loop(model, loss_of, shape, precision)


def transformers_trainer(shape: Shape, precision: str) -> Steps:
    """Train with transformers.Trainer, which waits for `next` before each step."""
    import queue
    import threading

    from transformers import Trainer, TrainerCallback, TrainingArguments

    start_step: queue.Queue[None] = queue.Queue()
    step_done: queue.Queue[float] = queue.Queue()

    class Wait(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            start_step.get()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            step_done.put(0.0)

    data = batches(shape)
    rows = [row for _ in range(64) for row in next(data)[0]]
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=shape["batch"], max_steps=10**6,
        bf16=precision == "bf16", use_cpu=True, optim="adamw_torch_fused", learning_rate=3e-4,
        weight_decay=0.1, report_to=[], logging_strategy="no", save_strategy="no",
        disable_tqdm=True, max_grad_norm=1.0,
    )  # fmt: skip
    trainer = Trainer(
        model=hf_model(shape),
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[Wait()],
    )
    threading.Thread(target=trainer.train, daemon=True).start()
    yield 0.0
    while True:
        start_step.put(None)
        yield step_done.get()


def litgpt_loop(shape: Shape, precision: str) -> Steps:
    """Train the model and chunked loss of litgpt, set up as in its pretrain command."""
    from litgpt import GPT, Config
    from litgpt.utils import chunked_cross_entropy

    common = {
        "block_size": shape["seq_len"], "n_layer": shape["n_layers"], "n_embd": shape["dim"],
        "n_head": shape["n_heads"], "padded_vocab_size": shape["vocab_size"],
        "vocab_size": shape["vocab_size"], "intermediate_size": shape["ffn_dim"],
    }  # fmt: skip
    if shape["family"] == "gpt2":
        config = Config(**common, rotary_percentage=0.0, bias=True, norm_class_name="LayerNorm",
                        mlp_class_name="GptNeoxMLP", gelu_approximate="tanh",
                        parallel_residual=False)  # fmt: skip
    else:
        config = Config(**common, rotary_percentage=1.0, bias=False, norm_class_name="RMSNorm",
                        mlp_class_name="LLaMAMLP", parallel_residual=False)  # fmt: skip
    model = GPT(config)
    model.lm_head.weight = model.transformer.wte.weight
    initialize(model)
    return loop(
        model, lambda x, y: chunked_cross_entropy(model(x), y, chunk_size=128), shape, precision
    )


def initialize(model: nn.Module) -> None:
    """Re-initialise weights with a standard deviation of 0.02 in place of the library's default."""
    from torch.nn.init import normal_

    for parameter in model.parameters():
        if parameter.ndim > 1:
            normal_(parameter, std=0.02)


TRAINERS: dict[str, Callable[[Shape, str], Steps]] = {
    "transformers, loop": transformers_loop,
    "transformers.Trainer": transformers_trainer,
    "litgpt, loop": litgpt_loop,
}


def train(peer: str, shape: str, precision: str, threads: str) -> None:
    """Train with a peer, one step at a time."""
    import torch

    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    step_on_request(TRAINERS[peer](SHAPES[shape], precision))


# ---- loading -------------------------------------------------------------------------------------


SEQ_LEN, BATCH = 1024, 32


def megatron(samples: int) -> Callable[[Path], Iterator[int]]:
    """Return Megatron's loader of a folder: GPTDataset over a blend of all shards.

    It yields the number of tokens of each batch. Its indices are cached in the folder.
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
        vocab_size, eod, pad, unique_identifiers = 50257, 0, -1, {"class": "none"}

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


def load(folder: str, samples: str) -> None:
    """Print the figures of Megatron's first batch as JSON."""
    print(json.dumps(first_batch(megatron(int(samples)), Path(folder))))


def first_batch(loader: Callable[[Path], Iterator[int]], folder: Path) -> dict[str, float]:
    """Return the seconds to the first batch, the file descriptors open then, and peak memory."""
    start = time.perf_counter()
    next(loader(folder))
    seconds = time.perf_counter() - start
    descriptors = len(list(Path("/dev/fd").iterdir()))
    return {"first_batch": seconds, "descriptors": descriptors, "memory": peak_memory()}


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["tokenize", peer, *paths]:
            TOKENIZERS[peer](*map(Path, paths))
        case ["deduplicate", *paths]:
            deduplicate(*map(Path, paths))
        case ["train", *arguments]:
            train(*arguments)
        case ["load", *arguments]:
            load(*arguments)
