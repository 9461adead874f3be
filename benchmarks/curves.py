"""Compare the curves of pipelines or mixtures over 20 steps with those of one process.

    python benchmarks/curves.py [--experts] [--steps 20]

Pipelines: both schedules, six layouts of up to eight ranks. Mixtures (dots1, with groups, a shared
expert and a correction): eleven layouts of up to four ranks, with 1 and 4 micro-batches. AdamW and
Muon, in fp32, with clipping, masked documents and selective recomputation. Prints the largest
relative difference of the losses and of the gradient norms of all steps, and whether the hashes of
the samples and the loads of experts are equal. `dtt verify` does the same for gradients, in fp64
and over four steps. The exit code is 1 if anything differs by more than 1e-5.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from measurement import Table, make_tokens, parser_of

from dtt.config.parallel import Sizes
from dtt.train import run
from dtt.verify import forked_ranks
from dtt.verify.layouts import REFERENCE, Layout

TOLERANCE = 1e-5
KEYS = [
    "data.tokens=tokens", "data.mask_documents=true", "model.family=llama",
    "model.tie_embeddings=false", "model.dim=64", "model.n_layers=9", "model.n_heads=4",
    "train.seq_len=64", "train.micro_batch=1", "train.global_batch_tokens=1024",
    "train.precision=fp32", "train.device=cpu", "train.clip_norm=0.5", "train.remat=selective",
    "train.eval_every=0", "train.eval_tokens=512", "train.sample_tokens=0", "train.log_every=1",
    "checkpoint.every=1000", "schedule.warmup=5", "track=[]",
]  # fmt: skip
SEQUENCES = 16
PIPELINES = (
    Sizes(pipeline=2), Sizes(pipeline=4), Sizes(pipeline=2, shard=2), Sizes(pipeline=2, tensor=2),
    Sizes(pipeline=2, context=2), Sizes(pipeline=2, replicate=2, shard=2),
)  # fmt: skip

EXPERTS = [
    "model.family=dots1", "model.n_layers=3", "model.n_dense_layers=1", "model.n_experts=8",
    "model.n_expert_groups=4", "model.expert_groups_per_token=2", "model.expert_ffn_dim=64",
    "train.balance_loss=0.01", "train.router_z_loss=0.001", "train.balance_rate=0.01",
]  # fmt: skip
SHARING = (
    (Sizes(replicate=2), 1), (Sizes(shard=2), 1), (Sizes(replicate=2, shard=2), 1),
    (Sizes(tensor=2), 1), (Sizes(context=2), 1), (Sizes(shard=2), 2), (Sizes(shard=4), 4),
    (Sizes(replicate=2, shard=2), 2), (Sizes(shard=2, tensor=2), 2), (Sizes(shard=2, context=2), 2),
    (Sizes(shard=4), 2),
)  # fmt: skip
"""Layouts of mixtures, with the number of ranks that share experts."""
Case = tuple[str, Layout, list[str]]
"""A name, a layout, and keys."""


def pipelines() -> Iterator[Case]:
    """Yield the cases of pipelines."""
    for sizes, stages in product(PIPELINES, (1, 2)):
        layout = Layout(sizes, stages)
        yield layout.name, layout, []


def mixtures() -> Iterator[Case]:
    """Yield the cases of mixtures."""
    for (sizes, expert), count in product(SHARING, (1, 4)):
        layout = Layout(sizes, expert=expert)
        micro_batch = f"train.micro_batch={SEQUENCES // count // sizes.data}"
        yield f"{layout.name}, {count} micro-batches", layout, [*EXPERTS, micro_batch]


def train(*keys: str) -> None:
    """Train as `dtt train` does; called in each rank."""
    run.run(None, keys, (), None)


def curve(folder: Path, name: str, layout: Layout, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return the training records of a run."""
    own = f"name={name}", *keys
    ended = forked_ranks.run(folder, layout.ranks, train, *KEYS, *own, *layout.keys, log=name)
    if ended.code != 0:
        sys.exit(f"{name}: {ended.text}")
    lines = (folder / "jobs" / name / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "train"]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--experts", action="store_true", help="mixtures instead of pipelines")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    table = Table("", 64, {"loss": 9, "norm": 9, "samples": 9})
    cases = list((mixtures if options.experts else pipelines)())
    equal = "ledger", "expert_violation", "expert_entropy"
    worst = 0.0
    with tempfile.TemporaryDirectory(prefix="dtt-curves-") as name:
        folder = Path(name)
        make_tokens(folder)
        for optimizer in ("adamw", "muon"):
            own = [f"optim.type={optimizer}", f"train.steps={options.steps}"]
            given = [*EXPERTS, "train.micro_batch=16"] if options.experts else []
            alone = curve(folder, f"{optimizer}-alone", REFERENCE, [*given, *own])
            for number, (case, layout, keys) in enumerate(cases):
                found = curve(folder, f"{optimizer}-{number}", layout, [*keys, *own])
                pairs = list(zip(found, alone, strict=True))
                differences = [
                    max(abs(ours[key] / theirs[key] - 1) for ours, theirs in pairs)
                    for key in ("loss", "grad_norm")
                ]
                same = all(a.get(key) == b.get(key) for a, b in pairs for key in equal)
                worst = max(worst, *differences, float(not same))
                cells = (f"{difference:.0e}" for difference in differences)
                table.row(f"{optimizer}, {case}", *cells, "equal" if same else "differ")
    sys.exit(worst > TOLERANCE)


if __name__ == "__main__":
    main()
