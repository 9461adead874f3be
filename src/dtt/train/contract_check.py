"""Checks of a model that its family builds itself, before the first step of a run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import _config as tracing
from torch.utils._python_dispatch import TorchDispatchMode

from dtt.base.errors import ConfigError
from dtt.base.log import log
from dtt.mesh.dist import World
from dtt.model.adapted_layers import inner
from dtt.model.architecture import BuiltArchitecture
from dtt.model.contract import Model
from dtt.model.lora import LoraLinear
from dtt.model.output import Output
from dtt.parallel.apply import release

NEEDS_VALUES = (NotImplementedError, RuntimeError, ValueError)
"""Raised by operators whose result, or its size, depends on values, and by code after them."""
LENGTH = 24
"""Tokens of the row of the comparison, of two documents."""
LONG = 256
"""Tokens of the row of tensors without values: some layers see only blocks of many tokens."""
TOLERANCE = 1e-3
"""Largest difference of the logits of separate documents, relative to the largest logit, in fp32:
kernels sum in another order."""
UNSEEN = 1e-5
"""Largest effect of another document on logits in fp32 on a CPU, where shapes are equal: only
experts add the tokens of all documents, in another order. The short convolutions of an untrained
lfm2_moe let others through with 4e-4."""


def check_model(model: Model, world: World, *, separate: bool) -> None:
    """Raise ConfigError if a model of a user's own does not keep the contract of `dtt.Model`.

    `separate`: documents of a row must not see each other (`data.mask_documents`). All ranks call
    this together.
    """
    if isinstance(model.arch, BuiltArchitecture):
        for line in model.notes():
            log.info("%s", line)
        log.info("gradients: %s", check_gradients(model.arch))
        check_adapters_called(model, world.device)
        log.info("causal: %s", check_causal(model, world.device))
        if separate:
            log.info("separate documents: %s", check_documents(model, world.device))
        # Else a resume, which fills the shards next, would compute its first step with the weights
        # that these passes have gathered.
        release(model)


def check_gradients(arch: BuiltArchitecture, model: Model | None = None) -> str:
    """Raise ConfigError if a parameter of the model gets no gradient; return the result in words.

    DDP would wait for it in the second step, and an optimizer would only let it decay. The passes
    are those of tensors without values, which take no time. Where an operator needs values, those
    are of `model`, if it is given.
    """
    try:
        found = _without_values(arch)
    except NEEDS_VALUES as error:
        if model is None:
            return f"not checked ({str(error).splitlines()[0]})"
        found = _gets_gradient(model)
    if left := [name for name, gets in found.items() if not gets]:
        raise ConfigError(
            f"{len(left)} parameters get no gradient, such as {left[0]}",
            where=f"model.family={arch.family}",
            why="`hidden` does not use them",
            next="use them, leave them out, or give them the role `balance` in `role`",
        )
    return f"each of {len(found)} parameters that train gets one"


def _without_values(arch: BuiltArchitecture) -> dict[str, bool]:
    """Return the result of `_gets_gradient` by passes of tensors without values."""
    try:
        return _gets_gradient(arch.skeleton.without_values())
    except NEEDS_VALUES:
        # Loops over the experts that have tokens. Only now: the mode runs Python at each operator.
        sizes: Any = tracing  # torch's stubs lack its `patch`
        with sizes.patch(meta_nonzero_assume_all_nonzero=True), _ZeroForNumbers():  # type: ignore[no-untyped-call]
            found = _gets_gradient(arch.skeleton.without_values())
        # A parameter without a gradient may be that of another expert than 0.
        if not all(found.values()):
            raise
        return found


class _ZeroForNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answer 0 where code asks a tensor without values for its number."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return 0 of the dtype of the tensor, or what the operator returns."""
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:  # noqa: SLF001
            return torch.zeros((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))


def _gets_gradient(model: Model) -> dict[str, bool]:
    """Return for each parameter that an optimizer trains whether it gets a gradient, by name."""
    named = {n: p for n, p in model.named_parameters() if model.role(n, p) != "balance"}
    shape, device = (1, min(LONG, model.arch.max_seq_len)), model.head_weight().device
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.arch.vocab_size, shape, generator=generator).to(device)
    output = model(tokens, tokens, reduction="logits")
    assert isinstance(output, Output)
    total = output.loss.sum() + sum(output.aux.values())
    found: Any = torch.autograd.grad(total, [*named.values()], allow_unused=True)
    return {name: gradient is not None for name, gradient in zip(named, found, strict=True)}


@torch.no_grad()
def check_adapters_called(model: Model, device: torch.device) -> None:
    """Raise ConfigError if a forward pass does not call an adapted layer; all ranks call this.

    Such an adapter learns nothing, and one to start from changes the model only when it is merged.
    """
    adapted = {name: m for name, m in model.named_modules() if isinstance(m, LoraLinear)}
    called: set[str] = set()
    hooks = [
        layer.register_forward_hook(lambda *_, name=name: called.add(name))
        for name, layer in adapted.items()
    ]
    # Not compiled: the code would keep the hooks, whose removal no guard sees.
    with torch.compiler.set_stance("force_eager"):
        _logits(model, _row(model, device))
    for hook in hooks:
        hook.remove()
    # A router may choose none of the 24 tokens for an expert that is a layer by itself.
    kinds = {_kind(name) for name in called}
    left = {name for name in adapted if _kind(name) not in kinds}
    if not left:
        return
    layers, others = ({_kind(inner(n)) for n in names} for names in (left, {*adapted} - left))
    ends = {name.rpartition(".")[2] for name in layers}
    targets = {name.rpartition(".")[2] for name in others} - ends
    raise ConfigError(
        f"{len(left)} adapters have no effect",
        where="adapter.targets",
        why=f"the model computes with the weights of {', '.join(sorted(layers))} by itself",
        next=f"adapter.targets=[{','.join(sorted(targets))}]" if targets else "adapt other layers",
    )


def _kind(name: str) -> str:
    """Return the name of a layer without its indices."""
    return ".".join(part for part in name.split(".") if not part.isdigit())


@torch.no_grad()
def check_causal(model: Model, device: torch.device) -> str:
    """Raise ConfigError if a token sees a later one; all ranks call this together.

    A model that does learns to copy its targets, and padding would change what is before it.
    Returns the result in words.
    """
    tokens_1T, half = _row(model, device), LENGTH // 2
    difference = _relative(_logits(model, tokens_1T)[:, :half], _logits(model, tokens_1T[:, :half]))
    if not difference <= _tolerance(model):
        raise ConfigError(
            "tokens see later ones",
            where=f"model.family={model.arch.family}",
            why=f"without what follows, logits differ by {difference:.0e}",
            next="use a type of causal models",
        )
    return f"what follows a token, padding too, changes its logits by {difference:.0e}"


@torch.no_grad()
def check_documents(model: Model, device: torch.device) -> str:
    """Raise ConfigError if packed documents see each other; all ranks call this together.

    Returns the result in words.
    """
    tokens_1T, first = _row(model, device), LENGTH * 2 // 3
    ids_1T = (torch.arange(tokens_1T.shape[1], device=device) >= first)[None].long()
    packed = _logits(model, tokens_1T, ids_1T)
    alone = [_logits(model, part) for part in tokens_1T.tensor_split([first], dim=1)]
    difference = _relative(packed, torch.cat(alone, dim=1))
    # With other tokens in the first document, the second must be as it was. Shapes are equal, so
    # this shows what the difference of another order of sums would hide.
    other_1T = torch.where(ids_1T == 0, (tokens_1T + 1) % model.arch.vocab_size, tokens_1T)
    effect = _relative(_logits(model, other_1T, ids_1T)[:, first:], packed[:, first:])
    exact = device.type == "cpu" and _tolerance(model) == TOLERANCE
    if not (difference <= _tolerance(model) and effect <= (UNSEEN if exact else difference)):
        raise ConfigError(
            "documents in one row see each other",
            where=f"model.family={model.arch.family}",
            why=f"logits differ by {max(difference, effect):.0e} from those of the documents alone",
            next="data.packing=none, a sequence for each document; data.mask_documents=false, "
            "which joins them; or, in a model of your own, `context.attend` and "
            "`context.positions`, which keep them apart",
        )
    return f"logits differ by {difference:.0e} from those of documents alone"


def _row(model: Model, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    length = min(LENGTH, model.arch.max_seq_len)
    return torch.randint(model.arch.vocab_size, (1, length), generator=generator).to(device)


def _tolerance(model: Model) -> float:
    # bf16 has three digits.
    return TOLERANCE * (1 if model.head_weight().dtype.itemsize > 2 else 30)


def _relative(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max()) if one.numel() else 0.0


def _logits(model: Model, tokens_BT: Tensor, doc_ids_BT: Tensor | None = None) -> Tensor:
    training = model.training
    model.eval()
    logits = model(tokens_BT, doc_ids_BT=doc_ids_BT)
    model.train(training)
    assert isinstance(logits, Tensor)
    return logits.float()
