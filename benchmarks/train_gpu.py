"""Measure tokens per second, MFU and memory of training on GPUs, and profile a step.

    python benchmarks/train_gpu.py [CASE …] [--steps N] [--processes 1] [--peer]

Cases: 124m; 1b, also with masked documents; mixtures of experts, the larger in pure bf16; 8b in
pure bf16 with remat none, selective and full; 8b with fp32 masters; each with AdamW and with Muon.
A step has 524,288 tokens per process, as in real runs: with fewer, the optimizer's share of the
time, above all Muon's, would be many times too large. Every run is a `dtt train` process (under
torchrun with `--processes`) on a small corpus that the script creates; figures are medians of the
logged values over the second half of the steps. A step near the end is profiled if its trace is
small enough. `--peer` trains the same shape with the model of transformers in a plain loop:
autocast, SDPA, fused AdamW, compiled. MFU is computed by the convention of the peers: 6 N + 12 L d
S FLOPs per token, where N are the parameters that compute one, against the dense bf16 peak of the
data sheet.

A run is killed after its last measured step: the save that ends a run of 8B would write 64 GB.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measurement import DTT, Table, make_tokens, parser_of
from peers import Shape, hf_model

from dtt.base import local


class Case(NamedTuple):
    """A model shape and its training settings."""

    shape: Shape
    keys: list[str]
    accumulation: int
    """Micro-batches in a step."""
    steps: int = 8

    @property
    def profiled(self) -> bool:
        """True if the trace of a step is small enough to be written in a few seconds."""
        return self.accumulation <= 8


LLAMA = {"family": "llama", "vocab_size": 128256}
LLAMA_1B = LLAMA | {
    "dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 8192, "seq_len": 2048,
    "batch": 8,
}  # fmt: skip
LLAMA_8B = LLAMA | {
    "dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 14336, "seq_len": 4096,
}  # fmt: skip
CASES = {
    "124m": Case(
        {"family": "gpt2", "dim": 768, "n_layers": 12, "n_heads": 12, "n_kv_heads": 12,
         "ffn_dim": 3072, "vocab_size": 50304, "seq_len": 1024, "batch": 64},
        ["train.precision=bf16", "model.tie_embeddings=true"],
        8,
        30,
    ),
    "1b": Case(
        LLAMA_1B,
        ["train.precision=bf16", "model.tie_embeddings=true"],
        32,
    ),
    "1b-fp8": Case(LLAMA_1B, ["train.precision=fp8", "model.tie_embeddings=true"], 32),
    "1b-lora": Case(
        LLAMA_1B,
        ["train.precision=bf16", "init.from=hf:base", "adapter.type=lora", "adapter.rank=64"],
        32,
    ),
    **{
        f"8b-lora{suffix}": Case(
            LLAMA_8B | {"batch": 1},
            [f"train.precision={precision}", "init.from=hf:base-8b", "adapter.type=lora",
             "adapter.rank=16", "train.remat=full"],
            128,
        )
        for suffix, precision in (("", "bf16"), ("-fp8", "fp8"))
    },
    # A third of the layers: fp32 masters and optimizer state of all take more than an H100 has.
    **{
        f"8b-third-{precision}": Case(
            LLAMA_8B | {"n_layers": 12, "batch": 1},
            [f"train.precision={precision}", "model.tie_embeddings=false"],
            128,
        )
        for precision in ("bf16", "fp8")
    },
    "1b-documents": Case(
        LLAMA_1B,
        ["train.precision=bf16", "model.tie_embeddings=true", "data.mask_documents=true"],
        32,
    ),
    # Experts of whole multiples of a tile; 0.33 of 1.73 billion parameters compute a token.
    "mixture-1.7b": Case(
        {"family": "qwen3_moe", "dim": 1024, "n_layers": 16, "n_heads": 16, "n_kv_heads": 16,
         "ffn_dim": 4096, "vocab_size": 50304, "seq_len": 2048, "batch": 8, "n_experts": 32,
         "experts_per_token": 4, "expert_ffn_dim": 1024},
        ["train.precision=bf16", "model.tie_embeddings=true", "train.balance_loss=0.01"],
        32,
    ),
    "olmoe-1b-7b": Case(
        {"family": "olmoe", "dim": 2048, "n_layers": 16, "n_heads": 16, "n_kv_heads": 16,
         "ffn_dim": 1024, "vocab_size": 50304, "seq_len": 4096, "batch": 2, "n_experts": 64,
         "experts_per_token": 8},
        ["train.precision=bf16-pure", "model.tie_embeddings=false", "train.balance_loss=0.01"],
        64,
    ),
    **{
        f"8b-{remat}": Case(
            LLAMA_8B | {"batch": 2},
            ["train.precision=bf16-pure", f"train.remat={remat}", "model.tie_embeddings=false"],
            64,
        )
        for remat in ("none", "selective", "full")
    },
    "8b-fp32-masters": Case(
        LLAMA_8B | {"batch": 1},
        ["train.precision=bf16", "train.remat=full", "model.tie_embeddings=false"],
        128,
    ),
}  # fmt: skip
COLUMNS = {"tokens/s": 10, "s/step": 9, "MFU": 7, "causal": 8, "of matmul": 11, "GB": 7}


def train(
    folder: Path, tokens: Path, name: str, case: Case, optimizer: str, steps: int, processes: int
) -> dict[str, Any]:
    """Run `dtt train`; return the medians of its logged figures, or its error as `error`."""
    shape = case.shape
    step_tokens = shape["batch"] * shape["seq_len"] * case.accumulation * processes
    sizes = [
        f"model.{key}={size}" for key, size in shape.items() if key not in ("seq_len", "batch")
    ]
    for base_folder in (folder / key.partition(":")[2] for key in case.keys if "=hf:" in key):
        sizes = []  # those of the base
        if not base_folder.exists():
            # A CPU takes long to draw a billion random weights: 12 s (benchmarks/log.md).
            with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
                base = hf_model(shape)
            base.to(torch.bfloat16).save_pretrained(base_folder)
            del base
            torch.cuda.empty_cache()
            shutil.copy(tokens / "tokenizer.json", base_folder)
    keys = [
        f"name={name}", f"data.tokens={tokens}", f"optim.type={optimizer}", "train.steps=1000",
        f"train.seq_len={shape['seq_len']}", f"train.micro_batch={shape['batch']}",
        f"train.global_batch_tokens={step_tokens}", "train.log_every=1", "train.eval_every=0",
        "train.eval_tokens=1024", "train.sample_tokens=0", "checkpoint.every=1000",
        *sizes, *case.keys,
    ]  # fmt: skip
    if case.profiled:
        keys.append(f"profile.steps=[{steps - 2},{steps - 1}]")
    command = [*DTT, "train", *keys]
    if processes > 1:
        keys += ["parallel.shard=-1", "parallel.replicate=1"]
        command = local.torchrun_argv(processes, ["train", *keys])
    env = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    metrics = folder / "jobs" / name / "metrics.jsonl"
    log = folder / f"{name}.log"
    with log.open("w") as output:
        run = subprocess.Popen(
            command, cwd=folder, stdout=output, stderr=output, env=env, start_new_session=True
        )
        perf: list[dict[str, Any]] = []
        while run.poll() is None and (not perf or perf[-1]["step"] < steps):
            time.sleep(0.5)
            perf = _perf(metrics)
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)  # torchrun's workers are in the same group
        run.wait()
    # The first half has compilation and warm-up; one step has the writing of the profile.
    perf = [one for one in _perf(metrics)[steps // 2 :] if "profile" not in one["seconds"]]
    if not perf:
        messages = (line for line in log.read_text().splitlines() if "dtt:" in line)
        return {"error": next(messages, f"too few steps: see {name}.log")}
    numbers = [key for key, value in perf[0].items() if isinstance(value, int | float)]
    return {key: statistics.median(record[key] for record in perf) for key in numbers}


def _perf(metrics: Path) -> list[dict[str, Any]]:
    """Return the complete `perf` records of a job so far."""
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    records = (json.loads(line) for line in lines if line.endswith("\n"))
    return [record for record in records if record["kind"] == "perf"]


def peer(case: Case, steps: int) -> tuple[float, float]:
    """Train the model of transformers in a plain loop; return tokens per second and peak GB.

    An adapter is that of PEFT, on frozen weights in bf16 as dtt has them. Without a GPU, nothing is
    compiled, and the memory is 0.
    """
    shape, device = case.shape, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with device:
        model = hf_model(shape).train()
        if "adapter.type=lora" in case.keys:
            from peft import LoraConfig, get_peft_model

            (rank,) = (int(key[13:]) for key in case.keys if key.startswith("adapter.rank="))
            lora = LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear")
            model = get_peft_model(model.to(torch.bfloat16), lora)
    compiled: Any = torch.compile(model) if device.type == "cuda" else model
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-4, weight_decay=0.1, fused=True)
    size = shape["batch"], shape["seq_len"] + 1
    durations = []
    for _ in range(steps):
        start = time.perf_counter()
        ids = torch.randint(0, shape["vocab_size"], size, device=device)
        with torch.autocast(device.type, torch.bfloat16):
            targets = ids[:, 1:].contiguous()
            loss = compiled(input_ids=ids[:, :-1], labels=targets, shift_labels=targets).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        durations.append(time.perf_counter() - start)
    rate = shape["batch"] * shape["seq_len"] / statistics.median(durations[steps // 2 :])
    return rate, torch.cuda.max_memory_allocated() / 1e9


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("cases", nargs="*", default=[], choices=[*CASES, []])
    parser.add_argument("--steps", type=int, help="of every case; default: the case's own")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--peer", action="store_true")
    options = parser.parse_args()
    options.cases = options.cases or list(CASES)
    if not torch.cuda.is_available():
        sys.exit("no GPU here: benchmarks/train_cpu.py is for CPUs")
    print(f"{options.processes} x {torch.cuda.get_device_name()}, torch {torch.__version__}")
    table = Table("", 28, COLUMNS)
    with tempfile.TemporaryDirectory(prefix="dtt-train-gpu-") as name:
        folder = Path(name)
        tokens = make_tokens(folder)
        for case, optimizer in product(options.cases, ("adamw", "muon")):
            run, steps = f"{case}-{optimizer}", options.steps or CASES[case].steps
            figures = train(folder, tokens, run, CASES[case], optimizer, steps, options.processes)
            if "error" in figures:
                table.row(f"{case}, {optimizer}", note=figures["error"])
            else:
                table.row(f"{case}, {optimizer}", *cells(figures))
            for profile in sorted((folder / "jobs" / run / "profiles").glob("*.txt"))[:1]:
                print("\n".join(profile.read_text().splitlines()[:24]))
        for case in options.cases if options.peer else ():
            try:
                rate, memory = peer(CASES[case], options.steps or 30)
            except torch.OutOfMemoryError:
                table.row(f"{case}, transformers", note="out of memory")
                continue
            cells_of_peer = f"{rate:.0f}", "", "", "", "", f"{memory:.1f}"
            table.row(f"{case}, transformers", *cells_of_peer)


def cells(figures: dict[str, Any]) -> list[str]:
    """Format the figures of one run as the cells of a row."""
    return [
        f"{figures['tokens_per_second']:.0f}",
        f"{figures['seconds_per_step']:.3f}",
        *(
            f"{figures[key]:.1%}" if key in figures else "n/a"
            for key in ("mfu", "mfu_causal", "matmul_share")
        ),
        f"{figures['memory_gb']:.1f}",
    ]


if __name__ == "__main__":
    main()
