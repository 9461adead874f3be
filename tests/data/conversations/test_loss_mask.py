from __future__ import annotations

from pathlib import Path

import pytest
from support.chat_shapes import with_tokens
from support.public_masks import (
    check_that_masks_are_derived,
    check_that_masks_equal_those_of_trl,
)

EVERY = 4
"""Interval of the templates to test; nightly_loss_mask.py tests each."""


@pytest.fixture(scope="module")
def gpt2(shared: Path) -> bytes:
    return with_tokens(shared / "data/tokenizers/gpt2")


@pytest.mark.slow
def test_masks_are_derived_for_nearly_all_pairs_of_public_templates_and_shapes(
    gpt2: bytes,
) -> None:
    check_that_masks_are_derived(gpt2, EVERY)


@pytest.mark.slow
def test_masks_equal_those_of_trl_except_for_argued_classes(gpt2: bytes) -> None:
    check_that_masks_equal_those_of_trl(gpt2, EVERY)
