"""The formulas of a plan against the memory and communication that torch uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from support.ranks import on_ranks
from torch import Tensor

from dtt.base.errors import ConfigError
from dtt.config.adapter import LoraConfig
from dtt.config.load import resolve
from dtt.config.schedule import RunFacts
from dtt.estimate import gpus
from dtt.estimate.case import Case, make_case
from dtt.estimate.communication import collective_costs
from dtt.estimate.duration import run_of, step_of
from dtt.estimate.gpus import GIB, Gpu
from dtt.estimate.memory import FP32, fits, kept_by_block, memory, moments
from dtt.estimate.optimizer_cost import checkpoint_bytes, optimizer_state
from dtt.mesh.dist import World
from dtt.mesh.mesh import make_mesh
from dtt.model import count
from dtt.model.decoder import Decoder, params_of
from dtt.model.lora import attach
from dtt.optim import built
from dtt.optim.ema import Ema
from dtt.parallel.apply import apply, autocast

CPU = Gpu("CPU", 16 * GIB, 1e12, 1e11, 1e10, 1e10, 1e10, kind="cpu")
H100 = gpus.find("H100", 8)
SMALL = ("model.dim=64", "model.n_layers=3", "model.n_heads=4", "model.vocab_size=320")
LLAMA_8B = (
    "model.dim=4096", "model.n_layers=32", "model.n_heads=32", "model.n_kv_heads=8",
    "model.ffn_dim=14336", "model.vocab_size=128256",
)  # fmt: skip


def case(*arguments: str, gpu: Gpu = CPU, nodes: int = 1, gpus_per_node: int = 1) -> Case:
    ours = [
        "train.seq_len=128", "train.micro_batch=2", "train.global_batch_tokens=1024",
        "train.precision=bf16", *arguments,
    ]  # fmt: skip
    cfg = resolve(None, ours).config
    assert cfg.model.vocab_size is not None
    return make_case(cfg, gpu, nodes, gpus_per_node, cfg.model.vocab_size, cfg.train.steps)


def large(*arguments: str, nodes: int = 1, gpus_per_node: int = 8) -> Case:
    batch = ("train.seq_len=8192", "train.micro_batch=4", "train.global_batch_tokens=4194304")
    return case(*LLAMA_8B, *batch, *arguments, gpu=H100, nodes=nodes, gpus_per_node=gpus_per_node)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("optim", ["adamw", "muon", "adamw optim.state=8bit"])
def test_parameters_and_states_are_those_of_real_optimizers(family: str, optim: str) -> None:
    one = case(*SMALL, f"model.family={family}", *f"optim.type={optim}".split())
    model = Decoder(one.arch)
    parameters = dict(model.named_parameters())
    optimizers = built.build(one.cfg.optim, params_of(model), RunFacts(1))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter.data.zero_())
    for optimizer in optimizers.values():
        optimizer.step()
    states = [value for o in optimizers.values() for s in o.state.values() for value in s.values()]
    of_numbers = sum(state.nbytes for state in states if isinstance(state, Tensor) and state.ndim)
    assert optimizer_state(one) == of_numbers
    whole = sum(parameter.nbytes for parameter in parameters.values())
    assert memory(one).parts["parameters"] == whole == FP32 * count.parameters(one.arch)
    assert checkpoint_bytes(one) == whole + of_numbers


def test_parameters_that_an_entry_moves_to_another_optimizer_are_counted_there() -> None:
    all_muon = case(*SMALL, "optim.type=muon")
    entry = "optim.groups=[{match: layers.*.mlp.*.weight, optimizer: adamw}]"
    some = case(*SMALL, "optim.type=muon", entry)
    moved = sum(w.numel for w in all_muon.muons if ".mlp." in w.name)
    assert optimizer_state(some) == optimizer_state(all_muon) + FP32 * moved
    with pytest.raises(ConfigError, match="no parameter has a name that matches"):
        _ = case(*SMALL, "optim.type=muon", "optim.groups=[{match: nothing, lr: 1.0}]").weights


@contextmanager
def kept(model: Decoder) -> Iterator[dict[int, Tensor]]:
    """What autograd keeps inside, by where it is; not parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield storages


ADAPTER = ("adapter.type=lora", "init.from=hf:x", "optim.type=adamw", "adapter.rank=32")


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure", "adapter", "nf4", "dropout"])
def test_a_block_keeps_the_bytes_of_the_formula(family: str, precision: str) -> None:
    """The difference that a third block makes, so that all else is left out."""
    sizes = []
    keys = {
        "adapter": ("train.precision=bf16", *ADAPTER),
        "nf4": ("train.precision=bf16", *ADAPTER, "adapter.base=nf4"),
        "dropout": ("train.precision=fp32", *ADAPTER, "adapter.dropout=0.1"),
    }.get(precision, (f"train.precision={precision}",))
    one = with_layers(3, family, *keys)
    for case_of in (with_layers(2, family, *keys), one):
        model = Decoder(case_of.arch).to(one.precision.weights)
        if isinstance(one.cfg.adapter, LoraConfig):
            attach(model, one.cfg.adapter, one.precision.compute_dtype)
        tokens = torch.randint(one.arch.vocab_size, (one.micro_batch, 512))
        with kept(model) as storages, autocast(torch.device("cpu"), one.precision):
            model(tokens, tokens)
        sizes.append(sum(tensor.untyped_storage().nbytes() for tensor in storages.values()))
    casts = 0
    if one.autocast:
        casts = sum(2 * prod(w.shape) for w in one.block if len(w.shape) > 1 and w.itemsize == 4)
    assert kept_by_block(one) == pytest.approx(sizes[1] - sizes[0] - casts, rel=0.025)


def with_layers(layers: int, family: str, *keys: str) -> Case:
    windows = ("model.window=512", "model.window_pattern=9") if family == "gemma3" else ()
    return case(
        *SMALL, f"model.family={family}", *keys, *windows,
        f"model.n_layers={layers}", "train.seq_len=512", "train.global_batch_tokens=2048",
    )  # fmt: skip


def test_a_run_fits_up_to_the_usable_memory() -> None:
    one = case(*SMALL)
    peak = memory(one).total
    assert fits(replace(one, gpu=replace(CPU, memory=int(peak / 0.9) + 1)))
    assert not fits(replace(one, gpu=replace(CPU, memory=int(peak / 0.9) - 1)))


MEASURED = [
    ("gpt2-124m", "64", "1024", ("optim.type=adamw",), 23.63, 528_600),
    ("gpt2-124m", "64", "1024", ("optim.type=muon",), 23.29, 519_700),
    ("llama3.2-1b", "8", "2048", ("optim.type=adamw",), 46.20, 69_900),
    ("llama3.2-1b", "8", "2048", ("optim.type=muon",), 42.31, 64_900),
    ("llama3-8b", "2", "4096", ("optim.type=adamw", "train.precision=bf16-pure"), 107.5, 12_150),
    (
        "llama3-8b", "2", "4096",
        ("optim.type=adamw", "train.precision=bf16-pure", "train.remat=full"), 70.96, 10_100,
    ),
]  # fmt: skip
"""Peak memory in GB and tokens/s of dtt on one H200, with torch 2.11: model, micro-batch, length,
keys. A step had eight micro-batches."""


def shipped(model: str, rows: str, length: str, keys: Sequence[str], gpu: str, ranks: int) -> Case:
    """Return a shipped model with a micro-batch for each GPU, or with eight on an H200."""
    count = 8 if gpu == "H200" else ranks
    cfg = resolve(f"models/{model}", [
        "train.precision=bf16", f"train.micro_batch={rows}", f"train.seq_len={length}",
        f"train.global_batch_tokens={int(rows) * int(length) * count}", *keys,
    ]).config  # fmt: skip
    assert cfg.model.vocab_size is not None
    return make_case(cfg, gpus.find(gpu, ranks), 1, ranks, cfg.model.vocab_size, 1000)


def tensors(one: Case) -> int:
    """Return the estimate of a step's tensors: without the framework and prefetched batches."""
    peak = memory(one)
    return peak.total - peak.parts["framework"] - peak.parts["batches"]


@pytest.mark.parametrize(("model", "rows", "length", "keys", "gigabytes", "speed"), MEASURED)
def test_memory_and_speed_are_those_of_a_real_gpu(
    model: str, rows: str, length: str, keys: Sequence[str], gigabytes: float, speed: float
) -> None:
    one = shipped(model, rows, length, keys, "H200", 1)
    assert tensors(one) == pytest.approx(gigabytes * 1e9, rel=0.01)
    tokens = one.sequences * int(length)
    assert tokens / step_of(one).seconds == pytest.approx(speed, rel=0.08)
    slower = shipped(model, rows, length, keys, "H100", 1)
    tokens = slower.sequences * int(length)
    assert tokens / step_of(slower).seconds < 0.98 * speed


TRACED = {
    ("gpt2-124m", "32", "1024", 1): {"adamw": (12.50, 7.49, 3.27), "muon": (12.16, 7.15, 2.93)},
    ("llama3.2-1b", "8", "2048", 1): {
        "adamw": (40.79, 25.69, 21.87), "muon": (36.90, 21.79, 17.98),
    },
    ("llama3.2-1b", "8", "2048", 8): {"adamw": (25.99, 12.83, 6.54), "muon": (25.50, 12.35, 6.06)},
    ("llama3-8b", "1", "4096", 1): {
        "adamw": (134.62, 128.55, 128.55), "muon": (106.70, 101.37, 101.37),
    },
    ("llama3-8b", "1", "4096", 8): {
        "adamw": (38.47, 26.39, 20.20), "muon": (34.98, 22.90, 16.71),
    },
}  # fmt: skip
"""Peak memory in GB of the compiled step on H100s, traced by tests/gpu_free/peak_memory.py, with
train.remat none, selective and full."""


@pytest.mark.parametrize(("model", "rows", "length", "ranks"), TRACED)
def test_memory_is_that_of_the_traced_step(model: str, rows: str, length: str, ranks: int) -> None:
    for optim, peaks in TRACED[model, rows, length, ranks].items():
        for remat, peak in zip(("none", "selective", "full"), peaks, strict=True):
            keys = [f"optim.type={optim}", f"train.remat={remat}"]
            if ranks > 1:
                keys += ["parallel.replicate=1", f"parallel.shard={ranks}"]
            one = shipped(model, rows, length, keys, "H100", ranks)
            assert tensors(one) == pytest.approx(peak * 1e9, rel=0.03), keys


@pytest.mark.parametrize(
    ("ranks", "remat", "base", "peak"),
    [
        (1, "none", "unquantized", 36.67),
        (8, "none", "unquantized", 25.28),
        (8, "full", "unquantized", 7.01),
        (1, "full", "nf4", 9.22),
    ],
)
def test_memory_with_an_adapter_is_that_of_the_traced_step(
    ranks: int, remat: str, base: str, peak: float
) -> None:
    keys = [
        f"adapter.base={base}",
        "adapter.type=lora",
        "init.from=hf:any",
        "optim.type=adamw",
        f"train.remat={remat}",
    ]
    if ranks > 1:
        keys += ["parallel.replicate=1", f"parallel.shard={ranks}"]
    one = shipped("llama3-8b", "1", "4096", keys, "H100", ranks)
    assert tensors(one) == pytest.approx(peak * 1e9, rel=0.03)


@pytest.mark.parametrize(
    ("settings", "published"),
    [
        (["train.precision=bf16"], 6667),
        (["train.precision=bf16", "train.compile=false"], 5762),
        (["train.precision=fp8"], 8532),
    ],
)
def test_compilation_and_fp8_gain_what_torchtitan_publishes_for_llama_3_8b(
    settings: list[str], published: int
) -> None:
    keys = (
        "parallel.replicate=1", "parallel.shard=-1", "train.micro_batch=2",
        "train.global_batch_tokens=131072", "train.remat=selective", "optim.type=adamw",
    )  # fmt: skip
    base, one = (step_of(large(*keys, *more)) for more in (["train.precision=bf16"], settings))
    assert base.seconds / one.seconds == pytest.approx(published / 6667, rel=0.05)


def test_ddp_sends_each_gradient_twice_and_fsdp_gathers_weights_twice() -> None:
    ddp = large()
    (all_reduce,) = [one for one in collective_costs(ddp) if "gradients" in one.kind]
    assert all_reduce.bytes == 2 * FP32 * count.parameters(ddp.arch) * 7 / 8
    fsdp = large("parallel.replicate=1", "parallel.shard=-1", "train.micro_batch=64")
    by_kind = {one.kind: one.bytes for one in collective_costs(fsdp)}
    weights = count.parameters(fsdp.arch)
    outside = 2 * 128256 * 4096 + 4096
    gathered = 2 * (2 * weights - outside) * fsdp.accumulation
    assert by_kind["all-gather of weights"] == gathered * 7 / 8
    assert by_kind["reduce-scatter of gradients"] == FP32 * weights * 7 / 8
    in_fp8 = large(
        "parallel.replicate=1", "parallel.shard=-1", "train.micro_batch=64", "train.precision=fp8"
    )
    (of_weights,) = [one for one in collective_costs(in_fp8) if one.kind.endswith("of weights")]
    norms = 32 * 2 * 4096
    gathered = 2 * (weights - outside) + 2 * norms + 2 * outside
    assert of_weights.bytes == gathered * fsdp.accumulation * 7 / 8


def test_a_run_is_cut_into_jobs_by_its_time_limit() -> None:
    one = large("parallel.replicate=1", "parallel.shard=-1", "launch.time=10:00:00", nodes=8)
    whole = run_of(one, step_of(one))
    usable = 36_000 - 240
    assert whole.slices == -(-whole.seconds // usable)
    assert run_of(large(nodes=8), step_of(one)).slices is None


def test_a_mesh_that_does_not_divide_the_heads_is_refused() -> None:
    with pytest.raises(ConfigError, match="n_kv_heads 8 is not a multiple of tensor 16"):
        large("parallel.tensor=16", "parallel.shard=-1", "parallel.replicate=1", nodes=2)


def test_an_unknown_gpu_is_reported_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown GPU 'V100'") as caught:
        gpus.find("V100", 1)
    for name in gpus.GPUS:
        assert name in str(caught.value)


MESHES = (
    "parallel.replicate=4",
    "parallel.replicate=2 parallel.shard=2",
    "parallel.replicate=1 parallel.shard=2 parallel.tensor=2",
)


def of_four(mesh: str) -> Case:
    return case(*SMALL, "model.family=llama", "optim.type=muon", *mesh.split(), gpus_per_node=4)


def muon_step(world: World, mesh: str) -> tuple[int, int]:
    """Bytes that one step of Muon really sends other ranks, and receives of them."""
    one, sent, received = of_four(mesh), 0, 0
    layout = make_mesh(one.sizes, world)
    model = Decoder(one.arch)
    apply(model, world, layout, compile_blocks=False)
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    exchange: Any = torch.distributed.all_to_all_single

    def counted(
        new: Tensor, old: Tensor, expected: list[int], counts: list[int], **how: Any
    ) -> Any:
        nonlocal sent, received
        sent += old.nbytes - old.itemsize * counts[world.rank]
        received += new.nbytes - new.itemsize * expected[world.rank]
        return exchange(new, old, expected, counts, **how)

    muon = built.build(
        one.cfg.optim, params_of(model, layout), RunFacts(1, dtype=one.precision.compute_dtype)
    )["muon"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_to_all_single", counted)
        muon.step()
    return sent, received


def muon_steps(world: World) -> list[tuple[int, int]]:
    torch.set_num_threads(1)
    return [muon_step(world, mesh) for mesh in MESHES]


@pytest.mark.slow
def test_muon_sends_as_much_as_real_ranks_do() -> None:
    by_rank = on_ranks(4, muon_steps)
    for mesh, counts in zip(MESHES, zip(*by_rank, strict=True), strict=True):
        (planned,) = (
            e.bytes for e in collective_costs(of_four(mesh)) if e.kind == "Muon's matrices"
        )
        assert planned == max(max(count) for count in counts), mesh


def step_peaks(world: World) -> list[int]:
    from support.simulated_ranks import Trace

    found = []
    for settings in STEPS:
        one = of_step(settings)
        model = Decoder(one.arch).to(one.precision.weights)
        parameters = dict(model.named_parameters())
        dtype = one.precision.compute_dtype
        optimizers = built.build(one.cfg.optim, params_of(model), RunFacts(1, dtype=dtype)).values()
        with Trace() as trace:
            for parameter in parameters.values():
                trace.see(parameter.data.zero_())
            ema = Ema(params_of(model), 0.9)  # made of what is seen
            for _ in range(2):  # the first one makes the state
                for parameter in parameters.values():
                    parameter.grad = torch.zeros_like(parameter)
                trace.forget_peak()
                for optimizer in optimizers:
                    optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
                    optimizer.step()
                    optimizer.zero_grad()
                ema.update(torch.zeros(()))
        found.append(trace.peak)
    return found


STEPS = (
    [
        [f"model.family={family}", f"train.precision={precision}"]
        for family in ("llama", "gemma3")
        for precision in ("bf16", "fp32")
    ]
    + [
        [
            "train.precision=fp32",
            "optim.type=adamw",
            "optim.weight_decay={value: 0.1, cautious: true}",
        ]
    ]
    + [
        ["train.precision=fp32", "optim.type=adamw", "optim.state=8bit", f"model.dim={dim}"]
        for dim in (128, 512)
    ]
)


def of_step(settings: list[str]) -> Case:
    return case(*SMALL, "model.dim=128", "optim.type=muon", "train.ema_decay=0.9", *settings)


@pytest.mark.slow
def test_a_step_holds_what_the_formulas_say_of_the_variants_of_its_optimizer() -> None:
    (peaks,) = on_ranks(1, step_peaks)
    for settings, peak in zip(STEPS, peaks, strict=True):
        step = next(m for m in moments(of_step(settings)) if m.moment == "the optimizer's step")
        planned = step.total - step.parts["framework"] - step.parts["batches"]
        assert planned == pytest.approx(peak, rel=0.02), settings


SIMULATED = (
    "gpt2-124m --ranks 8 --shard 4 --context 2 --seq-len 1024 --layers 3 --optimizer muon",
    "llama3-8b --ranks 8 --pipeline 4 --stages-per-rank 2 --tensor 2 --layers 8 --accumulation 8",
)


def planned_and_simulated(world: World, arguments: str) -> tuple[tuple[int, ...], ...]:
    import sys

    from support.simulated_ranks import case_of, parse_arguments, simulate

    sys.argv = ["simulated_ranks", *arguments.split()]
    one = case_of(parse_arguments())
    *peaks, received = simulate(one)
    *passes, step = (
        moment.total - moment.parts["framework"] - moment.parts["batches"]
        for moment in moments(one)
    )
    planned = max(passes), step, sum(e.bytes for e in collective_costs(one))
    return planned, (*peaks, sum(received.values()))


@pytest.mark.slow
@pytest.mark.parametrize("arguments", SIMULATED)
def test_simulated_ranks_hold_and_receive_what_the_formulas_say(arguments: str) -> None:
    [(planned, simulated)] = on_ranks(1, planned_and_simulated, arguments)
    *peaks, received = (a / b for a, b in zip(planned, simulated, strict=True))
    assert peaks == pytest.approx([1, 1], abs=0.05)
    assert received == pytest.approx(1, abs=0.01)
