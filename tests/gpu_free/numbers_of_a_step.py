"""Answers with loss and gradients of the compiled CUDA step beside those of a CPU."""

from __future__ import annotations

import shadow  # before torch

import contextlib  # isort: skip
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from fake_run import make, training
from serving import serve
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from dtt.config.adapter import LoraConfig
from dtt.data.samples.loader import MicroBatch
from dtt.estimate.case import Case
from dtt.mesh.compilation import compiler
from dtt.model import attention_backend, layers, loss, norm
from dtt.model.decoder import Decoder
from dtt.model.lora import attach
from dtt.train import trainer
from dtt.train.step import Step

SMALL = [
    "model.dim=32", "model.n_layers=1", "model.n_heads=2", "model.vocab_size=96",
    "train.micro_batch=1", "train.precision=fp32", "train.clip_norm=null", "optim.type=adamw",
]  # fmt: skip
CASES = {
    "gpt2": ["model.family=gpt2", "train.seq_len=64"],
    "llama": ["train.seq_len=64"],
    "qwen3": ["model.family=qwen3", "train.seq_len=64"],
    # The mask of up to 128 tokens is not compiled.
    "documents": ["data.mask_documents=true", "train.seq_len=160"],
    "gemma3": ["model.family=gemma3", "data.mask_documents=true", "train.seq_len=160"],
    "z-loss": ["train.seq_len=64", "train.z_loss=0.01"],
    "adapter": ["train.seq_len=64", "adapter.type=lora", "adapter.rank=4", "init.from=hf:any"],
}
STARTS = torch.tensor([0, 30, 31, 140])
"""First tokens of the documents: one is a single token, and none begins a block of a kernel."""


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


def _one_term_too_many() -> Any:
    right = Step.run
    return patch.object(Step, "run", lambda *args: right(*args[:-1], args[-1] + 1))


def _gradients_scaled() -> Any:
    right = loss._LinearCrossEntropy.backward

    def backward(context: Any, *grads: Tensor) -> Any:
        return right(context, *(1.001 * grad for grad in grads))

    return patch.object(loss._LinearCrossEntropy, "backward", staticmethod(backward))


FAULTS: dict[str, tuple[str, Callable[[], Any], shadow.Spoil]] = {
    "scale": ("llama", _scale_up, str),
    "mask": ("documents", _one_key_too_many, str),
    "terms": ("llama", _one_term_too_many, str),
    "gradient": ("llama", _gradients_scaled, str),
    "norm": ("llama", lambda: _scaled(norm.RMSNorm, "forward", 1.001), str),
    "mlp": ("llama", lambda: _scaled(layers.GatedMLP, "forward", 1.001), str),
    "gelu": ("gpt2", lambda: _scaled(layers.GeluMLP, "forward", 1.001), str),
    "rsqrt": ("llama", contextlib.nullcontext, lambda s: s.replace("rsqrt(", "sqrt(")),
    "sum": ("llama", contextlib.nullcontext, lambda s: s.replace("tl.sum(", "0.999 * tl.sum(")),
    "residual": ("llama", lambda: _scaled(layers.Block, "add", 1.001), str),
}
"""Case, planted mistake, and change of the kernels' source, by name."""


def compare(name: str) -> dict[str, float]:
    """Return the relative differences of loss and gradients for a case or a fault."""
    case_name, plant, spoil = FAULTS.get(name, (name, contextlib.nullcontext, str))
    keys = [*SMALL, *CASES[case_name]]
    case = make(*keys)
    draw = torch.Generator().manual_seed(0)
    documents = "data.mask_documents=true" in keys
    batch: list[Tensor | None] = []
    found: dict[str, Tensor] = {}
    with plant(), shadow.Shadow(spoil) as numbers, training(case, documents=documents) as step:
        named = {name: param.tensor for name, param in step.assembled.params.items()}
        with _disable_current_modes():
            weights = {
                n: numbers.of(p.detach()).normal_(0, 0.3, generator=draw).clone()
                for n, p in named.items()
            }

        def fill(one: MicroBatch) -> None:
            with _disable_current_modes():
                tokens, targets = numbers.of(one.tokens), numbers.of(one.targets)
                for x in (tokens, targets):
                    x.random_(0, case.arch.vocab_size, generator=draw)
                ids = None if one.doc_ids is None else numbers.of(one.doc_ids)
                if ids is not None:
                    ids.copy_((torch.arange(ids.shape[1])[:, None] >= STARTS).sum(1))
                batch[:] = [None if x is None else x.clone() for x in (tokens, targets, ids)]

        def read(*_: Any, **__: Any) -> None:
            with _disable_current_modes():
                trained = {n: p for n, p in named.items() if p.requires_grad}
                found.update({n: numbers.of(p.grad).clone() for n, p in trained.items()})

        with patch.object(trainer, "update", read):
            step(fill)
        with _disable_current_modes():
            computed = float(numbers.of(step.values)[0])
    assert not compiler.failure, compiler.failure
    assert numbers.launches
    return _differences(case, weights, batch, computed, found)


def _differences(
    case: Case, weights: Any, batch: Any, computed: float, found: dict[str, Tensor]
) -> dict[str, float]:
    model = Decoder(case.arch)
    if isinstance(case.cfg.adapter, LoraConfig):
        attach(model, case.cfg.adapter, torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    tokens, targets, ids = batch
    z_loss = case.cfg.train.z_loss
    reference = model(tokens, targets, doc_ids_BT=ids, z_loss=z_loss).loss / tokens.numel()
    reference.backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    # Some gradients are zero up to rounding, such as that of the keys' bias.
    floor = 1e-3 * max(float(grad.norm()) for grad in expected.values())
    worst = max(
        float((found[n] - grad).norm()) / max(float(grad.norm()), floor)
        for n, grad in expected.items()
    )
    return {"loss": abs(computed / float(reference) - 1), "gradients": worst}


if __name__ == "__main__":
    serve(compare)
