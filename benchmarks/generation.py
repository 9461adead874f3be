"""Compare generation on a CPU with that of another source tree of dtt, in tokens per CPU second.

    python benchmarks/generation.py [--against OTHER/src] [--new 48] [--rounds 5] [--threads 1]

Random weights of 8 layers of width 256, fp32; one prompt, and 16 of equal or different lengths,
greedily and sampled. Each round is a process of each tree, in turns; medians of the ratios of pairs
count. The exit code is 1 if a token differs. Without `--against`, the figures of this tree alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measurement import Table, in_turns, parser_of

FAMILIES = ("llama", "gemma3")
LENGTHS = {"1": [64], "16": [64] * 16, "16 uneven": [10 + 5 * i for i in range(16)]}
VOCABULARY, CONTEXT = 4096, 512

Figures = dict[str, tuple[float, str]]
"""Tokens per second of CPU time, and a hash of the tokens, by case."""


def measured(new: int) -> Figures:
    """Return the figures of the tree that is imported, of the better of two runs."""
    from dtt.config.model import ModelConfig
    from dtt.model import families
    from dtt.model.decoder import Decoder
    from dtt.model.generate import generate_batch
    from dtt.model.init import initialize

    found: Figures = {}
    for family in FAMILIES:
        shape = {"family": family, "dim": 256, "n_layers": 8, "n_heads": 8}
        config = ModelConfig.model_validate(shape)
        model = Decoder(families.get(family).architecture(config, VOCABULARY, CONTEXT)).eval()
        initialize(model, seed=0)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(2)  # the likeliest token then depends on more than the last one
        random = torch.Generator().manual_seed(0)
        for (name, lengths), temperature in ((x, t) for x in LENGTHS.items() for t in (0.0, 1.0)):
            prompts = [torch.randint(VOCABULARY, (n,), generator=random).tolist() for n in lengths]
            spent, tokens = [], []
            for _ in range(2):
                own = [torch.Generator().manual_seed(i) for i in range(len(prompts))]
                how: dict[str, Any] = {"max_new_tokens": new, "temperature": temperature}
                start = time.process_time()
                tokens = list(generate_batch(model, prompts, generators=own, **how))
                spent.append(time.process_time() - start)
            digest = hashlib.sha256(str(tokens).encode()).hexdigest()
            found[f"{family}, {name}, T={temperature:g}"] = len(tokens) / min(spent), digest
    return found


def in_process(source: Path, new: int, threads: int) -> Figures:
    """Return the figures of a tree, from a process of its own."""
    command = [sys.executable, __file__, "--measure", "--new", str(new), "--threads", str(threads)]
    environment = os.environ | {"PYTHONPATH": str(source)}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    figures: Figures = json.loads(done.stdout)
    return figures


def main() -> int:
    """Print a table; return the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--measure", action="store_true", help="print JSON, of this process")
    args = parser.parse_args()
    if args.measure:
        torch.set_num_threads(args.threads)
        print(json.dumps(measured(args.new)))
        return 0
    trees = {"this": Path(__file__).parents[1] / "src"}
    trees |= {} if args.against is None else {"other": args.against}
    runs = {name: partial(in_process, tree, args.new, args.threads) for name, tree in trees.items()}
    results = in_turns(runs, args.rounds, warm_up=0)
    table = Table("prompts", 28, {"tokens/s": 10, "other": 10, "ratio": 8, "tokens": 12})
    others = results.get("other", results["this"])
    differ = False
    for case in results["this"][0]:
        pairs = [(a[case], b[case]) for a, b in zip(results["this"], others, strict=True)]
        different = len({digest for pair in pairs for _, digest in pair}) > 1
        differ |= different
        medians = [statistics.median(column) for column in zip(*(
            (a[0], b[0], a[0] / b[0]) for a, b in pairs
        ), strict=True)]  # fmt: skip
        ours, theirs, ratio = medians
        text = "differ" if different else "equal"
        table.row(case, f"{ours:.0f}", f"{theirs:.0f}", f"{ratio:.3f}", text)
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
