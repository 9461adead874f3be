"""What stays: the newest few; and nothing half-done."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtt.checkpoint import retain, store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folders of four committed steps, one save and one pruning that were interrupted."""
    for name in ("step-000005", "step-000010", "step-000015", "step-1000000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(name)
    for name in (".tmp-step-000020-3", ".tmp-step-000001-pruned"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("half")
    (tmp_path / "step-000005-by-hand").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("keep_last", "left"),
    [
        (1, [1_000_000]),
        (2, [15, 1_000_000]),
        (4, [5, 10, 15, 1_000_000]),
        (9, [5, 10, 15, 1_000_000]),
    ],
)
def test_the_newest_few_stay(folder: Path, keep_last: int, left: list[int]) -> None:
    retain.prune(folder, keep_last)
    assert store.steps(folder) == left
    assert (folder / "step-000005-by-hand").exists()


def test_leftovers_of_interrupted_saves_go_and_nothing_else(folder: Path) -> None:
    retain.sweep_staging(folder)
    assert list(folder.glob(".tmp*")) == []
    assert store.steps(folder) == [5, 10, 15, 1_000_000]
    assert (folder / "step-000005-by-hand").exists()
