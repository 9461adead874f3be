"""Answers with what is wrong with CUDA paths on fake tensors; see `check`."""

from __future__ import annotations

from typing import Any

import fake_gpu  # before torch

import torch  # isort: skip
from fake_run import make, on_fake_gpu, training
from faults import FAULTS, planted
from serving import serve
from watch import Watch, uncompiled

from dtt.base.ranks import Ranks
from dtt.evaluate.tasks.scorer import Option, Scorer
from dtt.mesh.compilation import compiler
from dtt.mesh.dist import World
from dtt.model.decoder import Decoder
from dtt.model.generate import generate_batch

ADAMW, ROPE = "optim.type=adamw", "model.rope_scaling"
YARN = f"{ROPE}={{type: yarn, factor: 4, original_max_seq_len: 64}}"
FACTORS = f"short_factor: {[1.0] * 32}, long_factor: {[2.0] * 32}"
LONG_ROPE = f"{ROPE}={{type: longrope, original_max_seq_len: 64, attention_factor: 1, {FACTORS}}}"
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "gpt2": (1, ("model.family=gpt2", ADAMW, "train.remat=full")),
    "llama": (1, (ADAMW,)),
    "documents": (1, (ADAMW, "data.mask_documents=true", YARN)),
    "muon": (1, ("optim.type=muon", "model.family=phi3", LONG_ROPE)),
    "fsdp2": (8, ("optim.type=muon",)),
    "experts": (1, ("model.family=dots1", "optim.type=muon", "train.router_z_loss=0.1")),
    "experts-fsdp2": (8, ("model.family=qwen3_moe", ADAMW, "train.remat=full")),
    "expert-parallel": (8, ("model.family=mixtral", "optim.type=muon", "parallel.expert=4")),
    "tensor": (8, (ADAMW, "parallel.tensor=2", "train.remat=selective")),
    "tensor-full-remat": (8, (ADAMW, "parallel.tensor=2", "train.remat=full")),
    "context": (8, (ADAMW, "parallel.context=2")),
    "fp8": (8, (ADAMW, "train.precision=fp8", "train.remat=full")),
    "fp8-tensor": (8, (ADAMW, "train.precision=fp8", "parallel.tensor=2", "train.remat=selective")),
    "fp8-adapter": (
        1,
        (ADAMW, "train.precision=fp8", "adapter.type=lora", "init.from=hf:any", "train.remat=full"),
    ),
    "adapter": (8, (ADAMW, "parallel.tensor=2", "adapter.type=lora", "init.from=hf:any")),
}
"""Number of GPUs and keys of each configuration."""


def check_step(name: str) -> list[str]:
    """Return what is wrong with the second step of a case."""
    ranks, keys = CASES[name]
    torch._dynamo.utils.counters.clear()
    watch = Watch()
    try:
        with training(make(*keys, ranks=ranks), backend=uncompiled) as step:
            step()  # compiles, and creates the optimizer state
            with watch:
                step()
    # What a fake tensor cannot do: give its numbers, or have a shape that depends on them.
    except Exception as error:  # noqa: BLE001
        reading = "DataDependent" in type(error).__name__ or "Dynamic" in type(error).__name__
        kind = "host waits" if reading else "mixed devices" if "device" in str(error) else "error"
        watch.found[f"{kind}: {type(error).__name__}: {error}".splitlines()[0]] += 1
    breaks = torch._dynamo.utils.counters["graph_break"]
    found = [*watch.found, *(f"graph break: {why.splitlines()[0]}" for why in breaks)]
    if compiler.failure:
        found.append(f"not compiled: {compiler.failure}")
    return found if watch.operators or found else ["no operator was seen"]


def check_fault(name: str) -> list[str]:
    """Return what is found with a planted fault."""
    with planted(FAULTS[name]):
        return check_step(FAULTS[name].case)


def model(case: str = "llama") -> Decoder:
    """Return a small model on the GPU; call it in a fake mode."""
    with torch.device(fake_gpu.DEVICE):
        return Decoder(make(*CASES[case][1]).arch)


GENERATION: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("llama", {"temperature": 0.0}),
    "sampled": ("llama", {"top_k": 50, "top_p": 0.9}),
    "sampled-longrope": ("muon", {"top_p": 0.9}),
    "sampled-experts": ("experts", {"top_p": 0.9}),
}
"""Case of the model and options of sampling."""


def check_generation(name: str) -> list[str]:
    """Return the host waits of a new token of each of three prompts, after the first tokens."""
    case, how = GENERATION[name]
    with on_fake_gpu(uncompiled), Watch(read=True) as watch:
        tokens = generate_batch(
            model(case), [[1] * 5, [1] * 3, [1] * 4], max_new_tokens=8,
            generators=[None] * 3, **how,
        )  # fmt: skip
        for _ in range(3 * 3):
            next(tokens)
        watch.found.clear()
        for _ in range(3):
            next(tokens)
    return [f"{count} x {what}" for what, count in watch.found.items()]


def check_scoring() -> list[str]:
    """Return the host waits of a batch of options to score."""
    options = [[Option((1, 2, 3), (4, 5)), Option((1, 2, 3), (6, 7))]]
    with on_fake_gpu(uncompiled), Watch(read=True) as watch:
        scorer = Scorer(model(), World(Ranks(), fake_gpu.DEVICE, None), batch_tokens=1024)
        scorer.score(options)
    return [f"{count} x {what}" for what, count in watch.found.items()]


def check(name: str) -> list[str]:
    """Return what is found for a name."""
    if name in CASES:
        return check_step(name)
    if name in FAULTS:
        return check_fault(name)
    return check_scoring() if name == "scoring" else check_generation(name)


if __name__ == "__main__":
    serve(check)
