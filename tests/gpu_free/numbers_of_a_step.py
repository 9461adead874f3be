"""Answers with loss, gradients and update of the compiled CUDA step beside those of a CPU."""

from __future__ import annotations

import shadow  # before torch

import contextlib  # isort: skip
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from chunks import both_ranks
from fake_run import make, training
from random_steps import plan_of
from serving import serve
from step_cases import CASES, SMALL
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from dtt.base.ranks import Ranks
from dtt.config.adapter import LoraConfig
from dtt.data.samples.loader import MicroBatch
from dtt.estimate.case import Case
from dtt.mesh.compilation import compiler
from dtt.mesh.dist import World
from dtt.model import attention_backend, chunked_attention, layers, loss
from dtt.model.decoder import Decoder, params_of
from dtt.model.lora import attach
from dtt.optim.built import build as build_optimizers
from dtt.optim.muon import optimizer as muon
from dtt.train import trainer
from dtt.train.objectives import dpo
from dtt.train.objectives.loss_function import make_loss
from dtt.train.step import Passes, update

STARTS = torch.tensor([0, 30, 31, 140])
"""First tokens of the documents: one is a single token, and none begins a block of a kernel."""


@dataclass
class Numbers:
    """What a step computes; in host memory."""

    loss: float = 0.0
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Weights after the step."""


def _scaled(owner: Any, name: str, factor: float) -> Any:
    """Return a context in which the result of a function is scaled."""
    right = getattr(owner, name)
    return patch.object(owner, name, lambda *args, **named: factor * right(*args, **named))


def _scale_up() -> Any:
    right = attention_backend.sdpa
    return patch.object(
        attention_backend, "sdpa",
        lambda *args, scale, **named: right(*args, scale=1.02 * scale, **named),
    )  # fmt: skip


def _one_key_too_many() -> Any:
    right = attention_backend.visible

    def visible(*given: Any) -> Callable[..., Tensor]:
        rule = right(*given)
        return lambda b, h, q, k: rule(b, h, q, k) | (k == q + 1)

    return patch.object(attention_backend, "visible", visible)


def _chunks_from_the_start() -> Any:
    right = attention_backend.visible
    return patch.object(
        attention_backend, "visible", lambda ids, window, _positions: right(ids, window, None)
    )


def _chunks_one_earlier() -> Any:
    right = chunked_attention._parts
    return patch.object(
        chunked_attention, "_parts", lambda start, length: right(max(start - 1, 0), length)
    )


def _one_term_too_many() -> Any:
    right = Passes.run
    return patch.object(Passes, "run", lambda *args: right(*args[:-1], args[-1] + 1))


def _gradients_scaled() -> Any:
    right = loss._LinearCrossEntropy.backward

    def backward(context: Any, *grads: Tensor) -> Any:
        return right(context, *(1.001 * grad for grad in grads))

    return patch.object(loss._LinearCrossEntropy, "backward", staticmethod(backward))


FAULTS: dict[str, tuple[str, Callable[[], Any], shadow.Spoil]] = {
    "scale": ("llama", _scale_up, str),
    "mask": ("documents", _one_key_too_many, str),
    "positions": ("chunks-documents", _chunks_from_the_start, str),
    "starts": ("chunks", _chunks_one_earlier, str),
    "terms": ("llama", _one_term_too_many, str),
    "gradient": ("llama", _gradients_scaled, str),
    "norm": ("llama", lambda: _scaled(layers.RMSNorm, "forward", 1.001), str),
    "mlp": ("llama", lambda: _scaled(layers.GatedMLP, "forward", 1.001), str),
    "gelu": ("gpt2", lambda: _scaled(layers.GeluMLP, "forward", 1.001), str),
    "rsqrt": ("llama", contextlib.nullcontext, lambda s: s.replace("rsqrt(", "sqrt(")),
    "sum": ("llama", contextlib.nullcontext, lambda s: s.replace("tl.sum(", "0.999 * tl.sum(")),
    "residual": ("llama", lambda: _scaled(layers.Block, "add", 1.001), str),
    "pairs": ("dpo", lambda: _scaled(dpo, "_by_pair", 1.001), str),
    "update": ("muon", lambda: _scaled(muon, "orthogonalize", 1.001), str),
    "truncation": ("bf16", shadow.truncated, str),
}
"""Case, planted mistake, and change of the kernels' source, by name."""


def compare(name: str) -> dict[str, float]:
    """Return the relative differences of a case or a fault.

    With bf16, `rounding` is how far the uncompiled step of a CPU in bf16 is from that in fp32.
    """
    case_name, plant, spoil = FAULTS.get(name, (name, contextlib.nullcontext, str))
    case = make(*SMALL, *CASES[case_name])
    with plant(), both_ranks() if case_name.startswith("chunks") else contextlib.nullcontext():
        before, batch, computed = _on_gpu(case, spoil)
    expected = _on_cpu(case, "fp32", before, batch)
    found = {
        "loss": abs(computed.loss / expected.loss - 1),
        "gradients": _distance(computed.gradients, expected.gradients),
    }
    if case.cfg.optim.type == "muon":
        matrices = [n for n, x in before.items() if n.startswith("layers") and x.ndim == 2]
        steps = [{n: one.weights[n] - before[n] for n in matrices} for one in (computed, expected)]
        found["update"] = _distance(*steps)
    if case.precision == "bf16":
        rounded = _on_cpu(case, case.precision, before, batch)
        found["rounding"] = _distance(rounded.gradients, expected.gradients)
    return found


def _terms(case: Case) -> int:
    return len(STARTS) // 2 if case.cfg.objective.type == "dpo" else case.cfg.train.seq_len


def _on_gpu(case: Case, spoil: shadow.Spoil) -> tuple[dict[str, Tensor], MicroBatch, Numbers]:
    """Return weights, batch, and what a step computes from them."""
    draw = torch.Generator().manual_seed(0)
    given: list[MicroBatch] = []
    computed = Numbers()
    with shadow.Shadow(spoil) as numbers, training(case) as step:
        named = {name: param.tensor for name, param in step.assembled.params.items()}

        def held() -> dict[str, Tensor]:
            return {name: numbers.of(p.detach()).clone() for name, p in named.items()}

        with _disable_current_modes():
            for p in named.values():
                numbers.of(p.detach()).normal_(0, 0.3, generator=draw)
            before = held()

        def fill(one: MicroBatch) -> None:
            with _disable_current_modes():
                real = MicroBatch(
                    numbers.of(one.tokens).random_(0, case.arch.vocab_size, generator=draw),
                    numbers.of(one.targets).random_(0, case.arch.vocab_size, generator=draw),
                    None if one.doc_ids is None else numbers.of(one.doc_ids),
                    {
                        n: numbers.of(x).uniform_(-6, -3, generator=draw)
                        for n, x in one.extra.items()
                    },
                )
                if real.doc_ids is not None:
                    places = torch.arange(case.cfg.train.seq_len)
                    real.doc_ids.copy_((places[:, None] >= STARTS[1:]).sum(1))
                given.append(real)

        def read(*how: Any, **more: Any) -> None:
            with _disable_current_modes():
                trained = {n: p for n, p in named.items() if p.requires_grad}
                computed.gradients = {n: numbers.of(p.grad).clone() for n, p in trained.items()}
            update(*how, **more)

        with patch.object(trainer, "update", read):
            step(fill, _terms(case))
        with _disable_current_modes():
            computed.loss = float(numbers.of(step.values)[0])
            computed.weights = held()
    assert not compiler.failure, compiler.failure
    assert numbers.launches
    return before, given[0], computed


def _on_cpu(case: Case, precision: str, weights: dict[str, Tensor], batch: MicroBatch) -> Numbers:
    """Return what an uncompiled step computes."""
    model = Decoder(case.arch)
    if isinstance(case.cfg.adapter, LoraConfig):
        attach(model, case.cfg.adapter, torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    plan = plan_of(case, World(Ranks(), torch.device("cpu"), None))
    objective = make_loss(case.cfg, plan)
    output = Passes(model, precision).run([batch], objective, _terms(case))
    named = dict(model.named_parameters())
    gradients = {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
    parts: Any = SimpleNamespace(params=params_of(model))
    optimizers = build_optimizers(case.cfg.optim, parts.params, plan.facts(None))
    update(optimizers, torch.zeros(()), step=0)
    return Numbers(float(output.loss), gradients, {n: p.detach() for n, p in named.items()})


def _distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest relative difference of a tensor."""
    assert expected
    # Some gradients are zero up to rounding, such as that of the keys' bias.
    floor = 1e-3 * max(float(x.norm()) for x in expected.values())
    return max(
        float((found[name] - x).norm()) / max(float(x.norm()), floor)
        for name, x in expected.items()
    )


if __name__ == "__main__":
    serve(compare)
