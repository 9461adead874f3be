"""Warm start: initialisation of a model from the weights of a checkpoint, with a report."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from dtt.base.errors import ConfigError
from dtt.mesh.sharding import FullTensor, fill, local_shard
from dtt.model.contract import Model
from dtt.model.nf4 import Nf4Linear, frozen_weights

EMBED, HEAD = "embed.weight", "head.weight"
BY_ROW = (EMBED, HEAD, "pos_embed.weight")
"""Parameters whose rows are tokens or positions, of which another model may have more or fewer."""


@dataclass(frozen=True)
class NewTokens:
    """The tokens that start afresh in a model whose weights come from a source."""

    added: dict[int, str] = field(default_factory=dict)
    """Tokens that the source's tokenizer lacks, for which its matrices have a row, by id."""
    untrained: dict[int, str] = field(default_factory=dict)
    """Tokens of the source that it never trained."""
    unused: frozenset[int] = frozenset()
    """All rows of the source that no token of its tokenizer has."""

    @property
    def reset(self) -> dict[int, str]:
        """The tokens whose rows in the source mean nothing."""
        return self.added | self.untrained


@torch.no_grad()
def take_weights(
    model: Model,
    tensors: Mapping[str, FullTensor],
    source: str,
    new: NewTokens = NewTokens(),
) -> str:
    """Copy the tensors that match in name and shape into `model`; return a report of all tensors.

    If the head is tied in `tensors` only, it is initialised from the embedding; if it is tied in
    `model` only, the head in `tensors` is left out. Where the numbers of tokens or positions
    differ, the common rows are copied. Rows that `tensors` lack, and those of `new` tokens, are
    initialised with the mean of all trained rows in `tensors`, which leaves the probabilities of
    the others almost unchanged (Hewitt, 2021, nlp.stanford.edu/~johnhew/vocab-expansion.html); with
    random rows the model would prefer new tokens. Raise ConfigError if no tensor matches.
    """
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    if not all(parameter.requires_grad for parameter in parameters.values()):
        return take_base(model, tensors, source, new)
    tensors, report = dict(tensors), []
    if HEAD in parameters and HEAD not in tensors and EMBED in tensors:
        tensors[HEAD] = tensors[EMBED]
        report.append(f"  {HEAD}: initialised from the embedding, to which the head is tied there")
    # Only now: the embedding, which may be the source of the head, is in another stage than it.
    tensors = {name: tensor for name, tensor in tensors.items() if model.holds(name)}
    fitting = {name for name, p in parameters.items() if _fits(name, p, tensors.get(name))}
    for name in fitting:
        ours, theirs = parameters[name], tensors[name]
        here, there = len(ours), theirs.shape[0]
        by_token = name in model.by_token()
        reset = {i: token for i, token in new.reset.items() if by_token and i < min(here, there)}
        if here == there:
            fill(ours, theirs)
        else:
            part = local_shard(ours)
            rows, *others = part.box.slices
            common = theirs[(slice(rows.start, min(rows.stop, there)), *others)]
            part.local[: len(common)] = common
            line = f"  {name}: {min(here, there)} rows copied, {here} here, {there} there"
            report.append(line + "; the others get their mean" * (by_token and here > there))
        if reset or (by_token and here > there):
            _fill_with_mean(ours, theirs, reset.keys(), new.unused)
        if reset:
            report.append(
                f"  {name}: the mean of the other rows for untrained tokens: {_listed(reset)}"
            )
    rest = [
        f"  {name}: {_shape(parameters.get(name))} here, {_shape(tensors.get(name))} there"
        for name in sorted((parameters.keys() | tensors.keys()) - fitting)
    ]
    if not fitting:
        raise ConfigError(
            f"nothing in {source} fits this model",
            why="\n".join(rest).strip(),
            next="check init.from",
        )
    count = sum(parameters[name].numel() for name in fitting)
    copied = f"{len(fitting)} of {len(parameters)} tensors, {count / 1e6:.2f}M parameters"
    return "\n".join([f"weights from {source}: {copied}", *sorted(report), *rest])


@torch.no_grad()
def take_base(
    model: Model,
    tensors: Mapping[str, FullTensor],
    source: str,
    new: NewTokens = NewTokens(),
) -> str:
    """Copy `tensors` into the frozen weights below an adapter; return a report.

    Raises ConfigError unless all of them fit, and if there are added tokens. Nothing is extended or
    left at random: the checkpoints of the adapter refer to these weights, and whoever merges it
    takes them as they are.
    """
    if new.added:
        raise ConfigError(
            f"an adapter cannot add tokens to the model of {source}",
            where="tokenizer.path",
            why=f"their rows there are unused, and stay frozen: {_listed(new.added)}",
            next="use the tokenizer of the model, or train all weights: adapter.type=none",
        )
    frozen = frozen_weights(model)
    tensors = {name: tensor for name, tensor in tensors.items() if model.holds(name)}
    for name in sorted(frozen.keys() | tensors.keys()):
        here, there = _shape(frozen.get(name)), _shape(tensors.get(name))
        if here != there:
            raise ConfigError(
                f"an adapter needs exactly the model of {source}",
                where="init.from",
                why=f"{name} is {here} here, {there} there",
                next="leave out keys of model that differ",
            )
    for name, weight in frozen.items():
        if isinstance(weight, Nf4Linear):
            weight.fill(tensors[name])
        else:
            fill(weight, tensors[name])
    count = sum(prod(weight.shape) for weight in frozen.values())
    report = f"frozen weights from {source}: {count / 1e6:.2f}M parameters"
    if new.untrained:
        tokens = _listed(new.untrained)
        report += f"\n  tokens that were never trained, which the adapter cannot change: {tokens}"
    return report


def _fill_with_mean(
    ours: Tensor, theirs: FullTensor, reset: Collection[int], unused: Collection[int]
) -> None:
    """Set some rows in this rank's part of `ours` to the mean of the trained rows of `theirs`.

    They are those to `reset`, and the rows that only `ours` has. `unused` rows are not trained.
    """
    part = local_shard(ours)
    rows, *others = part.box.slices
    new = range(max(rows.start, theirs.shape[0]), rows.stop)
    here = [i - rows.start for i in (*reset, *new) if rows.start <= i < rows.stop]
    if here and part.local.numel():
        trained = torch.ones(theirs.shape[0], dtype=torch.bool)
        trained[[*{*reset, *unused}]] = False
        part.local[here] = _mean(theirs, trained)[tuple(others)].to(part.local)


def _mean(tensor: FullTensor, chosen: Tensor, rows: int = 4096) -> Tensor:
    """Return the mean of the `chosen` rows; holds only some `rows` of the tensor."""
    total = torch.zeros(tensor.shape[1:], dtype=torch.float64)
    for first in range(0, tensor.shape[0], rows):
        part = tensor[(slice(first, first + rows),)]
        total += part[chosen[first : first + rows]].double().sum(0).cpu()
    return total / chosen.sum()


def _listed(tokens: Mapping[int, str], most: int = 20) -> str:
    """Return tokens with their ids, in the order of the ids."""
    shown = ", ".join(f"{token} ({i})" for i, token in sorted(tokens.items())[:most])
    return shown + f" and {len(tokens) - most} more" * (len(tokens) > most)


def _fits(name: str, ours: Tensor, theirs: FullTensor | None) -> bool:
    if theirs is None:
        return False
    return ours.shape == theirs.shape or (name in BY_ROW and ours.shape[1:] == theirs.shape[1:])


def _shape(tensor: FullTensor | Nf4Linear | None) -> str:
    return "none" if tensor is None else str(list(tensor.shape))
