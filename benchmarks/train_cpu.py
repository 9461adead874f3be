"""Compare training on a CPU by dtt and its peers: tokens per second and peak memory.

    python benchmarks/train_cpu.py --peers-python PYTHON [--rounds 5] [--shape llama-34m] [--fp32]

PYTHON has torch, transformers, accelerate and litgpt.
Every system trains the same shape with the same batch, precision, threads, clipping and optimizer
(fused AdamW) in a separate process. They take turns, one step each, so that other load on the
machine affects all alike; the first two rounds are a warm-up. Figures are medians. A step of dtt is
a complete iteration of its training loop, including data loading, anomaly guard and metrics.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measurement import Table, make_tokens, parser_of
from peers import SHAPES, TRAINERS, Shape, peak_memory

from dtt.config.model import ModelConfig
from dtt.mesh.peak_flops import measured_flops
from dtt.model import count, families

PEERS = str(Path(__file__).with_name("peers.py"))
WARM_UP = 2


class Worker:
    """A training process that waits for its turn before each step."""

    def __init__(self, command: list[str], threads: int) -> None:
        """Start the process; set `failed` if it cannot train here."""
        env = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env=env,
        )  # fmt: skip
        self.seconds: list[float] = []
        self.failed = self._read() is None

    def step(self) -> None:
        """Run one step and record its seconds."""
        self._write("step")
        record = self._read()
        assert record is not None
        self.seconds.append(record["seconds"])

    def end(self) -> int:
        """End the process and return its peak resident memory, in bytes."""
        self._write("end")
        record = self._read()
        assert record is not None
        return int(record["peak"])

    def error(self) -> str:
        """Return the last line of its stderr."""
        _, errors = self._process.communicate()
        return (errors.strip().splitlines() or ["no error message"])[-1]

    def _write(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any] | None:
        """Return the next JSON object on standard output, or None if the process has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                record: dict[str, Any] = json.loads(line)
                return record
        return None


def train_in_turns(arguments: list[str]) -> None:
    """Run `dtt train ARGUMENTS` as a worker that waits for its turn before each step."""
    from dtt.main import main
    from dtt.train.trainer import Trainer

    step = Trainer.step
    start: float | None = None

    def wait_and_step(self: Trainer, *arguments: Any) -> None:
        nonlocal start
        record = {"seconds": time.perf_counter() - start} if start else {"ready": True}
        print(json.dumps(record), flush=True)
        if sys.stdin.readline() != "step\n":  # the end, or the script that asks is gone
            print(json.dumps({"peak": peak_memory()}), flush=True)
            os._exit(0)
        start = time.perf_counter()
        step(self, *arguments)

    if os.environ.get("RANK", "0") == "0":  # other ranks wait for this one anyway
        Trainer.step = wait_and_step  # type: ignore[assignment,method-assign]
    sys.argv = [
        "dtt", "train", "optim.type=adamw", "optim.lr=3e-4", "train.steps=100000",
        "train.sample_tokens=0", "train.log_every=1", "train.eval_every=0",
        "train.eval_tokens=512", *arguments,
    ]  # fmt: skip
    main()


def train(shape: Shape, precision: str) -> None:
    """Run the worker of a shape."""
    with tempfile.TemporaryDirectory(prefix="dtt-train-") as name:
        os.chdir(name)
        tokens = make_tokens(Path(name))
        train_in_turns([
            "name=bench", f"data.tokens={tokens}", f"train.precision={precision}",
            f"train.seq_len={shape['seq_len']}", f"train.micro_batch={shape['batch']}",
            f"train.global_batch_tokens={shape['batch'] * shape['seq_len']}", *keys(shape),
        ])  # fmt: skip


def keys(shape: Shape) -> list[str]:
    """Return the model settings of a shape."""
    sizes = {name: size for name, size in shape.items() if name not in ("seq_len", "batch")}
    return ["model.tie_embeddings=true", *(f"model.{name}={size}" for name, size in sizes.items())]


def flops_per_token(shape: Shape) -> int:
    """Return the FLOPs per token as counted by `dtt.model.count`."""
    from dtt.config.load import resolve

    model = resolve(None, keys(shape)).config.model
    assert isinstance(model, ModelConfig)
    arch = families.get(model.family).architecture(model, shape["vocab_size"], shape["seq_len"])
    return count.flops_per_token(arch, shape["seq_len"])


def compare(name: str, precision: str, peers: str | None, rounds: int, threads: int) -> None:
    """Print the table of one shape."""
    dtt = [sys.executable, __file__, "--worker", name, precision, "--threads", str(threads)]
    workers = {"dtt train": Worker(dtt, threads)}
    for peer in TRAINERS if peers else ():
        command = [peers or "", PEERS, "train", peer, name, precision, str(threads)]
        workers[peer] = Worker(command, threads)
    errors = {peer: worker.error() for peer, worker in workers.items() if worker.failed}
    running = {peer: worker for peer, worker in workers.items() if not worker.failed}
    for _ in range(WARM_UP + rounds):
        for worker in running.values():
            worker.step()
    shape = SHAPES[name]
    tokens = shape["batch"] * shape["seq_len"]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    peak = measured_flops(torch.device("cpu"), dtype)
    median = {p: statistics.median(w.seconds[WARM_UP:]) for p, w in running.items()}
    seconds_per_token_at_peak = flops_per_token(shape) / peak
    print(f"\n{name}, {precision}, batch {shape['batch']} x {shape['seq_len']}, {threads} threads; "
          f"matmul peak {peak / 1e9:.0f} GFLOP/s")  # fmt: skip
    columns = {"s/step": 8, "tokens/s": 10, "of peak": 9, "peak GB": 9, "dtt is": 9}
    table = Table("", 22, columns)
    for peer, worker in running.items():
        rate = tokens / median[peer]
        table.row(
            peer, f"{median[peer]:.3f}", f"{rate:.0f}", f"{rate * seconds_per_token_at_peak:.0%}",
            f"{worker.end() / 1e9:.2f}", f"{median[peer] / median['dtt train']:.2f}x",
        )  # fmt: skip
    for peer, error in errors.items():
        table.row(peer, note=f"does not run: {error[:90]}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--peers-python")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--fp32", action="store_true", help="also train in fp32")
    parser.add_argument("--worker", nargs=2, metavar=("SHAPE", "PRECISION"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.worker:
        train(SHAPES[options.worker[0]], options.worker[1])
        return
    for name in [options.shape] if options.shape else SHAPES:
        for precision in ("bf16", "fp32") if options.fp32 else ("bf16",):
            compare(name, precision, options.peers_python, options.rounds, options.threads)


if __name__ == "__main__":
    main()
