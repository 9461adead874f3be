"""Compare the peak memory that `dtt plan` estimates with that of real processes.

    python benchmarks/plan_memory.py [PATTERN …]

Each configuration, or each whose name matches a pattern such as '*2', is trained for three steps in
separate processes on a CPU. Measured is the peak of resident memory, without file-backed pages,
above the level before the model was built; with several processes, the largest.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

from measurement import Table, free_port, rank_environment

from dtt.base.ranks import Ranks
from dtt.config.load import resolve
from dtt.estimate import gpus
from dtt.estimate.case import Case, make_case
from dtt.estimate.memory import memory
from dtt.mesh.dist import start, stop

MIB = 2**20
GPT2 = ("model.family=gpt2", "model.dim=512", "model.n_layers=8", "model.n_heads=8")
LLAMA = ("model.family=llama", "model.dim=512", "model.n_layers=8", "model.n_heads=8")
QWEN3 = ("model.family=qwen3", "model.dim=512", "model.n_layers=6", "model.n_heads=8")
GEMMA3 = ("model.family=gemma3", "model.dim=512", "model.n_layers=6", "model.n_heads=8")
ADAMW, MUON = "optim.type=adamw", "optim.type=muon"
FP32, BF16, PURE = (f"train.precision={name}" for name in ("fp32", "bf16", "bf16-pure"))
SHARD, CONTEXT, TENSOR = (
    ("parallel.replicate=1", f"parallel.{name}=-1") for name in ("shard", "context", "tensor")
)
STEP = ("train.seq_len=64", "model.vocab_size=512", MUON)
"""Settings with so few activations that the peak is in the optimizer step."""
CONFIGS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "gpt2 fp32 adamw": (1, 1, (*GPT2, FP32, ADAMW)),
    "gpt2 bf16 adamw": (1, 1, (*GPT2, BF16, ADAMW)),
    "gpt2 bf16 muon": (1, 1, (*GPT2, BF16, MUON)),
    "llama fp32 adamw": (1, 1, (*LLAMA, FP32, ADAMW)),
    "llama bf16 adamw": (1, 1, (*LLAMA, BF16, ADAMW)),
    "llama bf16 adamw accumulated": (1, 4, (*LLAMA, BF16, ADAMW)),
    "llama bf16 adamw full remat": (1, 1, (*LLAMA, BF16, ADAMW, "train.remat=full")),
    "llama bf16 selective remat": (1, 1, (*LLAMA, BF16, ADAMW, "train.remat=selective")),
    "llama pure bf16 adamw": (1, 1, (*LLAMA, PURE, ADAMW)),
    "llama bf16 muon, average": (1, 1, (*LLAMA, BF16, MUON, "train.ema_decay=0.99")),
    "qwen3 bf16 adamw": (1, 1, (*QWEN3, BF16, ADAMW)),
    "gemma3 fp32 muon, tied": (1, 1, (*GEMMA3, FP32, MUON)),
    "llama bf16 adamw, DDP 2": (2, 1, (*LLAMA, BF16, ADAMW)),
    "llama bf16 adamw, FSDP2 2": (2, 1, (*LLAMA, BF16, ADAMW, *SHARD)),
    "llama fp32 muon, FSDP2 2": (2, 1, (*LLAMA, FP32, MUON, *SHARD)),
    "llama bf16 adamw, context 2": (2, 1, (*LLAMA, BF16, ADAMW, *CONTEXT)),
    "llama bf16 adamw, tensor 2": (2, 1, (*LLAMA, BF16, ADAMW, *TENSOR)),
    "llama fp32 muon's step": (1, 1, (*LLAMA, FP32, *STEP)),
    "llama bf16 muon's step": (1, 1, (*LLAMA, BF16, *STEP)),
    "llama bf16 muon's step, DDP 2": (2, 1, (*LLAMA, BF16, *STEP)),
    "llama bf16 muon's step, FSDP2 2": (2, 1, (*LLAMA, BF16, *STEP, *SHARD)),
    "llama fp32 muon's step, FSDP2 2": (2, 1, (*LLAMA, FP32, *STEP, *SHARD)),
    "llama bf16 muon's step, tensor 2": (2, 1, (*LLAMA, BF16, *STEP, *TENSOR)),
}
SEQ_LEN, ROWS, VOCABULARY = 512, 2, 16_384


def case_of(name: str) -> Case:
    """Return the input of the formulas."""
    ranks, accumulation, arguments = CONFIGS[name]
    tokens = SEQ_LEN * ROWS * accumulation * ranks
    sizes = (
        f"train.seq_len={SEQ_LEN}",
        f"train.micro_batch={ROWS}",
        f"train.global_batch_tokens={tokens}",
        f"model.vocab_size={VOCABULARY}",
    )
    cfg = resolve(None, [*sizes, *arguments]).config
    vocabulary = cfg.model.vocab_size
    assert vocabulary is not None
    return make_case(cfg, gpus.find("cpu", ranks), 1, ranks, vocabulary, 1000)


def one_rank(name: str, rank: int) -> None:
    """Run one rank and print its peak memory in bytes."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests/gpu_free"))
    from random_steps import probe  # type: ignore[import-not-found]

    ranks = CONFIGS[name][0]
    world = start(Ranks(rank, ranks, rank, ranks, "torchrun"), "cpu")
    print(json.dumps(probe(case_of(name), world).memory))
    world.barrier()
    stop()


def measured_peak(name: str) -> int:
    """Return the largest peak memory of the processes, in bytes."""
    port, ranks = free_port(), CONFIGS[name][0]
    processes = []
    for rank in range(ranks):
        environment = rank_environment(rank, ranks, port) | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--rank", name, str(rank)]
        processes.append(
            subprocess.Popen(
                command, env=os.environ | environment, stdout=subprocess.PIPE, text=True
            )
        )
    return max(int(process.communicate()[0].splitlines()[-1]) for process in processes)


def main() -> None:
    """Print a line per configuration."""
    if sys.argv[1:2] == ["--rank"]:
        one_rank(sys.argv[2], int(sys.argv[3]))
        return
    errors = []
    table = Table("MiB", 32, {"planned": 9, "measured": 10, "error": 8, "  peak at": 9})
    patterns = sys.argv[1:] or ["*"]
    for name in CONFIGS:
        if not any(fnmatchcase(name, pattern) for pattern in patterns):
            continue
        peak = memory(case_of(name))
        planned = peak.total - sum(peak.parts[part] for part in ("framework", "batches"))
        actual = measured_peak(name)
        errors.append(planned / actual - 1)
        cells = f"{planned / MIB:.0f}", f"{actual / MIB:.0f}", f"{errors[-1]:+.1%}"
        table.row(name, *cells, note=peak.moment)
    mean = statistics.fmean(map(abs, errors))
    print(f"mean error {mean:.1%}, largest {max(errors, key=abs):+.1%}")


if __name__ == "__main__":
    main()
