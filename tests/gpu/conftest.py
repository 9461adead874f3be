"""Tests that need a GPU, and no package that only tests need but pytest: `pytest tests/gpu`."""

from __future__ import annotations

import pytest
import torch


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of this folder."""
    item.add_marker("gpu")
    if not torch.cuda.is_available():
        item.add_marker(pytest.mark.skip(reason="needs a GPU"))
