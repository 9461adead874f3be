"""Weights from elsewhere, put into a new model: what fits, and a report of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dtt.errors import ConfigError
from dtt.runtime.sharding import Whole, fill, held

EMBED, HEAD = "embed.weight", "head.weight"
BY_ROW = (EMBED, HEAD, "pos_embed.weight")
"""Their rows are tokens or positions, of which another model may have more or fewer."""


@torch.no_grad()
def take_weights(model: nn.Module, tensors: Mapping[str, Whole], source: str) -> str:
    """Copy what fits in name and shape into `model`; returns a report of what did and what not.

    A head that is tied in one of the two alone begins as the embedding, or is left out. Of more or
    fewer tokens or positions those that both have are taken. Tokens that are new begin as the mean
    of all, which leaves the probabilities of the others nearly as they were (Hewitt, 2021,
    nlp.stanford.edu/~johnhew/vocab-expansion.html); with random ones the model would prefer them.
    ConfigError when nothing fits.
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
    """Copy the rows that both have, as far as this process holds them."""
    part = held(ours)
    rows, *others = part.box.slices
    taken = theirs[(slice(rows.start, min(rows.stop, theirs.shape[0])), *others)]
    part.local[: len(taken)] = taken


def _fill_with_mean(ours: Tensor, theirs: Whole) -> None:
    """Set the rows that only we have, as far as this process holds them."""
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
