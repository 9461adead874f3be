"""Measure the overhead of Muon over AdamW per step, by model size and layout.

    python benchmarks/muon_overhead.py [--sizes 34M,124M] [--layouts alone,DDP] [--rounds 5]
        [--tokens 65536] [--threads 1]

Both optimizers step the same weights with the same gradients, in turns, in processes of one layout
at a time; figures are medians of the slowest process. `waits` is the part of Muon's step that waits
for communication. The time of a step with `--tokens` per process is estimated as the time of one
measured micro-batch (forward and backward) times their number, plus one optimizer step; here DDP
and FSDP2 average gradients in each micro-batch, in training only in the last. Layouts with more
processes than GPUs are left out. On a CPU give each process its own core: four processes on two
cores wait for each other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path

import torch
from measurement import Table, free_port, in_turns, parser_of, rank_environment
from torch.multiprocessing.spawn import spawn

from dtt.base.ranks import Ranks
from dtt.config.load import resolve
from dtt.config.model import ModelConfig
from dtt.config.optim import Optimizer
from dtt.config.parallel import Sizes
from dtt.config.schedule import RunFacts
from dtt.data.samples.loader import MicroBatch
from dtt.mesh.dist import World, native_bf16, start, stop
from dtt.mesh.mesh import DATA, make_mesh
from dtt.model import families
from dtt.model.decoder import Decoder, params_of
from dtt.model.init import initialize
from dtt.optim import built
from dtt.optim.adamw import AdamWConfig
from dtt.optim.muon.optimizer import Muon
from dtt.optim.muon.variant import MuonConfig
from dtt.parallel.apply import apply
from dtt.train.objectives.loss_function import loss_function
from dtt.train.step import Passes

LLAMA = (
    "model.family=llama", "model.dim=512", "model.n_layers=8", "model.n_heads=8",
    "model.ffn_dim=1408", "model.vocab_size=16384", "model.tie_embeddings=true",
)  # fmt: skip
SIZES = {
    "tiny": resolve("models/llama-tiny"),
    "34M": resolve(None, LLAMA),
    "124M": resolve("models/gpt2-124m"),
}
LAYOUTS = {
    "alone": Sizes(),
    "DDP 2": Sizes(replicate=2),
    "FSDP2 2": Sizes(shard=2),
    "HSDP 2x2": Sizes(replicate=2, shard=2),
    "tensor 2": Sizes(tensor=2),
}
SEQ_LEN = 512
MICRO_BATCH = 2


def measure(world: World, sizes: Sizes, size: str, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round: of a pass, of both optimizers, and of waiting in Muon."""
    config = SIZES[size].config.model
    assert isinstance(config, ModelConfig)
    vocabulary = config.vocab_size or 50304
    arch = families.get(config.family).architecture(config, vocabulary, SEQ_LEN)
    layout = make_mesh(sizes, world)
    with torch.device("meta") if layout.sharded else world.device:
        model = Decoder(arch)
    module = apply(model, world, layout, compile_blocks=False, precision="bf16")
    if layout.sharded:
        model.to_empty(device=world.device)
    initialize(model, 0)
    parameters = dict(model.named_parameters())
    dtype = torch.bfloat16 if native_bf16(world.device) else torch.float32
    kinds: dict[str, Optimizer] = {
        "adamw": AdamWConfig(lr=1e-4),
        "muon": MuonConfig(lr=1e-4),
    }
    optimizers = {
        name: built.build(kind, params_of(model), RunFacts(1, dtype=dtype))
        for name, kind in kinds.items()
    }
    muon = optimizers["muon"]["muon"]
    assert isinstance(muon, Muon)
    torch.manual_seed(layout.index(*DATA))
    ids = torch.randint(vocabulary, (MICRO_BATCH, SEQ_LEN + 1), device=world.device)
    micro_batch = MicroBatch(ids[:, :-1], ids[:, 1:].contiguous(), None)

    def passes() -> None:
        for p in parameters.values():
            p.grad = None
        targets = micro_batch.targets.numel()
        Passes(module, "bf16").run([micro_batch], loss_function(), targets)

    def step(name: str) -> None:
        for optimizer in optimizers[name].values():
            optimizer.step()

    work: dict[str, Callable[[], None]] = {
        "pass": passes,
        "adamw": partial(step, "adamw"),
        "muon": partial(step, "muon"),
    }

    def timed(function: Callable[[], None]) -> tuple[float, float]:
        """Return the seconds of a call, and of waiting in Muon meanwhile."""
        world.barrier()
        waited, start = muon.waited_seconds, time.perf_counter()
        function()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start, muon.waited_seconds - waited

    results = in_turns({name: partial(timed, function) for name, function in work.items()}, rounds)
    seconds = {name: [spent for spent, _ in times] for name, times in results.items()}
    return seconds | {"waited": [waited for _, waited in results["muon"]]}


def worker(rank: int, port: int, layout: str, size: str, given: argparse.Namespace) -> None:
    """Run one process of a layout and write its figures."""
    processes = prod(LAYOUTS[layout])
    torch.set_num_threads(given.threads)
    os.environ.update(rank_environment(rank, processes, port))
    world = start(Ranks(rank, processes, rank, processes, "torchrun"), "auto")
    seconds = measure(world, LAYOUTS[layout], size, given.rounds)
    Path(given.out, str(rank)).write_text(json.dumps(seconds))
    world.barrier()
    stop()


def cells(layout: str, size: str, given: argparse.Namespace) -> list[str]:
    """Measure a layout and return the cells of its row."""
    with tempfile.TemporaryDirectory(prefix="dtt-muon-") as given.out:
        arguments = free_port(), layout, size, given
        spawn(worker, arguments, prod(LAYOUTS[layout]))  # type: ignore[no-untyped-call]
        by_rank = [json.loads(path.read_text()) for path in Path(given.out).iterdir()]
    slowest = {
        name: max(statistics.median(times[name]) for times in by_rank) for name in by_rank[0]
    }
    passes = given.tokens / (MICRO_BATCH * SEQ_LEN) * slowest["pass"]
    muon_step, adamw_step = passes + slowest["muon"], passes + slowest["adamw"]
    return [
        f"{1e3 * slowest['pass']:.0f}",
        *(f"{1e3 * slowest[name]:.1f}" for name in ("adamw", "muon", "waited")),
        f"{slowest['waited'] / slowest['muon']:.0%}",
        f"{muon_step / adamw_step - 1:.2%}",
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", default="34M,124M")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=65536, help="of a step, on each process")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    gpus = torch.cuda.device_count()
    print(f"ms of {MICRO_BATCH} x {SEQ_LEN} tokens; a step has {given.tokens:,} on each process")
    columns = {"pass": 10, "AdamW": 10, "Muon": 10, "waits": 10, "share": 9, "overhead": 11}
    table = Table("", 20, columns)
    for size in given.sizes.split(","):
        for layout in given.layouts.split(","):
            needed = prod(LAYOUTS[layout])
            if gpus and needed > gpus:
                print(f"{layout} needs {needed} GPUs", file=sys.stderr)
                continue
            table.row(f"{size:8}{layout}", *cells(layout, size, given))


if __name__ == "__main__":
    main()
