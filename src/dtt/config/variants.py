"""Table of dtt's own variants: a new one is a class in its own module, and a line here.

The classes are written as a user's are, and live with what they configure, in packages above this
one. So they are named by strings. Their modules import torch inside functions only, because a
configuration is checked without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Annotated, Any, Union

from pydantic import Field

VARIANTS: Mapping[str, Mapping[str, str]] = {
    "data": {
        "tokens": "dtt.data.samples.kinds:TokensDataConfig",
        "text": "dtt.data.samples.kinds:TextDataConfig",
        "chat": "dtt.data.samples.kinds:ChatDataConfig",
        "preference": "dtt.data.samples.kinds:PreferenceDataConfig",
        "synthetic": "dtt.data.samples.kinds:SyntheticDataConfig",
    },
    "objective": {
        "next_token": "dtt.train.objectives.next_token:NextTokenConfig",
        "dpo": "dtt.train.objectives.dpo:DpoConfig",
    },
    "schedule": {
        "constant": "dtt.optim.lr_curves:ConstantConfig",
        "linear": "dtt.optim.lr_curves:LinearConfig",
        "cosine": "dtt.optim.lr_curves:CosineConfig",
        "inverse-sqrt": "dtt.optim.lr_curves:InverseSqrtConfig",
        "wsd": "dtt.optim.lr_curves:WsdConfig",
    },
    "optim": {
        "muon": "dtt.optim.muon.variant:MuonConfig",
        "adamw": "dtt.optim.adamw:AdamWConfig",
    },
    "model": {"transformers": "dtt.model.library.family:TransformersFamily"},
}
"""The class of each `type` of a section, as MODULE:CLASS."""


def variant(section: str, name: str) -> Any:
    """Return the class of a `type`."""
    module, _, wanted = VARIANTS[section][name].partition(":")
    return getattr(importlib.import_module(module), wanted)


def any_of(section: str) -> Any:
    """Return the annotation of a section that is one of its variants, by its `type`."""
    classes = tuple(variant(section, name) for name in VARIANTS[section])
    return Annotated[Union[classes], Field(discriminator="type")]  # noqa: UP007  of a value
