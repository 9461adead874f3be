"""Model families, one file each: architecture options, weight names, config.json conversion."""

from __future__ import annotations

from dtt.model.families.base import DecoderFamily
from dtt.model.families.dots1 import DOTS1
from dtt.model.families.gemma3 import GEMMA3
from dtt.model.families.gpt2 import GPT2
from dtt.model.families.llama import LLAMA
from dtt.model.families.mistral import MISTRAL
from dtt.model.families.mixtral import MIXTRAL
from dtt.model.families.olmo2 import OLMO2
from dtt.model.families.olmo3 import OLMO3
from dtt.model.families.olmoe import OLMOE
from dtt.model.families.phi3 import PHI3
from dtt.model.families.qwen2 import QWEN2
from dtt.model.families.qwen3 import QWEN3
from dtt.model.families.qwen3_moe import QWEN3_MOE
from dtt.model.families.smollm3 import SMOLLM3

FAMILIES: tuple[DecoderFamily, ...] = (
    GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA3, PHI3, SMOLLM3, OLMO2, OLMO3,
    MIXTRAL, QWEN3_MOE, OLMOE, DOTS1,
)  # fmt: skip


def get(name: str) -> DecoderFamily:
    """Return the family with that name (`model.family` in the config).

    Raises KeyError if there is none.
    """
    return {family.name: family for family in FAMILIES}[name]
