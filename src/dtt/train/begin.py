"""Weights from elsewhere, put into a new model: what fits, and a report of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dtt.errors import ConfigError

EMBED, HEAD = "embed.weight", "head.weight"
BY_ROW = (EMBED, HEAD, "pos_embed.weight")
"""Their rows are tokens or positions, of which another model may have more or fewer."""


@torch.no_grad()
def take_weights(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> str:
    """Copy what fits in name and shape into `model`; returns a report of what did and what not.

    A head that is tied in one of the two alone begins as the embedding, or is left out. Of more or
    fewer tokens or positions those that both have are taken. Tokens that are new begin as the mean
    of all, which leaves the probabilities of the others nearly as they were (Hewitt, 2021,
    nlp.stanford.edu/~johnhew/vocab-expansion.html); with random ones the model would prefer them.
    ConfigError when nothing fits.
    """
    parameters, tensors, report = dict(model.named_parameters()), dict(tensors), []
    if HEAD in parameters and HEAD not in tensors and EMBED in tensors:
        tensors[HEAD] = tensors[EMBED]
        report.append(f"  {HEAD}: begins as the embedding, to which the head is tied there")
    fitting = {name for name, p in parameters.items() if _fits(name, p, tensors.get(name))}
    for name in fitting:
        ours, theirs = parameters[name], tensors[name]
        rows = min(len(ours), len(theirs))
        ours[:rows] = theirs[:rows]
        if len(ours) == len(theirs):
            continue
        line = f"  {name}: {rows} rows taken, {len(ours)} here, {len(theirs)} there"
        if name in (EMBED, HEAD) and len(ours) > rows:
            ours[rows:] = theirs.float().mean(0)
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


def _fits(name: str, ours: Tensor, theirs: Tensor | None) -> bool:
    if theirs is None:
        return False
    return ours.shape == theirs.shape or (name in BY_ROW and ours.shape[1:] == theirs.shape[1:])


def _shape(tensor: Tensor | None) -> str:
    return "none" if tensor is None else str(list(tensor.shape))
