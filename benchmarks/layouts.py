"""Check that the loss curve is the same on every parallel layout.

    python benchmarks/layouts.py            all: families, layouts, optimizers, accumulation
    python benchmarks/layouts.py --quick    one family on each layout, the rest in turn
    python benchmarks/layouts.py tensor     only layouts with this in their name

Runs real `dtt train` processes on a CPU in fp32 with gloo, for 20 steps. Every curve is compared
with that of a single process; the figure is the largest difference of a loss in nats (losses are
about 5.7). Cases with four micro-batches per step read packed documents with document masking, so
their micro-batches have different numbers of targets; the reference takes the batch in one pass.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

from jobs import make_tokens
from runs import Run

from dtt.artifacts.jobdir import JobDir
from dtt.track import jsonl

STEPS = 20
TOLERANCE = 1e-4
"""Nats. A different summation order changes a loss by 1e-6, and each training step amplifies it."""

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
    4: ["data.packing=best-fit", "data.mask_documents=true"],
}
SEQUENCES = 16
"""Sequences of a global batch."""


class Case(NamedTuple):
    """One run to compare."""

    family: str
    layout: str
    optimizer: str
    accumulation: int


def cases(quick: bool, only: str) -> Iterator[Case]:
    """Yield all combinations; with `quick`, one per layout, cycling through the other options."""
    layouts = [layout for layout in LAYOUTS if only.lower() in layout.lower()]
    if not quick:
        yield from map(Case._make, product(FAMILIES, layouts, OPTIMIZERS, ACCUMULATION))
        return
    families, rest = list(FAMILIES), list(product(OPTIMIZERS, ACCUMULATION))
    for i, layout in enumerate(layouts):  # the last two take other options with their families
        yield Case(families[i % 4], layout, *rest[(i + 2 * (i // 4)) % 4])


def losses(folder: Path, tokens: Path, case: Case, layout: tuple[int, list[str]]) -> list[float]:
    """Train through the command line and return the training and evaluation losses."""
    ranks, keys = layout
    name = re.sub(r"[ /]+", "-", " ".join(map(str, case)))
    alone = not keys and ranks == 1
    replicas = ranks // 2 if "context" in case.layout or "tensor" in case.layout else ranks
    micro_batch = SEQUENCES if alone else SEQUENCES // (replicas * case.accumulation)
    arguments = [
        "train", f"name={name}", f"data.tokens={tokens}", f"model.family={case.family}",
        "model.dim=64", "model.n_layers=2", "model.n_heads=4", f"train.steps={STEPS}",
        "train.seq_len=64", f"train.global_batch_tokens={SEQUENCES * 64}",
        f"train.micro_batch={micro_batch}", "train.precision=fp32", "train.eval_tokens=512",
        "train.sample_tokens=0", "schedule.warmup=2", *FAMILIES[case.family], *keys,
        *OPTIMIZERS[case.optimizer], *ACCUMULATION[case.accumulation],
    ]  # fmt: skip
    run = Run(folder, ranks, arguments).start()
    run.wait(180)
    if set(run.codes.values()) != {0}:
        sys.exit(f"{case}: {run.codes}\n{(folder / 'log').read_text()[-5000:]}")
    (folder / "log").unlink()
    records = jsonl.read(JobDir(folder / "jobs" / name).metrics)
    return [record["loss"] for record in records if record["kind"] in ("train", "eval")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("only", nargs="?", default="")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    largest: dict[Case, float] = {}
    references: dict[Case, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="dtt-layouts-") as name:
        folder = Path(name)
        tokens = make_tokens(folder)
        for case in cases(options.quick, options.only):
            alone = case._replace(layout="alone")
            if alone not in references:
                references[alone] = losses(folder, tokens, alone, (1, []))
            reference = references[alone]
            actual = losses(folder, tokens, case, LAYOUTS[case.layout])
            assert len(actual) == len(reference) >= STEPS
            largest[case] = max(abs(a - b) for a, b in zip(actual, reference, strict=True))
            print(f"{' '.join(map(str, case)):50} {largest[case]:.1e}", file=sys.stderr)
    print(table(largest))
    if options.json:
        options.json.write_text(json.dumps({" ".join(map(str, c)): d for c, d in largest.items()}))
    bad = [case for case, difference in largest.items() if difference > TOLERANCE]
    if bad:
        sys.exit(f"differ by more than {TOLERANCE}: {bad}")


def table(largest: dict[Case, float]) -> str:
    """Return the table: a row per layout and family, a column per optimizer and accumulation."""
    columns = list(product(OPTIMIZERS, ACCUMULATION))
    lines = ["largest difference of a loss to one process, 20 steps and two evaluations, nats"]
    lines.append(f"{'':32}" + "".join(f"{f'{o} x{a}':>12}" for o, a in columns))
    for layout, family in dict.fromkeys((case.layout, case.family) for case in largest):
        cells = [largest.get(Case(family, layout, *column)) for column in columns]
        row = "".join(f"{'-' if cell is None else f'{cell:.1e}':>12}" for cell in cells)
        lines.append(f"{layout:20}{family:12}{row}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
