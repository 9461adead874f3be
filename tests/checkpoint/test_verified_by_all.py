"""All ranks verify the checkpoint to resume from together, and each file is read by one of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import on_ranks

from dtt.artifacts.manifest import FileRecord
from dtt.checkpoint import header, store, tensors, verified_by_all
from dtt.checkpoint.tensors import TensorShard
from dtt.mesh.dist import World

WEIGHT = torch.arange(24.0).view(8, 3)
WRITERS = 4
FACTS = {
    "attempt": 1, "world_size": WRITERS, "config_sha256": "c" * 64, "data_key": "d" * 64,
    "versions": {"dtt": "1.0.0", "torch": "2.13.0"},
}  # fmt: skip


def save(folder: Path, step: int, *, gap: bool = False) -> Path:
    """Save WEIGHT as four ranks do, two rows each; with a `gap` the last rank lacks a row."""
    staging = folder / store.staging_name(step, 1)
    staging.mkdir(parents=True)
    written = [tensors.write_bytes(staging / store.POSITION, [json.dumps({"step": step}).encode()])]
    for rank in range(WRITERS):
        rows = WEIGHT[2 * rank : 2 * rank + (1 if gap and rank == WRITERS - 1 else 2)] + step
        for kind in (store.MODEL, store.STATE):
            shard = TensorShard("w", rows, (2 * rank, 0), tuple(WEIGHT.shape))
            written.append(tensors.write(staging / store.rank_file(kind, rank), [shard]))
    return store.commit(staging, written, step=step, **FACTS).path


def resumed(world: World, folder: Path) -> tuple[int | None, list[str], list[str], Any]:
    """The step that this rank resumes from, the files it hashed and opened, and a row of WEIGHT."""
    hashed: list[str] = []
    read: list[str] = []
    compare, opened = store.verify_file, header.opened

    def note_hashed(path: Path, record: FileRecord) -> None:
        hashed.append(record.path)
        compare(path, record)

    def note_opened(path: Path, framework: Any) -> Any:
        read.append(path.name)
        return opened(path, framework)

    # This process ends with the function.
    store.verify_file = note_hashed
    found = verified_by_all.find(world, lambda verify: store.newest(folder, verified=verify))
    if found is None:
        return None, hashed, read, None
    header.opened = note_opened
    row = 2 * world.rank
    values = found.stored(store.MODEL)["w"][row : row + 1, :]
    # Not a tensor: its memory would end with this process.
    return found.step, hashed, read, values.tolist()


def test_each_file_is_read_by_one_rank_and_each_rank_opens_only_what_it_needs(
    tmp_path: Path,
) -> None:
    path = save(tmp_path, 10)
    ranks = on_ranks(2, resumed, tmp_path)
    files = sorted(file.path for file in store.verify(path).manifest.files)
    assert sorted(name for _, hashed, _, _ in ranks for name in hashed) == files
    for rank, (step, hashed, read, values) in enumerate(ranks):
        assert step == 10
        assert len(hashed) in (len(files) // 2, len(files) // 2 + 1)
        assert read == [store.rank_file(store.MODEL, rank)]
        assert values == (WEIGHT[2 * rank : 2 * rank + 1] + 10).tolist()


@pytest.mark.parametrize("damaged", [store.rank_file(store.MODEL, rank) for rank in range(WRITERS)])
def test_all_ranks_fall_back_together_whichever_of_them_finds_the_damage(
    tmp_path: Path, damaged: str
) -> None:
    save(tmp_path, 5)
    file = save(tmp_path, 10) / damaged
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    assert [step for step, *_ in on_ranks(2, resumed, tmp_path)] == [5, 5]


@pytest.mark.parametrize("saved", [True, False])
def test_without_a_complete_checkpoint_no_rank_resumes_from_it(tmp_path: Path, saved: bool) -> None:
    """Such as one that lacks elements, although all hashes are right."""
    if saved:
        save(tmp_path, 5)
        save(tmp_path, 10, gap=True)
    assert [step for step, *_ in on_ranks(2, resumed, tmp_path)] == [5 if saved else None] * 2
