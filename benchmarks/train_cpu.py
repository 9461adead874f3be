"""Compare training on a CPU by dtt and its peers: tokens per second and peak memory.

    python benchmarks/train_cpu.py --peers-python PYTHON [--rounds 5] [--shape llama-34m] [--fp32]

PYTHON has torch, transformers, accelerate, litgpt, torchtitan and triton, which torchtitan imports.
Every system trains the same shape with the same batch, precision, threads, clipping and optimizer
(fused AdamW) in a separate process. They take turns, one step each, so that other load on the
machine affects all alike; the first two rounds are a warm-up. Figures are medians. A step of dtt is
a complete iteration of its training loop, including data loading, anomaly guard and metrics.
"""

from __future__ import annotations

import argparse
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
from runs import make_tokens
from train_peers import SHAPES, WORKERS, Shape

from dtt.model import count, families

HERE = Path(__file__).parent
WARM_UP = 2


class Worker:
    """A training process that waits for its turn before each step."""

    def __init__(self, command: list[str], threads: int) -> None:
        """Start the process; set `lost` if it cannot train here."""
        env = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env=env,
        )  # fmt: skip
        self.seconds: list[float] = []
        self.lost = self._answer() is None

    def step(self) -> None:
        """Run one step and record its seconds."""
        self._say("step")
        answer = self._answer()
        assert answer is not None
        self.seconds.append(answer["seconds"])

    def end(self) -> int:
        """End the process and return its peak resident memory, in bytes."""
        self._say("end")
        answer = self._answer()
        assert answer is not None
        return int(answer["peak"])

    def why(self) -> str:
        """Return the last line of its stderr."""
        _, errors = self._process.communicate()
        return (errors.strip().splitlines() or ["nothing said"])[-1]

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def _answer(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        return None


def train(shape: Shape, precision: str) -> None:
    """Run `dtt train` as a worker that waits for its turn before each step."""
    import resource

    from dtt.main import main
    from dtt.train.trainer import Trainer

    step = Trainer.step
    began: float | None = None

    def waiting(self: Trainer, *arguments: Any) -> None:
        nonlocal began
        now = time.perf_counter()
        print(
            json.dumps({"ready": True} if began is None else {"seconds": now - began}), flush=True
        )
        if sys.stdin.readline().strip() == "end":
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            print(json.dumps({"peak": peak}), flush=True)
            os._exit(0)
        began = time.perf_counter()
        step(self, *arguments)

    Trainer.step = waiting  # type: ignore[assignment,method-assign]
    with tempfile.TemporaryDirectory(prefix="dtt-train-") as name:
        os.chdir(name)
        tokens = make_tokens(Path(name))
        sys.argv = [
            "dtt", "train", "name=bench", f"data.tokens={tokens}", "optim.type=adamw",
            "optim.lr=3e-4", f"train.precision={precision}", f"train.seq_len={shape['seq_len']}",
            f"train.micro_batch={shape['batch']}", "train.steps=100000", "train.sample_tokens=0",
            f"train.global_batch_tokens={shape['batch'] * shape['seq_len']}", "train.log_every=1",
            "train.eval_every=0", "train.eval_tokens=512", *keys(shape),
        ]  # fmt: skip
        main()


def keys(shape: Shape) -> list[str]:
    """Return the model settings of a shape."""
    names = ("family", "dim", "n_layers", "n_heads", "ffn_dim", "vocab_size")
    return ["model.tie_embeddings=true", *(f"model.{name}={shape[name]}" for name in names)]


def matmul_peak(dtype: torch.dtype, size: int = 2048) -> float:
    """Return the FLOP/s of the fastest of a few products of square matrices."""
    a, b = torch.randn(2, size, size).to(dtype)
    fastest = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        a @ b
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * size**3 / fastest


def flops_per_token(shape: Shape) -> int:
    """Return the FLOPs per token as counted by `dtt.model.count`."""
    from dtt.config.load import resolve

    model = resolve(None, keys(shape)).config.model
    arch = families.get(model.family).architecture(model, shape["vocab_size"], shape["seq_len"])
    return count.flops_per_token(arch, shape["seq_len"])


def compare(name: str, precision: str, peers: str | None, rounds: int, threads: int) -> None:
    """Print the table of one shape."""
    own = [sys.executable, __file__, "--worker", name, precision, "--threads", str(threads)]
    workers = {"dtt train": Worker(own, threads)}
    for peer in WORKERS if peers else ():
        command = [peers or "", str(HERE / "train_peers.py"), peer, name, precision, str(threads)]
        workers[peer] = Worker(command, threads)
    lost = {peer: worker.why() for peer, worker in workers.items() if worker.lost}
    running = {peer: worker for peer, worker in workers.items() if not worker.lost}
    for _ in range(WARM_UP + rounds):
        for worker in running.values():
            worker.step()
    shape = SHAPES[name]
    tokens = shape["batch"] * shape["seq_len"]
    peak = matmul_peak(torch.bfloat16 if precision == "bf16" else torch.float32)
    median = {p: statistics.median(w.seconds[WARM_UP:]) for p, w in running.items()}
    share = flops_per_token(shape) / peak
    print(f"\n{name}, {precision}, batch {shape['batch']} x {shape['seq_len']}, {threads} threads; "
          f"matmul peak {peak / 1e9:.0f} GFLOP/s")  # fmt: skip
    print(f"{'':22}{'s/step':>8}{'tokens/s':>10}{'of peak':>9}{'peak GB':>9}{'dtt is':>9}")
    for peer, worker in running.items():
        rate = tokens / median[peer]
        ratio = median[peer] / median["dtt train"]
        memory = worker.end() / 1e9
        print(
            f"{peer:22}{median[peer]:8.3f}{rate:10.0f}{rate * share:8.0%}{memory:9.2f}{ratio:8.2f}x"
        )
    for peer, why in lost.items():
        print(f"{peer:22} does not run: {why[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--peers-python")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--fp32", action="store_true", help="in fp32, too")
    parser.add_argument("--worker", nargs=2, metavar=("SHAPE", "PRECISION"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)  # importing `runs` sets OMP_NUM_THREADS=1
    if options.worker:
        train(SHAPES[options.worker[0]], options.worker[1])
        return
    for name in [options.shape] if options.shape else SHAPES:
        for precision in ("bf16", "fp32") if options.fp32 else ("bf16",):
            compare(name, precision, options.peers_python, options.rounds, options.threads)


if __name__ == "__main__":
    main()
