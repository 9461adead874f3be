"""Compare the curves of pipelines over 20 steps with those of one process.

    python benchmarks/curves.py [--steps 20]

Both schedules, six layouts of up to eight ranks, AdamW and Muon, in fp32, with clipping, masked
documents and selective recomputation. Prints the largest relative difference of the losses and of
the gradient norms of all steps, and whether the hashes of the samples are equal. `dtt verify` does
the same for gradients, in fp64 and over four steps. The exit code is 1 if anything differs by more
than 1e-5.
"""

from __future__ import annotations

import json
import sys
import tempfile
from itertools import product
from pathlib import Path

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
LAYOUTS = (
    Sizes(pipeline=2), Sizes(pipeline=4), Sizes(pipeline=2, shard=2), Sizes(pipeline=2, tensor=2),
    Sizes(pipeline=2, context=2), Sizes(pipeline=2, replicate=2, shard=2),
)  # fmt: skip


def train(*keys: str) -> None:
    """Train as `dtt train` does; called in each rank."""
    run.run(None, keys, (), None)


def curve(folder: Path, layout: Layout, optimizer: str, steps: int) -> list[dict[str, float]]:
    """Return the training records of a run."""
    name = "-".join([optimizer, *map(str, layout.section.values())])
    own = f"name={name}", f"optim.type={optimizer}", f"train.steps={steps}"
    ended = forked_ranks.run(folder, layout.ranks, train, *KEYS, *own, *layout.keys, log=name)
    if ended.code != 0:
        sys.exit(f"{name}: {ended.text}")
    lines = (folder / "jobs" / name / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "train"]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    table = Table("", 44, {"loss": 9, "norm": 9, "samples": 9})
    worst = 0.0
    with tempfile.TemporaryDirectory(prefix="dtt-curves-") as name:
        folder = Path(name)
        make_tokens(folder)
        for optimizer in ("adamw", "muon"):
            alone = curve(folder, REFERENCE, optimizer, options.steps)
            for sizes, stages in product(LAYOUTS, (1, 2)):
                layout = Layout(sizes, stages)
                found = curve(folder, layout, optimizer, options.steps)
                pairs = list(zip(found, alone, strict=True))
                differences = [
                    max(abs(ours[key] / theirs[key] - 1) for ours, theirs in pairs)
                    for key in ("loss", "grad_norm")
                ]
                same = all(ours["ledger"] == theirs["ledger"] for ours, theirs in pairs)
                worst = max(worst, *differences, float(not same))
                cells = (f"{difference:.0e}" for difference in differences)
                table.row(f"{optimizer}, {layout.name}", *cells, "equal" if same else "differ")
    sys.exit(worst > TOLERANCE)


if __name__ == "__main__":
    main()
