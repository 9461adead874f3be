"""Tests that need a GPU, and no package that only tests need but pytest: `pytest tests/gpu`.

Those with the fixture `device` also run without a GPU, with `--all`, so that they run at once where
there is one.
"""

from __future__ import annotations

import pytest
import torch


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of this folder."""
    item.add_marker("gpu")
    if not torch.cuda.is_available():
        rehearsed = "device" in getattr(item, "fixturenames", ())
        item.add_marker("slow" if rehearsed else pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture
def device() -> str:
    """The device of a run: a GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"
