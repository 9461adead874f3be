"""Several ranks of NCCL that share one GPU; without a GPU, two ranks of Gloo."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> str:
    """The device of all ranks."""
    return "cuda:0" if torch.cuda.is_available() else "cpu"
