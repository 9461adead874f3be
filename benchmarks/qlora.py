"""Learning of LoRA on weights in 4 bits beside LoRA on unquantised ones, on a CPU.

    python benchmarks/qlora.py ROWS.jsonl [--seeds 5] [--steps 50] [--dim 128]

Each seed trains both on the same batches of conversations. Prints the mean loss of the last ten
steps of each, and their difference.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from adapter import SEQ_LEN, dtt, prepare, settings

from dtt.track import jsonl


def loss(folder: Path, base: str, seed: int, steps: int) -> float:
    """Train an adapter; return the mean loss of the last ten steps."""
    name = f"{base}-{seed}"
    dtt(
        folder, "train", *settings(steps), f"name={name}", f"adapter.base={base}", f"seed={seed}",
        f"train.global_batch_tokens={4 * SEQ_LEN}", "optim.lr=1e-3",
    )  # fmt: skip
    records = jsonl.read(folder / "jobs" / name / "metrics.jsonl")
    losses: list[float] = [r["loss"] for r in records if r["kind"] == "train"]
    return statistics.mean(losses[-10:])


def main() -> None:
    """Prepare, train, and print a line for each seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--dim", type=int, default=128)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name), given.rows, given.dim)
        for seed in range(given.seeds):
            lora, nf4 = (
                loss(Path(name), base, seed, given.steps) for base in ("unquantized", "nf4")
            )
            print(f"seed {seed}: LoRA {lora:.4f}, QLoRA {nf4:.4f} ({nf4 - lora:+.4f})", flush=True)


if __name__ == "__main__":
    main()
