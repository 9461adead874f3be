"""The real model, optimizers and training step of one rank of any layout, on fake CUDA tensors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import fake_gpu  # before torch

import torch  # isort: skip
import torch.distributed as dist
from random_steps import plan_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from dtt.base.ranks import Ranks
from dtt.config.load import resolve
from dtt.data.samples.loader import Batch, MicroBatch
from dtt.estimate import gpus
from dtt.estimate.case import Case, make_case
from dtt.mesh import sharding
from dtt.mesh.compilation import compiler
from dtt.mesh.dist import World
from dtt.mesh.mesh import Mesh
from dtt.model import attention_backend, chunked_attention
from dtt.model.decoder import Decoder
from dtt.optim.built import build as build_optimizers
from dtt.optim.muon import optimizer as muon
from dtt.parallel import fp8
from dtt.train import step, trained_model
from dtt.train.anomaly_guard import Guard
from dtt.train.expert_load import ExpertLoad
from dtt.train.objectives.loss_function import make_loss
from dtt.train.state import Position
from dtt.train.trained_model import TrainState, assemble
from dtt.train.trainer import Trainer

SMALL = [
    "model.dim=256", "model.n_layers=2", "model.n_heads=4", "model.vocab_size=1024",
    "train.seq_len=256", "train.micro_batch=2",
]  # fmt: skip


def make(*keys: str, model: str = "", gpu: str = "H100", ranks: int = 1) -> Case:
    """Return the case of a shipped model (default: a small one) on `ranks` GPUs of one node.

    The global batch is a micro-batch for each replica, unless a key says otherwise.
    """
    given = dict(key.split("=", 1) for key in ("train.precision=bf16", *keys))
    if not model:
        given = dict(key.split("=", 1) for key in (*SMALL, "model.family=llama")) | given
    tokens = int(given["train.micro_batch"]) * int(given["train.seq_len"])
    replicas = ranks // int(given.get("parallel.tensor", 1))
    replicas //= int(given.get("parallel.context", 1))
    given.setdefault("train.global_batch_tokens", str(tokens * replicas))
    if ranks > 1:
        given.setdefault("parallel.replicate", "1")
        given.setdefault("parallel.shard", str(replicas))
    named = f"models/{model}" if model else None
    cfg = resolve(named, [f"{key}={value}" for key, value in given.items()]).config
    assert cfg.model.vocab_size
    return make_case(cfg, gpus.find(gpu, ranks), 1, ranks, cfg.model.vocab_size, 1000)


class Step:
    """The training step of a case; calling it does one. The first one creates optimizer state."""

    def __init__(self, case: Case, world: World) -> None:
        """Build what the step uses; initial values are not drawn."""
        plan = plan_of(case, world)
        mixture = plan.arch.mixture
        self.case, self.device = case, world.device
        self.assembled = parts = assemble(case.cfg, plan, world)
        state = TrainState(
            **vars(parts),
            passes=step.Passes(parts.module, case.precision, parts.mesh.gradient_replicas),
            optimizers=build_optimizers(case.cfg.optim, parts.params, plan.facts(None)),
            guard=Guard(case.cfg.guard, world, Path()), objective=case.cfg.objective,
            rounding=None, ema=None,
            experts=mixture and ExpertLoad(parts.model, parts.mesh, case.cfg.train.balance_rate),
        )  # fmt: skip
        unused: Any = None
        meter = SimpleNamespace(end_phase=lambda _: None)
        self.trainer = Trainer(
            resolved=SimpleNamespace(config=case.cfg), world=world, job=unused,  # type: ignore[arg-type]
            schedule=unused, plan=plan, from_step=None, branch=None, stage=None, predecessor=None,
            attempt=unused, watchdog=unused, resume=None, run_id="", state=state, actions=[],
            loss_function=make_loss(case.cfg, plan), batches_from=unused,
            # The ranks compare the names of values in the first step: a message on the host.
            saver=unused, trackers=(), profiler=unused, times=unused, position=Position(),
            _reported=["loss"],
            meter=meter,  # type: ignore[arg-type]
            dataset=SimpleNamespace(step_sizes=case.step_sizes),  # type: ignore[arg-type]
        )  # fmt: skip

    @property
    def values(self) -> Tensor:
        """Loss, gradient norm and verdict of the last step; on the device."""
        return self.trainer._unread[-1][1]

    def __call__(
        self, fill: Callable[[MicroBatch], None] = lambda _: None, terms: int | None = None
    ) -> None:
        """Do a step with one batch of zeros, or of what `fill` writes, whose loss has `terms`."""
        case = self.case
        shape = case.micro_batch, case.cfg.train.seq_len
        tokens, targets = torch.zeros((2, *shape), dtype=torch.long, device=self.device)
        ids, extra = None, {}
        if case.cfg.data.mask_documents:
            ids = torch.zeros(shape, dtype=torch.int32, device=self.device)
        if case.cfg.objective.type == "dpo":
            extra = {"reference_logprobs": torch.zeros(shape, device=self.device)}
        one = MicroBatch(tokens, targets, ids, extra)
        fill(one)
        count = case.accumulation * tokens.numel() * case.sizes.data
        batch = Batch([b""], count, terms or count, [one] * case.accumulation)  # type: ignore[arg-type]
        with patch("dtt.train.trainer.extend_data_hash", lambda _, __: b""):
            self.trainer.step(batch, 1.0)


@contextlib.contextmanager
def on_fake_gpu(backend: Callable[..., Any] | str, ranks: int = 1) -> Iterator[World]:
    """Make tensors fake inside, for the first of `ranks` ranks; yield its world.

    `backend` is that of torch.compile.
    """
    compiler.failure = ""
    torch._dynamo.reset()
    for function in (attention_backend._compiled_flex, attention_backend._block_mask_maker):
        function.cache_clear()  # they keep the compiled functions of another back end
    with contextlib.ExitStack() as stack:
        group = None
        if ranks > 1:
            dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
            stack.callback(dist.destroy_process_group)
            group = dist.group.WORLD
        for owner, name, new in (
            (torch, "compile", functools.partial(torch.compile, backend=backend)),
            (trained_model, "initialize", lambda *_: None),
            (trained_model, "make_mesh", _on_real_tensors(trained_model.make_mesh)),
            (Mesh, "group", _on_real_tensors(Mesh.group)),
            (DeviceMesh, "__init__", _on_real_tensors(DeviceMesh.__init__)),
            (Decoder, "to", _to),
            (attention_backend, "running_kernel", lambda *_: "cudnn"),  # asks the driver
            (chunked_attention, "running_kernel", lambda *_: "cudnn"),
            # Nothing can be timed.
            (fp8, "find_gains", lambda layers, _: dict.fromkeys(layers.values(), 2.0)),
            (muon, "plan", _on_real_tensors(muon.plan)),  # reads the mesh
            (sharding, "_on_mesh", _on_real_tensors(sharding._on_mesh)),
            (World, "maxima", lambda _, *values: list(values)),
        ):
            stack.enter_context(patch.object(owner, name, new))
        stack.enter_context(fake_gpu.fake_mode())
        place = Ranks(0, ranks, 0, ranks, "torchrun" if ranks > 1 else "alone")
        yield World(place, fake_gpu.DEVICE, group)


@contextlib.contextmanager
def training(case: Case, *, backend: Callable[..., Any] | str = "inductor") -> Iterator[Step]:
    """Yield the step of a case; see `on_fake_gpu`."""
    with on_fake_gpu(backend, case.devices) as world:
        yield Step(case, world)


def _on_real_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that creates real tensors also inside of a fake mode."""

    def real(*arguments: Any, **named: Any) -> Any:
        with _disable_current_modes():
            return function(*arguments, **named)

    return real


def _to(model: Decoder, dtype: torch.dtype) -> Decoder:
    """Convert a model; `nn.Module.to` swaps tensors, which fails for fake ones."""
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and p.dtype != dtype:
                module._parameters[name] = nn.Parameter(p.detach().to(dtype))
    return model
