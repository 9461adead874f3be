"""Measure what the family `transformers` costs: a bare loop, the family forced, and dtt's own.

    OMP_NUM_THREADS=1 python benchmarks/library_speed.py llama qwen3

The three train models of the same sizes, about 20M parameters, in fp32 on one core, with AdamW,
clipping and rows of 256 random tokens. Time is that of the CPU, which other processes do not
change much; the fastest of the steps counts.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import chdir
from itertools import pairwise
from typing import Any

import torch

SIZES = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 64}
OWN = {"dim": 384, "ffn_dim": 1024, "n_layers": 8, "n_heads": 6, "n_kv_heads": 6, "head_dim": 64}
VOCABULARY, LENGTH, ROWS, STEPS = 8192, 256, 2, 7


def bare(kind: str) -> float:
    """Return the seconds of a step of a plain loop around the library's model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **SIZES, **HEADS, vocab_size=VOCABULARY)
    model: Any = AutoModelForCausalLM.from_config(config).float()  # type: ignore[no-untyped-call]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    times = [time.process_time()]
    for _ in range(STEPS):
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1))
        inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        found = model(input_ids=inputs, labels=targets, shift_labels=targets)
        found.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.process_time())
    return fastest(times)


def trained(model: dict[str, Any]) -> float:
    """Return the seconds of a step of `dtt train`."""
    import dtt

    settings = {
        "model": model, "name": "speed", "optim": {"type": "adamw"},
        "data": {"type": "synthetic", "vocab_size": VOCABULARY}, "schedule": {"warmup": 0},
        "train": {
            "steps": STEPS, "seq_len": LENGTH, "global_batch_tokens": LENGTH * ROWS,
            "micro_batch": ROWS, "eval_every": 0, "sample_tokens": 0, "precision": "fp32",
            "device": "cpu", "log_every": 1, "compile": False,
        },
        "checkpoint": {"every": 1000},
    }  # fmt: skip
    times: list[float] = []

    def on_log(record: Any) -> None:
        if record["kind"] == "train":
            times.append(time.process_time())

    with tempfile.TemporaryDirectory() as name, chdir(name):
        dtt.train(dtt.load(settings), on_log=on_log)
    return fastest(times)


def fastest(times: list[float]) -> float:
    """Return the smallest time between two of `times`, without the first steps."""
    return min(after - before for before, after in pairwise(times[1:]))


def main() -> None:
    """Print tokens per second of the CPU for each type, and ratios to the bare loop."""
    print("| type | bare loop, tokens/s | forced | own family |")
    print("| --- | --- | --- | --- |")
    for kind in sys.argv[1:] or ["llama", "qwen3"]:
        config = {"model_type": kind, **SIZES, **HEADS}
        seconds = (
            bare(kind),
            trained({"family": "transformers", "config": config}),
            trained({"family": kind, **OWN}),
        )
        loop, forced, own = (LENGTH * ROWS / one for one in seconds)
        print(f"| {kind} | {loop:.0f} | {forced / loop:.2f} | {own / loop:.2f} |", flush=True)


if __name__ == "__main__":
    main()
