"""Warm start: initialisation of a model from the weights of a checkpoint, with a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dtt.base.errors import ConfigError
from dtt.mesh.sharding import FullTensor, fill, local_shard
from dtt.model.decoder import Decoder

EMBED, HEAD = "embed.weight", "head.weight"
BY_ROW = (EMBED, HEAD, "pos_embed.weight")
"""Parameters whose rows are tokens or positions, of which another model may have more or fewer."""


@torch.no_grad()
def take_weights(
    model: Decoder,
    tensors: Mapping[str, FullTensor],
    source: str,
    untrained: Mapping[int, str] | None = None,
) -> str:
    """Copy the tensors that match in name and shape into `model`; return a report of all tensors.

    If the head is tied in `tensors` only, it is initialised from the embedding; if it is tied in
    `model` only, the head in `tensors` is left out. Where the numbers of tokens or positions
    differ, the common rows are copied. New tokens, and the `untrained` ones (id and string)
    of `tensors`, are initialised with the mean of all other rows in `tensors`, which leaves the
    probabilities of the others almost unchanged (Hewitt, 2021,
    nlp.stanford.edu/~johnhew/vocab-expansion.html); with random rows the model would prefer new
    tokens. Raise ConfigError if no tensor matches.
    """
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    if not all(parameter.requires_grad for parameter in parameters.values()):
        return take_base(model, tensors, source, untrained)
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
        by_token = name in (EMBED, HEAD)
        reset = {i: token for i, token in (untrained or {}).items() if by_token and i < there}
        if here == there:
            fill(ours, theirs)
        else:
            _take_rows(ours, theirs)
            line = f"  {name}: {min(here, there)} rows copied, {here} here, {there} there"
            report.append(line + "; the others get their mean" * (by_token and here > there))
        if reset or (by_token and here > there):
            _fill_with_mean(ours, theirs, sorted(reset))
        if reset:
            names = ", ".join(f"{token} ({i})" for i, token in sorted(reset.items()))
            report.append(f"  {name}: the mean of the other rows for untrained tokens: {names}")
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
    model: Decoder,
    tensors: Mapping[str, FullTensor],
    source: str,
    untrained: Mapping[int, str] | None = None,
) -> str:
    """Copy `tensors` into the frozen weights below an adapter; return a report.

    Raises ConfigError unless all of them fit. Nothing is extended or left at random: the
    checkpoints of the adapter refer to these weights, and whoever merges it takes them as they are.
    """
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
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
    for name, parameter in frozen.items():
        fill(parameter, tensors[name])
    count = sum(parameter.numel() for parameter in frozen.values())
    report = f"frozen weights from {source}: {count / 1e6:.2f}M parameters"
    if untrained:
        tokens = ", ".join(untrained.values())
        report += f"\n  tokens that were never trained, which the adapter cannot change: {tokens}"
    return report


def _take_rows(ours: Tensor, theirs: FullTensor) -> None:
    """Copy the rows that both tensors have into this rank's part of `ours`."""
    part = local_shard(ours)
    rows, *others = part.box.slices
    copied = theirs[(slice(rows.start, min(rows.stop, theirs.shape[0])), *others)]
    part.local[: len(copied)] = copied


def _fill_with_mean(ours: Tensor, theirs: FullTensor, untrained: Sequence[int]) -> None:
    """Set some rows in this rank's part of `ours` to the mean of the trained rows of `theirs`.

    They are the `untrained` rows of `theirs`, and the rows that only `ours` has.
    """
    part = local_shard(ours)
    rows, *others = part.box.slices
    new = range(max(rows.start, theirs.shape[0]), rows.stop)
    reset = [i - rows.start for i in (*untrained, *new) if rows.start <= i < rows.stop]
    if reset and part.local.numel():
        trained = torch.ones(theirs.shape[0], dtype=torch.bool)
        trained[list(untrained)] = False
        mean = theirs[()].float()[trained].mean(0)
        part.local[reset] = mean[tuple(others)].to(part.local)


def _fits(name: str, ours: Tensor, theirs: FullTensor | None) -> bool:
    if theirs is None:
        return False
    return ours.shape == theirs.shape or (name in BY_ROW and ours.shape[1:] == theirs.shape[1:])


def _shape(tensor: FullTensor | None) -> str:
    return "none" if tensor is None else str(list(tensor.shape))
