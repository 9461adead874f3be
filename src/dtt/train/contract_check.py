"""Checks of a model that its family builds itself, before the first step of a run."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from dtt.base.errors import ConfigError
from dtt.base.log import log
from dtt.mesh.dist import World
from dtt.model.architecture import BuiltArchitecture
from dtt.model.contract import Model
from dtt.model.output import Output

LENGTH = 24
"""Tokens of the row of the comparison, of two documents."""
TOLERANCE = 1e-3
"""Largest difference of the logits of separate documents, relative to the largest logit, in fp32:
kernels sum in another order. Documents that see each other differ by a tenth and more."""


def check_model(model: Model, world: World, *, separate: bool) -> None:
    """Raise ConfigError if a model of a user's own does not keep the contract of `dtt.Model`.

    `separate`: documents of a row must not see each other (`data.mask_documents`). All ranks call
    this together.
    """
    if isinstance(model.arch, BuiltArchitecture):
        for line in model.notes():
            log.info("%s", line)
        check_gradients(model.arch)
        check_documents(model, world, separate=separate)


def check_gradients(arch: BuiltArchitecture) -> None:
    """Raise ConfigError if a parameter of the model gets no gradient.

    DDP would wait for it in the second step, and an optimizer would only let it decay. The passes
    are those of tensors without values, which take no time.
    """
    model = deepcopy(arch.skeleton).to("meta")
    tokens = torch.zeros(1, min(LENGTH, arch.max_seq_len), dtype=torch.long, device="meta")
    try:
        output = model(tokens, tokens, reduction="logits")
        assert isinstance(output, Output)
        named = dict(model.named_parameters())
        total = output.loss.sum() + sum(output.aux.values())
        found: Any = torch.autograd.grad(total, [*named.values()], allow_unused=True)
    except (NotImplementedError, RuntimeError) as error:
        # Such as an operator whose result has a size that depends on values.
        log.info("not checked: gradients of each parameter (%s)", str(error).splitlines()[0])
        return
    pairs = zip(named.items(), found, strict=True)
    left = [n for (n, p), grad in pairs if grad is None and model.role(n, p) != "balance"]
    if left:
        raise ConfigError(
            f"{len(left)} parameters get no gradient, such as {left[0]}",
            where=f"model.family={arch.family}",
            why="`hidden` does not use them",
            next="use them, leave them out, or give them the role `balance` in `role`",
        )


@torch.no_grad()
def check_documents(model: Model, world: World, *, separate: bool) -> None:
    """Raise ConfigError if packed documents see each other; all ranks call this together.

    `separate`: those of the run must not (`data.mask_documents`).
    """
    arch: BuiltArchitecture = model.arch
    length = min(LENGTH, arch.max_seq_len) // 3 * 3
    if not separate or not length:
        return
    generator = torch.Generator().manual_seed(0)
    tokens_1T = torch.randint(arch.vocab_size, (1, length), generator=generator).to(world.device)
    ids_1T = torch.arange(length, device=world.device)[None] // (length // 3) // 2
    training = model.training
    model.eval()
    packed = _logits(model, tokens_1T, ids_1T)
    first = 2 * length // 3
    alone = [_logits(model, part) for part in (tokens_1T[:, :first], tokens_1T[:, first:])]
    model.train(training)
    difference = float((packed - torch.cat(alone, dim=1)).abs().max() / packed.abs().max())
    log.info("separate documents: logits differ by %.0e from those of documents alone", difference)
    # bf16 has three digits.
    if not difference <= TOLERANCE * (1 if model.head_weight().dtype.itemsize > 2 else 30):
        raise ConfigError(
            "documents in one row see each other",
            where=f"model.family={arch.family}",
            why=f"logits differ by {difference:.0e} from those of the documents alone",
            next="data.packing=none, a sequence for each document; data.mask_documents=false, "
            "which joins them; or, in a model of your own, `context.attend` and "
            "`context.positions`, which keep them apart",
        )


def _logits(model: Model, tokens_BT: Tensor, doc_ids_BT: Tensor | None = None) -> Tensor:
    logits = model(tokens_BT, doc_ids_BT=doc_ids_BT)
    assert isinstance(logits, Tensor)
    return logits.float()
