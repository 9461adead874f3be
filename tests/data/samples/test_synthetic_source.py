"""Random ids in place of data: a run needs no files, and resumes exactly."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from support.running import Dtt

from dtt.base.errors import ConfigError
from dtt.config.load import resolve
from dtt.data.samples.synthetic_source import SyntheticSource
from dtt.track import jsonl

SIZES = (
    "data.type=synthetic", "data.vocab_size=300", "model.dim=16", "model.n_layers=1",
    "model.n_heads=2", "train.steps=6", "train.seq_len=32", "train.micro_batch=4",
    "train.global_batch_tokens=256", "train.log_every=1", "checkpoint.every=3",
    "checkpoint.keep_last=9", "schedule.warmup=1", "name=t",
)  # fmt: skip


def test_ids_are_uniform_and_depend_on_seed_and_sample_alone() -> None:
    source = SyntheticSource(300, 64, seed=1)
    samples = source.order(10**9, 2000)
    ids = source.read(samples).ids
    assert ids.shape == (2000, 65)
    assert (ids.min(), ids.max()) == (0, 299)
    counts = np.bincount(ids.ravel(), minlength=300)
    assert counts.min() > 0.8 * ids.size / 300
    assert counts.max() < 1.2 * ids.size / 300
    assert np.array_equal(source.read(samples[[5, 3]]).ids, ids[[5, 3]])
    assert len(np.unique(ids, axis=0)) == len(ids)
    assert not np.array_equal(SyntheticSource(300, 64, seed=2).read(samples).ids, ids)
    assert source.counts(samples).targets == 2000 * 64


def test_more_ids_than_rows_of_the_model_are_refused_by_their_key() -> None:
    """Those of the default, too: the rows may be those of the folder that `init.from` names."""
    keys = ("data.type=synthetic", "model.vocab_size=320")
    with pytest.raises(ConfigError, match=r"data\.vocab_size: .*: set data\.vocab_size=320"):
        resolve(None, keys, env={})
    resolve(None, (*keys, "data.vocab_size=320"), env={})


def weights(job: Path) -> str:
    file = job / "checkpoints/step-000006/model-00000.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_run_without_files_trains_resumes_and_is_planned(tmp_path: Path) -> None:
    dtt = Dtt(tmp_path)
    dtt("train", *SIZES)
    losses = [r["loss"] for r in jsonl.read(tmp_path / "jobs/t/metrics.jsonl", "train")]
    assert len(losses) == 6
    first = weights(tmp_path / "jobs/t")
    dtt("train", "jobs/t", "--from-step", 3)
    assert weights(tmp_path / "jobs/t") == first
    assert "parameters" in dtt("plan", *SIZES, "--gpu", "H100").stdout
    assert "synthetic data" in dtt("submit", "train", *SIZES, "name=u", "--dry-run").stdout
