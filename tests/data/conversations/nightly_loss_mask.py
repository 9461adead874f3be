"""Loss masks with each public chat template: two minutes. pytest runs it only when it is named:
`./env.sh pytest -n 0 -s tests/data/conversations/nightly_loss_mask.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.chat_shapes import with_tokens
from support.public_masks import (
    check_that_masks_are_derived,
    check_that_masks_equal_those_of_trl,
)


@pytest.fixture(scope="module")
def gpt2(shared: Path) -> bytes:
    return with_tokens(shared / "data/tokenizers/gpt2")


def test_masks_are_derived_for_nearly_all_pairs(gpt2: bytes) -> None:
    check_that_masks_are_derived(gpt2, every=1)


def test_masks_equal_those_of_trl(gpt2: bytes) -> None:
    check_that_masks_equal_those_of_trl(gpt2, every=1)
