"""Training from the token files of other programs, as real processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.running import Dtt

from dtt.artifacts.manifests import TokensManifest

Settings = Callable[..., list[str]]


@pytest.fixture(scope="module")
def ids(tokens: Path) -> npt.NDArray[np.uint16]:
    """The training ids of a token folder, in a row."""
    train = [s.stem for s in TokensManifest.read(tokens).shards if s.split == "train"]
    return np.concatenate([np.fromfile(tokens / f"{stem}.bin", np.uint16) for stem in train])


def train(dtt: Dtt, tiny: Settings, tokens: Path, name: str, expect: int = 0) -> str:
    """Train from the file `name`; return what was printed."""
    source = json.dumps([{"path": name, "name": "x"}])
    options = {
        "name": name.split(".")[0], "data.tokens": "null", "data.sources": source,
        "data.tokenizer": tokens / "tokenizer.json", "train.steps": 3, "train.sample_tokens": 0,
    }  # fmt: skip
    return dtt("train", *tiny(**options), expect=expect).stderr


def losses(dtt: Dtt, name: str) -> list[float]:
    lines = (dtt.folder / "jobs" / name / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if record["kind"] == "train"]


@pytest.mark.slow
def test_every_format_trains_like_raw_ids(dtt: Dtt, tiny: Settings, tokens: Path, ids: Any) -> None:
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(ids)
    ids.tofile(dtt.folder / "bare.bin")
    (dtt.folder / "llmc.bin").write_bytes(header.tobytes() + ids.tobytes())
    np.save(dtt.folder / "numpy.npy", ids.astype(np.int64))
    for name in ("bare.bin", "llmc.bin", "numpy.npy"):
        train(dtt, tiny, tokens, name)
    assert len(losses(dtt, "bare")) == 3
    assert losses(dtt, "bare") == losses(dtt, "llmc") == losses(dtt, "numpy")
