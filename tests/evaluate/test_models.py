"""Hugging Face folders as models to evaluate: what identifies their weights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dtt.evaluate.models import folder_model

TIME = 10**18


def identity(folder: Path, content: bytes) -> str:
    """The identity of a folder whose weights are `content`, and have always the same time."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    path.write_bytes(content)
    os.utime(path, ns=(TIME, TIME))
    return folder_model(str(folder), folder).identity()


@pytest.mark.parametrize("other", ["a/model", "b/model"], ids=["replaced", "other_folder"])
def test_weights_of_the_same_size_and_time_are_told_apart(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = identity(tmp_path / "a/model", b"one")
    assert identity(tmp_path / other, b"two") != first
    assert identity(tmp_path / "a/model", b"one") == first
