"""The loss curve of a run is the same on every layout.

By default one family runs on each layout, the other options in turn. DTT_ALL_LAYOUTS=1 runs every
combination of family, layout, optimizer and accumulation, and `-s` prints the differences:
`DTT_ALL_LAYOUTS=1 ./env.sh pytest --all -s tests/parallel/test_layouts.py`.
"""

from __future__ import annotations

import os
import re
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
from support import forked_runs
from support.running import Dtt, write_documents

from dtt.artifacts.jobdir import JobDir
from dtt.track import jsonl

STEPS = 20
TOLERANCE = 1e-10
"""Nats. In fp64, a different summation order changes a loss by 1e-15, and each training step
amplifies it."""
SEQUENCES = 16
"""Sequences of a global batch."""
FAMILIES = {
    "gpt2": [],
    "llama": ["model.n_kv_heads=2"],
    "qwen3": ["model.n_kv_heads=2"],
    "gemma3": ["model.n_kv_heads=2", "model.window=16", "model.window_pattern=2"],
}
LAYOUTS = {
    "DDP 2": (2, []),
    "FSDP2 2": (2, ["parallel.shard=2"]),
    "HSDP 2x2": (4, ["parallel.replicate=2", "parallel.shard=2"]),
    "tensor 2": (2, ["parallel.tensor=2"]),
    "FSDP2 2 x tensor 2": (4, ["parallel.shard=2", "parallel.tensor=2"]),
    "context 2": (2, ["parallel.context=2"]),
}
OPTIMIZERS = {
    "AdamW": ["optim.type=adamw", "optim.lr=2e-3"],
    "Muon": ["optim.type=muon", "optim.lr=4e-3"],
}
ACCUMULATION = {
    1: [],
    # Packed documents with masks: the micro-batches have different numbers of targets.
    4: ["data.packing=best-fit", "data.mask_documents=true"],
}


class Case(NamedTuple):
    """A run to compare."""

    family: str
    layout: str
    optimizer: str
    accumulation: int


def cases(every: bool) -> list[Case]:
    """All combinations, or one for each layout."""
    if every:
        return list(map(Case._make, product(FAMILIES, LAYOUTS, OPTIMIZERS, ACCUMULATION)))
    families, rest = list(FAMILIES), list(product(OPTIMIZERS, ACCUMULATION))
    # The last two take other options with their families.
    return [
        Case(families[i % 4], layout, *rest[(i + 2 * (i // 4)) % 4])
        for i, layout in enumerate(LAYOUTS)
    ]


def losses(dtt: Dtt, case: Case, ranks: int, keys: list[str]) -> list[float]:
    """The training and evaluation losses of a run."""
    name = re.sub(r"[ /]+", "-", " ".join(map(str, case)))
    replicas = ranks // 2 if "context" in case.layout or "tensor" in case.layout else ranks
    # The reference takes the batch in one pass.
    micro_batch = SEQUENCES // (replicas * case.accumulation) if ranks > 1 else SEQUENCES
    forked_runs.run(
        dtt, "train", f"name={name}", "data.tokens=tokens", f"model.family={case.family}",
        "model.dim=64", "model.n_layers=2", "model.n_heads=4", f"train.steps={STEPS}",
        "train.seq_len=64", f"train.global_batch_tokens={SEQUENCES * 64}",
        f"train.micro_batch={micro_batch}", "train.precision=fp64", "train.eval_tokens=512",
        "train.sample_tokens=0", "schedule.warmup=2", *FAMILIES[case.family], *keys,
        *OPTIMIZERS[case.optimizer], *ACCUMULATION[case.accumulation], ranks=ranks,
    )  # fmt: skip
    records = jsonl.read(JobDir(dtt.folder / "jobs" / name).metrics)
    return [record["loss"] for record in records if record["kind"] in ("train", "eval")]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_layout_trains_as_one_process_does(tmp_path: Path) -> None:
    dtt = Dtt(tmp_path)
    write_documents(tmp_path / "counting.jsonl")
    keys = ("tokenizer.vocab_size=300", "tokenize.unit_bytes=8192", "tokenize.out=tokens")
    dtt("download", "-d", "counting.jsonl")
    dtt("tokenize", "-d", "counting.jsonl", *keys, "tokenize.validation_fraction=0.1")
    references: dict[Case, list[float]] = {}
    different = {}
    for case in cases(os.environ.get("DTT_ALL_LAYOUTS") == "1"):
        alone = case._replace(layout="alone")
        if alone not in references:
            references[alone] = losses(dtt, alone, 1, [])
        actual = losses(dtt, case, *LAYOUTS[case.layout])
        assert len(actual) == len(references[alone]) >= STEPS
        difference = max(abs(a - b) for a, b in zip(actual, references[alone], strict=True))
        print(f"{' '.join(map(str, case)):36}{difference:.1e}", flush=True)
        if difference > TOLERANCE:
            different[case] = difference
    assert not different
