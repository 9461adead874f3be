"""Keys of the Hugging Face model folder that `export` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from dtt.config.base import RESUMABLE, Section, resumable


class ExportConfig(Section):
    """The exported Hugging Face folder."""

    out: Path | None = resumable(None)
    """Folder of the export; null: `exports/<name>`."""
    dtype: Literal["fp32", "bf16", "fp16"] = resumable("bf16")
    """Data type of the exported weights."""
    max_shard_size: str = Field(
        default="5GB", pattern=r"^[1-9][0-9]*(KB|MB|GB)$", json_schema_extra=RESUMABLE
    )
    """Maximum size of one weight file, such as `500MB` or `5GB`."""
    license: str | None = resumable(None)
    """Licence in the model card, spelled as on the Hub (`mit`, `apache-2.0`); null: none."""
