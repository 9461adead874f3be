"""Checkpoints are whole or not there: killed at any moment, damaged in any way."""

from __future__ import annotations

import ast
import contextlib
import errno
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forked import CONTEXT
from support.ranks import start_process

import dtt
from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import CheckpointManifest
from dtt.base import reading
from dtt.base.errors import ConfigError, DamagedError, DttError, InputError
from dtt.checkpoint import retention, store, tensors
from dtt.checkpoint.store import Checkpoint
from dtt.config.train import CheckpointConfig
from dtt.mesh.sharding import on_every_rank

FACTS = {
    "attempt": 1, "world_size": 1, "config_sha256": "c" * 64, "data_key": "d" * 64,
    "versions": {"dtt": "1.0.0", "torch": "2.13.0"},
}  # fmt: skip


FILES = [
    store.rank_file(store.MODEL, 0), store.rank_file(store.STATE, 0), store.POSITION,
    CheckpointManifest.filename,
]  # fmt: skip


def save(folder: Path, step: int, numbers: int = 100) -> Checkpoint:
    """Write the checkpoint of a step, as the trainer does."""
    staging = folder / store.staging_name(step, 1)
    staging.mkdir(parents=True)
    generator = torch.Generator().manual_seed(step)
    written = [tensors.write_bytes(staging / store.POSITION, [json.dumps({"step": step}).encode()])]
    for name in FILES[:-2]:
        values = {"w": torch.randn(numbers, generator=generator)}
        written.append(tensors.write(staging / name, tensors.cut(on_every_rank(values, 1), 0)))
    return store.commit(staging, written, step=step, **FACTS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of steps 5 and 10."""
    save(tmp_path / "checkpoints", 5)
    save(tmp_path / "checkpoints", 10)
    return tmp_path / "checkpoints"


def newest(folder: Path) -> Checkpoint:
    """The newest checkpoint that passes verification."""
    found = store.newest(folder)
    assert found is not None
    return found


def falls_back(folder: Path, culprit: str, caplog: pytest.LogCaptureFixture) -> bool:
    """Whether step 10 is refused, for `culprit`, and step 5 taken in its place."""
    caplog.clear()
    with pytest.raises((DamagedError, InputError), match=culprit):
        store.verify(folder / "step-000010")
    return newest(folder).step == 5 and culprit in caplog.text


def test_what_was_written_is_read_back(folder: Path) -> None:
    found = newest(folder)
    assert (found.step, found.path) == (10, folder / "step-000010")
    generator = torch.Generator().manual_seed(10)
    assert torch.equal(found.tensors(store.MODEL)["w"], torch.randn(100, generator=generator))
    assert found.position() == {"step": 10}
    assert [f.path for f in found.manifest.files] == sorted(set(FILES) - {"MANIFEST.json"})
    assert store.at_step(folder, 5).step == 5
    assert sorted(p.name for p in folder.iterdir()) == ["step-000005", "step-000010"]


def test_a_file_with_the_name_of_a_checkpoint_stops_neither_a_resume_nor_a_save(
    folder: Path,
) -> None:
    (folder / "step-000012").write_text("../elsewhere/step-000012")
    assert newest(folder).step == 10
    save(folder, 12)
    assert store.steps(folder) == [5, 10, 12]
    assert store.at_step(folder, 12).step == 12


def save_for_ever(folder: Path, done: Connection) -> None:
    """Resume and save as the trainer does; says each step that `commit` promised."""
    retention.sweep_staging(folder)
    last = store.newest(folder)
    for step in count(1 if last is None else last.step + 1):
        store.verify(save(folder, step, numbers=300_000).path)
        done.send(step)
        retention.prune(folder, CheckpointConfig())


def test_after_a_kill_at_any_moment_committed_checkpoints_are_complete(tmp_path: Path) -> None:
    """Processes that save 3.6 MB in a loop are killed -9 at random moments, 7 of them in a save."""
    folder, rng = tmp_path / "checkpoints", random.Random(0)
    promised = torn = 0
    while torn < 7:
        here, there = CONTEXT.Pipe()
        process = start_process(save_for_ever, folder, there)
        there.close()
        promised = here.recv()
        process.join(timeout=rng.uniform(0, 0.06))  # it never ends by itself
        process.kill()
        process.join()
        with contextlib.suppress(EOFError):
            while True:
                promised = here.recv()
        for step in store.steps(folder):
            store.verify(folder / f"step-{step:06d}")
        assert newest(folder).step >= promised
        torn += any(folder.glob(".tmp-*"))
        retention.sweep_staging(folder)
        assert [p.name for p in folder.glob("*") if not p.name.startswith("step-")] == []


def cut_at(share: float, after: int = 0) -> Callable[[Path], None]:
    """Truncate a file after a share of its bytes and some more."""
    return lambda path: os.truncate(path, int(share * path.stat().st_size) + after)


def zero_a_block(path: Path) -> None:
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[:middle] + bytes(len(content[middle : middle + 512])))


def swap(path: Path) -> None:
    """Exchange a file with the next one of its checkpoint."""
    other = path.with_name(FILES[FILES.index(path.name) - 1])
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no byte left": cut_at(0),
    "one byte left": cut_at(0, 1),
    "seven bytes left": cut_at(0, 7),
    "half left": cut_at(0.5),
    "nearly all left": cut_at(0.99),
    "two bytes missing": cut_at(1, -2),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"{"),
    "missing": Path.unlink,
    "of another step": lambda path: shutil.copy(path.parents[1] / "step-000005" / path.name, path),
    "a block zeroed": zero_a_block,
    "swapped": swap,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_found(
    folder: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    DAMAGES[damage](folder / "step-000010" / name)
    # Of two that are swapped, either is named.
    assert falls_back(folder, "step-000010" if damage == "swapped" else name, caplog)


def test_a_folder_renamed_to_another_step_is_found(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "step-000010").rename(folder / "step-000020")
    assert newest(folder).step == 5
    assert "records step 10" in caplog.text


def test_no_line_of_dtt_loads_pickles() -> None:
    forbidden = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    for path in Path(dtt.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Import(names=names):
                    assert not {n.name.split(".")[0] for n in names} & forbidden, path
                case ast.ImportFrom(module=str(module)):
                    assert module.split(".")[0] not in forbidden, path
                case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
                    raise AssertionError(path)


def test_files_that_the_manifest_does_not_name_do_not_belong_to_a_checkpoint(folder: Path) -> None:
    for name in ("notes.txt", ".nfs0000000000c0ffee", store.rank_file(store.MODEL, 1)):
        (folder / "step-000010" / name).write_text("something")
    found = newest(folder)
    assert found.step == 10
    assert list(found.tensors(store.MODEL)) == ["w"]


def test_rejected_checkpoints_are_deleted_after_a_newer_complete_one(folder: Path) -> None:
    """Step 10 is damaged, training goes on from 5 and is stopped at 7: 7 is the newest."""
    (folder / "step-000010" / FILES[0]).write_bytes(b"")
    save(folder, 7)
    retention.prune(folder, CheckpointConfig(keep_last=1))
    assert store.steps(folder) == [7]
    assert newest(folder).step == 7


def test_newer_checkpoints_are_set_aside_with_their_content(folder: Path) -> None:
    [moved] = store.supersede(folder, 5, attempt=3)
    assert moved == folder / "superseded-step-000010-3"
    assert store.steps(folder) == [5]
    save(folder, 10)
    moved.rename(folder / "step-000010.old")
    assert store.verify(folder / "step-000010").step == 10


@pytest.mark.parametrize("times", [2, 10**9])
@pytest.mark.parametrize("name", FILES[:-1])
def test_an_unreadable_header_or_position_rejects_a_checkpoint_unless_a_retry_reads_it(
    folder: Path,
    name: str,
    times: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first `times` attempts to open the file for its header or its JSON fail."""
    bad, really, left = folder / "step-000010" / name, os.open, iter(range(times))

    def fail(path: Any, *how: Any, **more: Any) -> int:
        if path == bad and next(left, None) is not None:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return really(path, *how, **more)

    monkeypatch.setattr(os, "open", fail)
    monkeypatch.setattr(reading, "PATIENCE", (0.0, 0.0))
    if times == 2:
        assert store.verify(folder / "step-000010").step == 10
    else:
        assert falls_back(folder, f"{name} cannot be read", caplog)


def test_the_commit_reaches_the_disk_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Manifest, then the rename, then the folder that holds the new name."""
    done: list[str] = []
    rename, fsync_folder = Path.rename, store.fsync_folder

    def renamed(path: Path, target: Path) -> Path:
        assert (path / CheckpointManifest.filename).exists()
        done.append(f"rename {target.name}")
        return rename(path, target)

    def synced(path: Path) -> None:
        done.append(f"sync {path.name}")
        fsync_folder(path)

    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(store, "fsync_folder", synced)
    save(tmp_path / "checkpoints", 5)
    assert done == ["rename step-000005", "sync checkpoints"]


@pytest.mark.parametrize("links", [True, False])
def test_an_adopted_checkpoint_is_verified_and_outlives_its_first_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:  # as on another file system

        def refuse(*_: object) -> None:
            raise OSError(errno.EXDEV, "cross-device link")

        monkeypatch.setattr(os, "link", refuse)
    found = save(tmp_path / "parent", 5)
    content = {name: (found.path / name).read_bytes() for name in FILES}
    adopted = store.adopt(found, tmp_path / "child")
    shutil.rmtree(tmp_path / "parent")
    assert store.newest(tmp_path / "child") == adopted
    assert {name: (adopted.path / name).read_bytes() for name in FILES} == content
    assert [path.name for path in (tmp_path / "child").iterdir()] == ["step-000005"]


@pytest.mark.parametrize(
    ("reference", "option", "expected"),
    [
        ("a", None, ("a", None)),
        ("a", 5, ("a", 5)),
        ("a@5", None, ("a", 5)),
        ("a@5", 5, ("a", 5)),
        ("a@005", None, ("a", 5)),
        ("a@5", 6, ConfigError("a@5 names another step than 6")),
        ("a@", None, InputError("a@ does not name a step")),
        ("a@x", None, InputError("a@x does not name a step")),
        ("a@-5", None, InputError("a@-5 does not name a step")),
        ("a@²", None, InputError("a@² does not name a step")),
        ("b@2", None, ("b@2", None)),  # a job of this name exists
        ("b@2@3", None, ("b@2", 3)),
    ],
)
def test_a_reference_and_an_option_name_the_same_step(
    reference: str,
    option: int | None,
    expected: tuple[str, int | None] | DttError,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    JobDir(Path("b@2")).root.mkdir()
    JobDir(Path("b@2")).config.touch()
    if isinstance(expected, DttError):
        with pytest.raises(type(expected), match=re.escape(str(expected))):
            store.parse(reference, option)
    else:
        folder, step = store.parse(reference, option)
        assert (str(folder.parent), step) == expected
