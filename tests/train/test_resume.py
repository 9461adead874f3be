"""A run resumes bit for bit on any number of ranks: over three or more, sums depend on their order.

`nightly_resume.py` tries more layouts.
"""

from __future__ import annotations

import pytest
from support import resumed
from support.running import Dtt


@pytest.mark.slow(except_for=["replicate=3"])
@pytest.mark.parametrize("layout", ["replicate=3", "shard=3", "replicate=2 shard=3"])
def test_a_restart_changes_no_bit_over_three_or_more_ranks(layout: str, dtt: Dtt) -> None:
    assert resumed.differing(dtt, layout, resumed.FOR_MORE_RANKS) == []
