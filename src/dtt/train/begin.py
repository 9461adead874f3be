"""Warm start: initialisation of a model from the weights of a checkpoint, with a report."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dtt.errors import ConfigError
from dtt.runtime.sharding import Whole, fill, held

EMBED, HEAD = "embed.weight", "head.weight"
BY_ROW = (EMBED, HEAD, "pos_embed.weight")
"""Parameters whose rows are tokens or positions, of which another model may have more or fewer."""


@torch.no_grad()
def take_weights(model: nn.Module, tensors: Mapping[str, Whole], source: str) -> str:
    """Copy the tensors that match in name and shape into `model`; return a report of all tensors.

    If the head is tied in `tensors` only, it is initialised from the embedding; if it is tied in
    `model` only, the head in `tensors` is left out. Where the numbers of tokens or positions
    differ, the rows that both have are copied. New tokens are initialised with the mean of all rows
    in `tensors`, which leaves the probabilities of the others almost unchanged (Hewitt, 2021,
    nlp.stanford.edu/~johnhew/vocab-expansion.html); with random rows the model would prefer new
    tokens. Raise ConfigError if no tensor matches.
    """
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    tensors, report = dict(tensors), []
    if HEAD in parameters and HEAD not in tensors and EMBED in tensors:
        tensors[HEAD] = tensors[EMBED]
        report.append(f"  {HEAD}: begins as the embedding, to which the head is tied there")
    fitting = {name for name, p in parameters.items() if _fits(name, p, tensors.get(name))}
    for name in fitting:
        ours, theirs = parameters[name], tensors[name]
        here, there = len(ours), theirs.shape[0]
        if here == there:
            fill(ours, theirs)
            continue
        line = f"  {name}: {min(here, there)} rows taken, {here} here, {there} there"
        _take_rows(ours, theirs)
        if name in (EMBED, HEAD) and here > there:
            _fill_with_mean(ours, theirs)
            line += "; the others begin as their mean"
        report.append(line)
    rest = [
        f"  {name}: {_shape(parameters.get(name))} here, {_shape(tensors.get(name))} there"
        for name in sorted((parameters.keys() | tensors.keys()) - fitting)
    ]
    if not fitting:
        raise ConfigError(
            f"nothing in {source} fits this model",
            why="\n".join(rest).strip(),
            next="look at init.from",
        )
    count = sum(parameters[name].numel() for name in fitting)
    taken = f"{len(fitting)} of {len(parameters)} tensors, {count / 1e6:.2f}M parameters"
    return "\n".join([f"weights from {source}: {taken}", *sorted(report), *rest])


def _take_rows(ours: Tensor, theirs: Whole) -> None:
    """Copy the rows that both have into this rank's part of `ours`."""
    part = held(ours)
    rows, *others = part.box.slices
    taken = theirs[(slice(rows.start, min(rows.stop, theirs.shape[0])), *others)]
    part.local[: len(taken)] = taken


def _fill_with_mean(ours: Tensor, theirs: Whole) -> None:
    """Set this rank's part of the rows that only `ours` has to the mean row of `theirs`."""
    part = held(ours)
    rows, *others = part.box.slices
    new = part.local[max(0, theirs.shape[0] - rows.start) :]
    if new.numel():
        new[:] = theirs[()].float().mean(0)[tuple(others)]


def _fits(name: str, ours: Tensor, theirs: Whole | None) -> bool:
    if theirs is None:
        return False
    return ours.shape == theirs.shape or (name in BY_ROW and ours.shape[1:] == theirs.shape[1:])


def _shape(tensor: Whole | None) -> str:
    return "none" if tensor is None else str(list(tensor.shape))
