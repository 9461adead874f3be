"""Exports of models that transformers computes: the library writes its own format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from dtt.base.errors import DamagedError
from dtt.hf.library_folder import loaded
from dtt.hf.verify import differing_logits


@torch.inference_mode()
def write(model: Any, folder: Path, dtype: torch.dtype, max_shard_size: str) -> None:
    """Write weights and config.json of a `LibraryModel` as the library does."""
    for name, parameter in model.named_parameters():
        # Rounded, a correction of the choice of experts sends most tokens to other experts.
        if name not in model.kept_buffers:
            parameter.data = parameter.data.to(dtype)
    settings: Any = transformers.utils.logging
    settings.disable_progress_bar()
    library = model.library
    if model.tied:
        library.tie_weights()
    library.config.dtype = dtype
    library.save_pretrained(folder, max_shard_size=max_shard_size)


@torch.inference_mode()
def check(model: Any, folder: Path, ids_T: Tensor) -> float:
    """Return the largest difference of a logit, in fp32, between a model and its export.

    Raises DamagedError if it exceeds rounding, or if a weight is missing.
    """
    model.float()
    library, report = loaded(folder, torch.float32)
    if any(report.values()):
        raise DamagedError(f"the export in {folder} is not complete", why=str(report))
    return differing_logits(
        folder, model(ids_T[None]), library(ids_T[None], use_cache=False).logits
    )
