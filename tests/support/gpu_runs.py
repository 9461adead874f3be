"""Short runs of `dtt train` on a GPU."""

from __future__ import annotations

import json

import torch

from dtt.base.local import torchrun_argv
from dtt.base.ranks import Ranks
from dtt.mesh.dist import World
from support.running import Dtt

WORLD = World(Ranks(), torch.device("cuda", 0), None)
SIZES = (
    "model.dim=64", "model.n_layers=2", "model.n_heads=4", "train.seq_len=128",
    "train.micro_batch=2", "train.global_batch_tokens=1024", "train.eval_every=2",
    "train.eval_tokens=512", "train.sample_tokens=4", "train.log_every=1", "schedule.type=constant",
)  # fmt: skip


def train(dtt: Dtt, processes: int, *arguments: object) -> str:
    """Run `dtt train` in processes of one node, and return its log."""
    if processes == 1:
        return dtt("train", *arguments).stderr
    argv = torchrun_argv(processes, ["train", *map(str, arguments)])
    done = dtt.wait(dtt.start_python(*argv[1:]))
    assert done.returncode == 0, done.stderr
    return done.stderr


def values(dtt: Dtt, name: str, kind: str) -> list[float]:
    """Return the losses that a run has logged."""
    lines = (dtt.folder / f"jobs/{name}/metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if line["kind"] == kind]
