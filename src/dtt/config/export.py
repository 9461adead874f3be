"""The released checkpoint: what `export` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from dtt.config.base import FREE_MARK, Section, free


class ExportConfig(Section):
    """The Hugging Face folder."""

    out: Path | None = free(None)
    """Folder of the export; null: `exports/<name>`."""
    dtype: Literal["fp32", "bf16", "fp16"] = free("bf16")
    """Number format of the exported weights."""
    max_shard_size: str = Field(
        default="5GB", pattern=r"^[1-9][0-9]*(KB|MB|GB)$", json_schema_extra=FREE_MARK
    )
    """Weights are cut into files of at most this size, such as `500MB` or `5GB`."""
    license: str | None = free(None)
    """Licence named in the model card, as the Hub spells it (`mit`, `apache-2.0`); null: none."""
