"""Learning of AdamW with state of 8 bits beside 32 bits: a half of the quickstart, an untied head.

    python benchmarks/adamw_8bit.py [--seeds 5] [--steps 200]

Prints the loss of the validation after the last step for each seed, and the standard deviations.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from measurement import Table, dtt, parser_of

from dtt.train import run
from dtt.verify import forked_ranks

QUICKSTART = "-c", "quickstart"
KEYS = [
    "optim={type: adamw, lr: 4e-3, betas: [0.9, 0.98], weight_decay: 0.1}",
    "model.tie_embeddings=false", "train.eval_every=0", "train.eval_tokens=100_000",
    "train.sample_tokens=0", "track=[]", "model.n_layers=2", "train.seq_len=128",
    "train.global_batch_tokens=1024",
]  # fmt: skip


def train(*keys: str) -> None:
    """Train as `dtt train -c quickstart` does."""
    run.run("quickstart", keys, (), None)


def final_loss(work: Path, state: str, seed: int, steps: int) -> float:
    """Train with this state; return the loss on the validation documents."""
    name = f"{state}-{seed}"
    own = (
        f"name={name}", f"seed={seed}", f"optim.state={state}", f"train.steps={steps}",
        f"checkpoint.every={steps}",
    )  # fmt: skip
    # Forked: most of a run of this size would be the import of torch.
    ended = forked_ranks.run(work, 1, train, *KEYS, *own, log=name)
    if ended.code != 0:
        sys.exit(ended.text)
    lines = (work / f"jobs/{name}/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return float([line["loss"] for line in records if line["kind"] == "eval"][-1])


def main() -> None:
    """Train with both states and each seed in a temporary folder."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    seeds = range(options.seeds)
    table = Table("", 8, {f"seed {seed}": 9 for seed in seeds} | {"mean": 9, "sd": 8})
    with tempfile.TemporaryDirectory(prefix="dtt-8bit-") as name:
        work = Path(name)
        for command in ("download", "tokenize"):
            dtt(command, *QUICKSTART, folder=work)
        for state in ("32bit", "8bit"):
            losses = [final_loss(work, state, seed, options.steps) for seed in seeds]
            cells = [*losses, statistics.mean(losses), statistics.stdev(losses)]
            table.row(state, *(f"{cell:.4f}" for cell in cells))


if __name__ == "__main__":
    main()
