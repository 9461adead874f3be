"""A checkpoint that earlier code wrote is resumed from as if today's had written it.

The folders in written_before/ are step-000003 of a job with `KEYS`, written by the code of
2026-11-25 (dtt-checkpoint-3) and of 0.1.0 (dtt-checkpoint-4).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import dtt

WRITTEN = Path(__file__).with_name("written_before")
KEYS = {
    "name": "six",
    "model": {"dim": 8, "n_layers": 1, "n_heads": 2, "vocab_size": 32},
    "data": {"type": "synthetic", "vocab_size": 32},
    "optim": {"type": "adamw", "lr": 1e-3},
    "train": {
        "steps": 6, "seq_len": 16, "global_batch_tokens": 64, "micro_batch": 2, "eval_every": 0,
        "eval_tokens": 32, "sample_tokens": 0, "precision": "fp32", "device": "cpu",
        "compile": False,
    },
    "checkpoint": {"every": 3},
    "schedule": {"warmup": 0},
}  # fmt: skip


@pytest.mark.parametrize("written", ["dtt-checkpoint-3", "dtt-checkpoint-4"])
def test_a_run_goes_on_from_a_checkpoint_of_an_earlier_format(
    written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dtt.train(dtt.load(KEYS))
    before, after = (Path(f"jobs/six/checkpoints/step-00000{step}") for step in (3, 6))
    whole = after.rename("whole")
    shutil.rmtree(before)
    shutil.copytree(WRITTEN / written, before)
    dtt.train("jobs/six")
    # Bits are those of one CPU; the folders come from another. AdamW turns the last bits of a
    # gradient near zero into up to 4e-7 of a weight; a lost moment moves weights by 1e-4.
    for name, atol in (("model-00000.safetensors", 1e-5), ("state-00000.safetensors", 1e-7)):
        expected, resumed = load_file(whole / name), load_file(after / name)
        assert expected.keys() == resumed.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(resumed[key], tensor, rtol=1e-5, atol=atol, msg=key)
