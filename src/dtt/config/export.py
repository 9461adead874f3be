"""Keys of the Hugging Face model folder that `export` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from dtt.config.base import FREE_MARK, Section, free


class ExportConfig(Section):
    """The exported Hugging Face folder."""

    out: Path | None = free(None)
    """Folder of the export; null: `exports/<name>`."""
    dtype: Literal["fp32", "bf16", "fp16"] = free("bf16")
    """Data type of the exported weights."""
    max_shard_size: str = Field(
        default="5GB", pattern=r"^[1-9][0-9]*(KB|MB|GB)$", json_schema_extra=FREE_MARK
    )
    """Maximum size of one weight file, such as `500MB` or `5GB`."""
    license: str | None = free(None)
    """Licence in the model card, spelled as on the Hub (`mit`, `apache-2.0`); null: none."""
