"""Tokens per second, MFU and memory of training on GPUs, and a profile of a step.

    python benchmarks/train_gpu.py [CASE …] [--steps 30] [--processes 1] [--peer]

Cases: 8b (pure bf16), 8b-fp32-masters, 1b, 124m; each with AdamW and with Muon. Every run is a
`dtt train` process (torchrun's, with `--processes`) on a small corpus that is made here; its
figures are those it logs, the medians of the second half of the steps. `--peer` trains the same
shape with the model of transformers in a plain loop: autocast, SDPA, fused AdamW, compiled.
MFU counts as PEERS do: 6 N + 12 L d S, against the dense bf16 peak of the data sheet.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from runs import make_tokens
from train_peers import Shape, hf_model


class Case(NamedTuple):
    """A shape and how it is trained."""

    shape: Shape
    keys: list[str]
    accumulation: int = 1


LLAMA = {"family": "llama", "vocab_size": 128256}
CASES = {
    "124m": Case(
        {"family": "gpt2", "dim": 768, "n_layers": 12, "n_heads": 12, "n_kv_heads": 12,
         "ffn_dim": 3072, "vocab_size": 50304, "seq_len": 1024, "batch": 64},
        ["train.precision=bf16", "model.tie_embeddings=true"],
        8,  # 524,288 tokens a step
    ),
    "1b": Case(
        LLAMA | {"dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 8192,
                 "seq_len": 2048, "batch": 8},
        ["train.precision=bf16", "model.tie_embeddings=true"],
    ),
    "8b": Case(
        LLAMA | {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 14336,
                 "seq_len": 4096, "batch": 2},
        ["train.precision=bf16-pure", "train.remat=full", "model.tie_embeddings=false"],
    ),
    "8b-fp32-masters": Case(
        LLAMA | {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 14336,
                 "seq_len": 4096, "batch": 1},
        ["train.precision=bf16", "train.remat=full", "model.tie_embeddings=false"],
    ),
}  # fmt: skip
SIZES = ("family", "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size")


def train(
    folder: Path, tokens: Path, name: str, case: Case, optimizer: str, steps: int, processes: int
) -> dict[str, Any]:
    """Run `dtt train`; medians of what it logs, or why it ended."""
    shape = case.shape
    step_tokens = shape["batch"] * shape["seq_len"] * case.accumulation * processes
    sizes = [f"model.{key}={shape[key]}" for key in SIZES]
    keys = [
        f"name={name}", f"data.tokens={tokens}", f"optim.type={optimizer}", f"train.steps={steps}",
        f"train.seq_len={shape['seq_len']}", f"train.micro_batch={shape['batch']}",
        f"train.global_batch_tokens={step_tokens}", "train.log_every=1", "train.eval_every=0",
        "train.eval_tokens=1024", "train.sample_tokens=0", f"checkpoint.every={steps + 1}",
        f"profile.steps=[{steps - 2},{steps - 1}]", *sizes, *case.keys,
    ]  # fmt: skip
    if processes > 1:
        keys.append("parallel.shard=-1")
        keys.append("parallel.replicate=1")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [sys.executable, *launcher, "-m", "dtt.main", "train", *keys]
    env = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env, check=False)
    metrics = folder / "jobs" / name / "metrics.jsonl"
    records = (
        [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    )
    perf = [record for record in records if record["kind"] == "perf"][steps // 2 : steps - 3]
    if not perf:
        return {"lost": next((line for line in run.stderr.splitlines() if "dtt:" in line), "?")}
    keep = [key for key, value in perf[0].items() if isinstance(value, int | float)]
    return {key: statistics.median(record[key] for record in perf) for key in keep}


def peer(shape: Shape, steps: int) -> tuple[float, float]:
    """Tokens per second and peak GB of a plain loop over the model of transformers."""
    torch.cuda.reset_peak_memory_stats()
    with torch.device("cuda"):
        model = hf_model(shape).train()
    compiled: Any = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    size = shape["batch"], shape["seq_len"] + 1
    spent = []
    for _ in range(steps):
        start = time.perf_counter()
        ids = torch.randint(0, shape["vocab_size"], size, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(input_ids=ids[:, :-1], labels=ids[:, 1:], shift_labels=ids[:, 1:]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        spent.append(time.perf_counter() - start)
    rate = shape["batch"] * shape["seq_len"] / statistics.median(spent[steps // 2 :])
    return rate, torch.cuda.max_memory_allocated() / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("cases", nargs="*", default=list(CASES), choices=[*CASES, []])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--peer", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU here: benchmarks/train_cpu.py is for CPUs")
    print(f"{options.processes} x {torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'':28}{'tokens/s':>10}{'s/step':>9}{'MFU':>7}{'causal':>8}{'of matmul':>11}{'GB':>7}")
    with tempfile.TemporaryDirectory(prefix="dtt-train-gpu-") as name:
        folder = Path(name)
        tokens = make_tokens(folder)
        for case, optimizer in product(options.cases, ("adamw", "muon")):
            run = f"{case}-{optimizer}"
            found = train(
                folder, tokens, run, CASES[case], optimizer, options.steps, options.processes
            )
            print(row(f"{case}, {optimizer}", found), flush=True)
            for table in sorted((folder / "jobs" / run / "profiles").glob("*.txt"))[:1]:
                print("\n".join(table.read_text().splitlines()[:24]))
        for case in options.cases if options.peer else ():
            try:
                rate, memory = peer(CASES[case].shape, options.steps)
            except torch.OutOfMemoryError:
                print(f"{case + ', transformers':28} out of memory")
                continue
            print(f"{case + ', transformers':28}{rate:10.0f}{'':35}{memory:7.1f}", flush=True)


def row(name: str, found: dict[str, Any]) -> str:
    """What one run came to."""
    if "lost" in found:
        return f"{name:28} {found['lost']}"
    shares = "".join(
        f"{found[key]:{width}.1%}" if key in found else f"{'n/a':>{width}}"
        for key, width in (("mfu", 7), ("mfu_causal", 8), ("matmul_share", 11))
    )
    rate, seconds, memory = (
        found[key] for key in ("tokens_per_second", "seconds_per_step", "memory_gb")
    )
    return f"{name:28}{rate:10.0f}{seconds:9.3f}{shares}{memory:7.1f}"


if __name__ == "__main__":
    main()
