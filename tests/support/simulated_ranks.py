"""Simulate a thousand ranks, and compare memory and communication with `dtt plan`.

    python tests/support/simulated_ranks.py [MODEL] [--ranks N] [--shard N] [--context N]
        [--tensor N] [--pipeline N] [--stages-per-rank N] [--pipeline-rank R]
        [--seq-len T] [--micro-batch B] [--accumulation A] [--remat KIND] [--layers L]
        [--optimizer NAME]

dtt's own code builds the model, applies it to a mesh and trains it for two steps, with a fake
process group, which sends nothing, and fake tensors, which have a shape but no memory. The trace
records every tensor that rank 0, or the first device of a rank of a pipeline, allocates and frees,
and every collective that it calls. The device is a CPU, and the formulas assume the same.
"""

from __future__ import annotations

import argparse
import time
import weakref
from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from dtt.base.ranks import Ranks
from dtt.config import explain
from dtt.config.layers import read_file
from dtt.config.load import resolve
from dtt.config.schedule import RunFacts
from dtt.config.shipped import shipped_configs
from dtt.data.samples.loader import MicroBatch
from dtt.estimate.case import Case, make_case
from dtt.estimate.communication import collective_costs
from dtt.estimate.gpus import GIB, Gpu
from dtt.estimate.memory import moments
from dtt.mesh.dist import World
from dtt.mesh.mesh import Mesh, make_mesh
from dtt.mesh.sharding import local
from dtt.model.decoder import Decoder, params_of
from dtt.optim import built
from dtt.optim.muon import optimizer, redistribution
from dtt.parallel.apply import apply
from dtt.parallel.context import ContextParallel
from dtt.parallel.pipelining import Pipeline
from dtt.train.objectives.loss_function import loss_function
from dtt.train.pipelined_step import PipelinedPasses
from dtt.train.step import Passes

NODE = 8
"""Ranks of a node."""
KINDS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
"""Factor from the bytes of a collective's tensor to the bytes that a device receives."""


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that counts the memory of live tensors and the bytes of collectives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self.received: Counter[str] = Counter()
        """Bytes by kind of collective, counted as in `dtt.estimate.communication`."""
        self.sent: Counter[str] = Counter()
        """Bytes sent, for kinds in which they differ from those received (all-to-all)."""
        self._now = 0
        self._sizes: dict[int, int] = {}
        self._watches: dict[int, Any] = {}

    def forget_peak(self) -> None:
        """Reset the peak to the memory in use now."""
        self.peak = self._now

    def __enter__(self) -> Trace:
        self._resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:  # FSDP2 frees memory this way
            done = self._resize(storage, size)
            if _key(storage) in self._sizes:
                self._set(_key(storage), size)
            return done

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *args: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*args)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor dispatches again, on local tensors
        name = func.name()
        if "wait_tensor" in name:
            return args[0]
        out = func(*args, **(kwargs or {}))
        if "c10d" in name:
            self._count_collective(name, args, out)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.see(tensor)
        return out

    def see(self, tensor: Tensor) -> None:
        """Count the memory of a tensor as in use."""
        storage = local(tensor).untyped_storage()
        key = _key(storage)
        if key not in self._sizes:
            self._set(key, storage.nbytes())
            self._watches[key] = weakref.ref(storage, lambda _: self._forget(key))

    def _set(self, key: int, size: int) -> None:
        self._now += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self._now)

    def _forget(self, key: int) -> None:
        self._now -= self._sizes.pop(key)
        del self._watches[key]

    def _count_collective(self, name: str, args: tuple[Any, ...], out: Any) -> None:
        if "alltoall" in name:
            received, sent = (args[0].itemsize * sum(counts[1:]) for counts in args[3:5])
            self.received["all_to_all"] += received
            self.sent["all_to_all"] += sent
            return
        if "send" in name or "recv" in name:
            counted = self.sent if "send" in name else self.received
            counted["point to point"] += _bytes(args[0])
            return
        kind = next(kind for kind in KINDS if kind.replace("_", "") in name.replace("_", ""))
        full = max(_bytes(part) for part in (*args, out))
        ranks = max(map(_group_size, args))
        self.received[kind] += KINDS[kind] * full * (ranks - 1) // ranks


def _key(storage: torch.UntypedStorage) -> int:
    address: int = storage._cdata
    return address


def _bytes(part: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(part) if isinstance(leaf, Tensor))


def _group_size(argument: Any) -> int:
    """Return the size of the process group that an operator's argument is or names, else 0."""
    try:
        if isinstance(argument, torch.ScriptObject):
            return dist.ProcessGroup.unbox(argument).size()
        return c10d._resolve_process_group(argument).size()  # type: ignore[attr-defined]
    except (RuntimeError, TypeError, ValueError):
        return 0


def _plan_with_real_tensors(*arguments: Any) -> list[redistribution.Bucket]:
    """Return Muon's plan, which reads ranks from the mesh and so needs real tensors."""
    with _disable_current_modes():
        return redistribution.plan(*arguments)


def simulate(case: Case) -> tuple[int, int, Counter[str]]:
    """Return the peak bytes of a rank in the passes and in the optimizer step, and its traffic.

    The traffic maps kinds of collectives to bytes, the larger of received and sent.
    """
    passes, stack = 0, ExitStack()
    ranks, rank = case.devices, case.rank * case.devices // case.sizes.pipeline
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    world = World(Ranks(rank, ranks, 0, NODE, "torchrun"), torch.device("cpu"), None)
    layout = make_mesh(case.sizes, world)
    train, trace = case.cfg.train, Trace()
    with torch.device("meta"):
        model = Decoder(case.arch, case.own_stages)
    module = apply(
        model,
        world,
        layout,
        compile_blocks=False,
        remat=train.remat,
        precision=case.precision,
        reshard=case.cfg.parallel.reshard,
    )
    if case.sizes.context > 1:
        module = ContextParallel(model, layout)
    step = Passes(module, case.precision)
    if case.sizes.pipeline > 1:
        stages = case.cfg.parallel.stage_layers(case.arch.n_layers)
        dtype, each = case.precision.compute_dtype, case.reduces_each
        pipeline = Pipeline(module, stages, layout, dtype, reduce_each=each)
        pipeline.names = [("loss", "")]  # the ranks would tell each other
        group = layout.group("pipeline")  # created of the mesh's real tensors
        vote = SimpleNamespace(item=lambda: 1)  # all stages know their shapes
        for owner, name, new in (
            (Mesh, "group", lambda *_, **__: group),
            (Mesh, "gather", lambda _mesh, value, *_: [value]),  # names of other stages
            (PipelineStage, "_warmup_forward_vote", lambda *_, **__: None),
            (PipelineStage, "_warmup_backward_result", lambda *_, **__: vote),
        ):
            stack.enter_context(patch.object(owner, name, new))
        step = PipelinedPasses(pipeline, case.precision)
    with FakeTensorMode(allow_non_fake_inputs=True):  # the mesh's tensors are real
        model.to_empty(device="cpu")
        parameters = dict(model.named_parameters())
        with _disable_current_modes():  # the table reads the ranks of the mesh
            params = params_of(model, layout)
        optimizers = built.build(
            case.cfg.optim, params, RunFacts(1, dtype=case.precision.compute_dtype)
        ).values()
        shape = (case.micro_batch, train.seq_len)
        with trace, patch.object(optimizer, "plan", _plan_with_real_tensors):
            for parameter in parameters.values():
                trace.see(parameter)
            for _ in range(2):  # in the first step DTensor tries operations on full tensors
                trace.forget_peak()
                trace.received.clear()
                trace.sent.clear()
                tokens = torch.zeros(shape, dtype=torch.long)
                micro_batches = [MicroBatch(tokens, tokens, None)] * case.accumulation
                terms = case.accumulation * tokens.numel()
                step.run(micro_batches, loss_function(), terms)
                passes = trace.peak
                trace.forget_peak()
                for single in optimizers:
                    single.step()
                    single.zero_grad()
    stack.close()
    dist.destroy_process_group()
    return passes, trace.peak, trace.received | trace.sent


def case_of(options: argparse.Namespace) -> Case:
    """Return the case that the arguments describe."""
    file = shipped_configs() / "models" / f"{options.model}.yaml"
    layer = read_file(file, explain.key_types())
    sizes = [f"{'.'.join(key)}={leaf.value}" for key, leaf in layer.items()]
    vocabulary = next(leaf.value for key, leaf in layer.items() if key[-1] == "vocab_size")
    if options.layers:
        sizes.append(f"model.n_layers={options.layers}")
    inner = options.context * options.tensor * options.pipeline
    rows = options.ranks // inner * options.micro_batch * options.accumulation
    cfg = resolve(
        None,
        [
            *sizes,
            f"train.seq_len={options.seq_len}",
            f"train.micro_batch={options.micro_batch}",
            f"train.global_batch_tokens={options.seq_len * rows}",
            f"train.remat={options.remat}",
            "train.precision=bf16",
            f"optim.type={options.optimizer}",
            f"parallel.shard={options.shard or options.ranks // inner}",
            f"parallel.context={options.context}",
            f"parallel.tensor={options.tensor}",
            f"parallel.pipeline={options.pipeline}",
            f"parallel.stages_per_rank={options.stages_per_rank}",
        ],
    ).config
    cpu = Gpu("CPU", 2**40, 1e12, 1e12, 1e12, 1e12, 1e12, kind="cpu")
    case = make_case(
        cfg, cpu, options.ranks // NODE or 1, min(NODE, options.ranks), vocabulary, 1000
    )
    return case.of_rank(options.pipeline_rank)


def parse_arguments() -> argparse.Namespace:
    """Parse the command-line arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="llama3-70b")
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--shard", type=int)
    parser.add_argument("--context", type=int, default=1)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--stages-per-rank", type=int, default=1)
    parser.add_argument("--pipeline-rank", type=int, default=0)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--remat", default="full")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    return parser.parse_args()


def main() -> None:
    """Print the formulas' figures, the simulated ones and their ratio."""
    case = case_of(parse_arguments())
    start = time.perf_counter()
    *peaks, received = simulate(case)
    print(
        f"{case.arch.family}, {sum(w.numel for w in case.weights) / 1e9:.2f}B parameters, "
        f"{case.devices} ranks ({case.sizes.describe()}), {time.perf_counter() - start:.0f} s"
    )
    print(f"{'':58}{'formula':>12}{'simulated':>12}{'ratio':>8}")
    *passes, step = moments(case)
    for planned, peak in zip((max(passes, key=lambda one: one.total), step), peaks, strict=True):
        held = planned.total - sum(planned.parts[part] for part in ("framework", "batches"))
        print_row(f"peak, GiB ({planned.moment})", held / GIB, peak / GIB)
    total = sum(one.bytes for one in collective_costs(case))
    print_row("received in a step, GB", total / 1e9, sum(received.values()) / 1e9)
    for kind, size in received.items():
        print(f"  {kind:56}{'':12}{size / 1e9:>12.3f}")


def print_row(label: str, formula: float, simulated: float) -> None:
    """Print two figures and their ratio."""
    print(f"{label:58}{formula:>12.3f}{simulated:>12.3f}{formula / simulated:>8.3f}")


if __name__ == "__main__":
    main()
