"""What Muon adds to a step over AdamW, by size of the model and layout, and how much of it is
waiting for messages.

    python benchmarks/muon_overhead.py [--sizes 34M,124M] [--layouts alone,DDP] [--rounds 5]
        [--tokens 65536] [--threads 1]

Both optimizers step the same weights with the same gradients, in turns, in processes of one layout
at a time; medians of the slowest process. A step of `--tokens` on each process is so many forward
and backward passes of one measured micro-batch, and one step of an optimizer; DDP and FSDP2 average
gradients in each of them, as in training only in the last. Layouts of more processes than there are
GPUs are left out. On a CPU give each process a core of its own: four on two cores wait for each
other.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from dtt.config.load import resolve
from dtt.config.optim import AdamWConfig, MuonConfig
from dtt.config.parallel import Sizes
from dtt.model import families
from dtt.model.decoder import Decoder, roles
from dtt.model.init import initialize
from dtt.optim import groups
from dtt.optim.muon import Muon
from dtt.parallel.apply import apply, autocast
from dtt.parallel.mesh import make_layout
from dtt.runtime.dist import World, native_bf16, start, stop
from dtt.runtime.ranks import Ranks

LLAMA = {"family": "llama", "dim": 512, "n_layers": 8, "n_heads": 8, "ffn_dim": 1408,
         "vocab_size": 16384, "tie_embeddings": True}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "34M": {"model": LLAMA},
    "124M": {"extends": ["models/gpt2-124m.yaml"]},
    "355M": {"extends": ["models/gpt2-355m.yaml"]},
    "1B": {"extends": ["models/llama3.2-1b.yaml"]},
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
    """Seconds of a pass, of a step of either optimizer, and of waiting in Muon's; by round."""
    model_config = resolve(SIZES[size]).config.model
    vocabulary = model_config.vocab_size or 50304
    family = families.get(model_config.family)
    arch = family.architecture(model_config, vocabulary, SEQ_LEN)
    layout = make_layout(sizes, world)
    with torch.device("meta") if layout.sharded else world.device:
        model = Decoder(arch)
    module = apply(model, world, layout, compile_blocks=False, precision="bf16")
    if layout.sharded:
        model.to_empty(device=world.device)
    initialize(model, 0)
    parameters = dict(model.named_parameters())
    dtype = torch.bfloat16 if native_bf16(world.device) else torch.float32
    kinds = {"adamw": AdamWConfig(lr=1e-4), "muon": MuonConfig(lr=1e-4)}
    optimizers = {
        name: groups.build(config, parameters, roles(model), dtype)
        for name, config in kinds.items()
    }
    muon = optimizers["muon"]["muon"]
    assert isinstance(muon, Muon)
    torch.manual_seed(layout.data_rank)
    tokens = torch.randint(vocabulary, (MICRO_BATCH, SEQ_LEN + 1), device=world.device)

    def forward_backward() -> None:
        for p in parameters.values():
            p.grad = None
        with autocast(world.device, "bf16"):
            loss = module(tokens[:, :-1], tokens[:, 1:].contiguous()) / tokens.numel()
        loss.backward()

    def stepping(name: str) -> Callable[[], None]:
        return lambda: [o.step() for o in optimizers[name].values()] and None

    work = {"pass": forward_backward, "adamw": stepping("adamw"), "muon": stepping("muon")}
    seconds: dict[str, list[float]] = {name: [] for name in (*work, "waited")}
    for round_ in range(rounds + 1):
        for name, do in work.items():
            world.barrier()
            waited = muon.waited_seconds
            begun = time.perf_counter()
            do()
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            if round_ > 0:  # the first warms up
                seconds[name].append(time.perf_counter() - begun)
                if name == "muon":
                    seconds["waited"].append(muon.waited_seconds - waited)
    return seconds


def worker(
    rank: int,
    processes: int,
    port: int,
    layout: str,
    size: str,
    rounds: int,
    threads: int,
    out: str,
) -> None:
    """One process of a layout; writes what it measured."""
    torch.set_num_threads(threads)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(processes),
        LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(processes),
    )  # fmt: skip
    world = start(Ranks(rank, processes, rank, processes, "torchrun"), "auto")
    found = measure(world, LAYOUTS[layout], size, rounds)
    Path(out, str(rank)).write_text(json.dumps(found))
    world.barrier()
    stop()


def row(layout: str, size: str, given: argparse.Namespace) -> str:
    """Measure a layout."""
    processes = 1
    for count in LAYOUTS[layout]:
        processes *= count
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="dtt-muon-") as out:
        arguments = (processes, port, layout, size, given.rounds, given.threads, out)
        torch.multiprocessing.spawn(worker, arguments, processes)
        found = [json.loads(path.read_text()) for path in Path(out).iterdir()]
    slowest = {
        name: max(statistics.median(of_rank[name]) for of_rank in found) for name in found[0]
    }
    passes = given.tokens / (MICRO_BATCH * SEQ_LEN) * slowest["pass"]
    step, other = passes + slowest["muon"], passes + slowest["adamw"]
    return (
        f"{size:8}{layout:12}{1e3 * slowest['pass']:10.0f}{1e3 * slowest['adamw']:10.1f}"
        f"{1e3 * slowest['muon']:10.1f}{1e3 * slowest['waited']:10.1f}"
        f"{slowest['waited'] / slowest['muon']:9.0%}{step / other - 1:11.2%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", default="34M,124M")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=65536, help="of a step, on each process")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    gpus = torch.cuda.device_count()
    print(f"ms of {MICRO_BATCH} x {SEQ_LEN} tokens; a step has {given.tokens:,} on each process")
    print(f"{'':20}{'pass':>10}{'AdamW':>10}{'Muon':>10}{'waits':>10}{'share':>9}{'overhead':>11}")
    for size in given.sizes.split(","):
        for layout in given.layouts.split(","):
            needed = LAYOUTS[layout].data * LAYOUTS[layout].context * LAYOUTS[layout].tensor
            if gpus and needed > gpus:
                print(f"{layout} needs {needed} GPUs", file=sys.stderr)
                continue
            print(row(layout, size, given), flush=True)


if __name__ == "__main__":
    main()
