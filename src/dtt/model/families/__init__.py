"""One file per family: its axes, its Hugging Face names, its config both ways. Facts only.
May touch: config. Never torch."""

from __future__ import annotations

from dtt.model.families.base import Family
from dtt.model.families.gpt2 import GPT2
from dtt.model.families.llama import LLAMA

FAMILIES: tuple[Family, ...] = (GPT2, LLAMA)


def get(name: str) -> Family:
    """The family of that name (`model.family` in the config); KeyError if there is none."""
    return {family.name: family for family in FAMILIES}[name]
