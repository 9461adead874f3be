"""Combinations of features, verified: two minutes. pytest runs it only when it is named:
`./env.sh pytest -n 0 -s tests/verify/nightly_combinations.py`. CI has random ones.
"""

from __future__ import annotations

import json

import pytest
from support import verify_faults
from support.running import Dtt

COMBINATIONS = {
    "growing contexts": "data.eod_mask_loss=true train.context_schedule=[[0,512],[1,1024]] "
    "train.ema_decay=0.9 parallel.context=2",
    "adapter": f"{verify_faults.LORA} data.type=chat parallel.shard=2",
    "preferences": f"{verify_faults.DPO} optim.type=adamw parallel.shard=2",
}


@pytest.mark.parametrize("kind", COMBINATIONS)
def test_two_ranks_compute_what_one_process_does(kind: str, dtt: Dtt) -> None:
    keys = f"{COMBINATIONS[kind]} parallel.replicate=1".split()
    (found,) = json.loads(dtt("verify", "--json", *keys).stdout)
    assert found["verified"]
    (layout,) = found["layouts"]
    assert layout["noise"]["G"] < 1e-12
    assert layout["noise"]["U"] < 1e-11
    assert set(layout["noise"]) == set("DLGNURSX")
