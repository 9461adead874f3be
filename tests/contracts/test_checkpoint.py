"""Checkpoints: stored formats load, and damage is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dtt.artifacts.manifest import fingerprint, manifest_text
from dtt.artifacts.manifests import CheckpointManifest, sealed
from dtt.base.errors import DamagedError
from dtt.checkpoint import store, tensors
from dtt.checkpoint.store import Checkpoint
from dtt.mesh.sharding import on_every_rank

FACTS: dict[str, Any] = {"config_sha256": "c" * 64, "data_key": "d" * 64, "versions": {}}
MANIFEST = CheckpointManifest.filename
WEIGHTS = {"w": torch.arange(4.0)}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A checkpoint of one tensor."""
    staging = tmp_path / store.staging_name(3, 1)
    staging.mkdir()
    shards = tensors.cut(on_every_rank(WEIGHTS, 1), 0)
    written = [
        tensors.write(staging / store.rank_file(store.MODEL, 0), shards),
        tensors.write_bytes(staging / store.POSITION, [b'{"step": 3}']),
    ]
    return store.commit(staging, written, step=3, attempt=1, world_size=1, **FACTS).path


def test_every_flipped_byte_is_found(small: Path) -> None:
    for path in sorted(small.iterdir()):
        whole = path.read_bytes()
        for i, byte in enumerate(whole):
            path.write_bytes(whole[:i] + bytes([byte ^ (1 << i % 8)]) + whole[i + 1 :])
            with pytest.raises(DamagedError):
                store.verify(small)
        path.write_bytes(whole)
    assert store.verify(small).step == 3


def content_of(small: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((small / MANIFEST).read_text())
    content.pop("seal")
    return content


def test_checkpoints_of_the_format_before_load_and_their_damage_is_found(small: Path) -> None:
    """Its seal is a hash of the values."""
    content = content_of(small) | {"format": "dtt-checkpoint-3"}
    del content["base"]
    text = manifest_text(content | {"seal": fingerprint(content)})
    (small / MANIFEST).write_text(text)
    assert torch.equal(store.verify(small).tensors(store.MODEL)["w"], WEIGHTS["w"])
    for i, letter in enumerate(text):
        (small / MANIFEST).write_text(text[:i] + chr(ord(letter) ^ 1) + text[i + 1 :])
        with pytest.raises(DamagedError):
            store.verify(small)


def test_optional_fields_may_be_absent_or_unknown(small: Path) -> None:
    content = content_of(small)
    del content["base"]
    (small / MANIFEST).write_text(sealed(content | {"added_later": [1]}))
    assert store.verify(small).base() is None
    (small / MANIFEST).write_text(sealed(content | {"format": "dtt-checkpoint-5"}))
    with pytest.raises(DamagedError, match="format"):
        store.verify(small)


def test_a_base_that_is_another_checkpoint_by_now_is_refused(small: Path) -> None:
    base = store.verify(small)
    above = Checkpoint(
        small, base.manifest.model_copy(update={"base": base.reference(), "step": 4})
    )
    found = above.base()
    assert found is not None
    assert found.path == small
    (small / MANIFEST).write_text(sealed(content_of(small) | {"attempt": 2}))
    with pytest.raises(DamagedError, match="builds on another checkpoint"):
        above.base()
