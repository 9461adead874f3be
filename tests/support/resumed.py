"""A run on several ranks, and the same one with a restart in the middle."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from math import prod

from support.forked_runs import run
from support.running import Dtt

SETTINGS = (
    "data.type=synthetic", "data.vocab_size=384", "name=t", "model.dim=48", "model.n_layers=2",
    "model.n_heads=6", "model.ffn_dim=144", "model.dropout=0.1", "train.steps=4",
    "train.seq_len=30",
    # Several micro-batches of two sequences on one, two and three ranks.
    "train.global_batch_tokens=360", "train.micro_batch=2", "train.eval_every=0",
    "train.eval_tokens=60", "train.sample_tokens=0", "train.ema_decay=0.9", "train.precision=fp32",
    "train.device=cpu", "checkpoint.every=2", "schedule.warmup=2",
)  # fmt: skip

WITHOUT_MODEL = tuple(key for key in SETTINGS if not key.startswith("model."))
"""The same for a model that has other keys."""
WITHOUT_DATA = tuple(key for key in SETTINGS if not key.startswith("data."))
"""The same for other data."""
FOR_MORE_RANKS = "train.global_batch_tokens=1800"
"""Divides among 5 and 6 ranks, too, with several micro-batches on each. It takes five times as
long, because time goes by the number of micro-batches."""


def differing(dtt: Dtt, layout: str, *more: str, settings: Sequence[str] = SETTINGS) -> list[str]:
    """Return the tensor files of the last checkpoint that a restart after step 2 changes.

    `layout` is the keys of `parallel`, such as `replicate=2 shard=3`.
    """
    sizes = [part.split("=") for part in layout.split()]
    ranks = prod(int(size) for key, size in sizes if key != "expert")
    keys = [f"parallel.{part}" for part in layout.split()]
    run(dtt, "train", *settings, *keys, *more, ranks=ranks)
    folder, whole = dtt.folder / "jobs/t/checkpoints", dtt.folder / "whole"
    shutil.move(folder / "step-000004", whole)
    run(dtt, "train", "jobs/t", ranks=ranks)
    files = sorted(whole.glob("*.safetensors"))
    assert files
    return [
        file.name
        for file in files
        if file.read_bytes() != (folder / "step-000004" / file.name).read_bytes()
    ]
