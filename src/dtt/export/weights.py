"""Conversion between dtt's and Hugging Face's state dicts: renaming, stacking and transposition."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from dtt.errors import DamagedError
from dtt.model import families
from dtt.model.architecture import Architecture
from dtt.model.decoder import Decoder

HEAD = "lm_head.weight"
# Buffers that older versions of transformers saved with the weights; they are not trained.
NOT_WEIGHTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


def to_hf(state: Mapping[str, Tensor], arch: Architecture) -> dict[str, Tensor]:
    """Convert the state dict of a Decoder to that of the family's transformers class.

    A tied head is left out.
    """
    rules = list(families.get(arch.family).weight_rules(arch))
    _compare((name for rule in rules for name in rule.ours), state, "the checkpoint")
    tensors = {}
    for rule in rules:
        stacked = torch.cat([state[name] for name in rule.ours])
        tensors[rule.theirs] = stacked.T.contiguous() if rule.transpose else stacked
    return tensors


def from_hf(tensors: Mapping[str, Tensor], arch: Architecture) -> dict[str, Tensor]:
    """Convert the state dict of the family's transformers class to that of a Decoder.

    The state dict of its base class, whose names lack the prefix, is accepted as well; the released
    GPT-2 is one. Raises DamagedError if names, shapes or dtypes do not match `arch`.
    """
    rules = list(families.get(arch.family).weight_rules(arch))
    base = f"{rules[0].theirs.split('.')[0]}."
    if not any(name.startswith(base) for name in tensors):
        tensors = {n if n == HEAD else f"{base}{n}": t for n, t in tensors.items()}
    tied = {HEAD} if arch.tie_embeddings else set()
    embed = tensors.get(rules[0].theirs)
    if tied & tensors.keys() and embed is not None and not torch.equal(tensors[HEAD], embed):
        raise _unlike("the Hugging Face folder", f"the head is tied, but {HEAD} is another matrix")
    given = [name for name in tensors if not name.endswith(NOT_WEIGHTS) and name not in tied]
    with torch.device("meta"):
        expected = to_hf(Decoder(arch).state_dict(), arch)
    _compare(expected, given, "the Hugging Face folder")
    for name, tensor in expected.items():
        if tensors[name].shape != tensor.shape:
            raise _unlike(
                "the Hugging Face folder",
                f"{name} is {list(tensors[name].shape)}, not {list(tensor.shape)}",
            )
        if not tensors[name].is_floating_point():
            raise _unlike("the Hugging Face folder", f"{name} is {tensors[name].dtype}")
    state: dict[str, Tensor] = {}
    for rule in rules:
        stacked = tensors[rule.theirs]
        parts = (stacked.T if rule.transpose else stacked).chunk(len(rule.ours))
        state |= {name: part.contiguous() for name, part in zip(rule.ours, parts, strict=True)}
    return state


def _compare(expected: Iterable[str], given: Iterable[str], where: str) -> None:
    expected, given = set(expected), set(given)
    if expected != given:
        missing, extra = sorted(expected - given), sorted(given - expected)
        raise _unlike(
            where, f"{len(missing)} missing {missing[:3]}, {len(extra)} unknown {extra[:3]}"
        )


def _unlike(where: str, why: str) -> DamagedError:
    return DamagedError(
        f"the weights in {where} are not those that its configuration describes", why=why
    )
