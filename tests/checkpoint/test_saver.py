"""Saving beside training: what is written is what was there, and what fails fails on every rank."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import on_ranks
from support.running import TIMEOUT

from dtt.artifacts.jobdir import JobDir
from dtt.base import files, reading
from dtt.base.errors import DiskFull, DttError, StorageError
from dtt.base.ranks import Ranks
from dtt.checkpoint import saver as module
from dtt.checkpoint import store, tensors
from dtt.checkpoint.saver import Saver
from dtt.config.train import CheckpointConfig
from dtt.mesh.dist import World, start
from dtt.mesh.sharding import Placed, on_every_rank, on_this_rank

FACTS = {"config_sha256": "c" * 64, "data_key": "d" * 64, "versions": {"dtt": "1", "torch": "2"}}


def make(folder: Path, world: World, **config: Any) -> Saver:
    job = JobDir(folder)
    job.checkpoints.mkdir(parents=True, exist_ok=True)
    return Saver(job, 1, world, CheckpointConfig(**config), FACTS)


def weights(value: float) -> dict[str, Placed]:
    return on_every_rank({"w": torch.full((1000, 8), value), "b": torch.full((3,), value)})


def state(value: float) -> dict[str, Placed]:
    return on_every_rank({"muon/w/momentum": torch.full((1000, 8), -value)})


def own(rank: int) -> dict[str, Placed]:
    return on_this_rank({f"rng/{rank:05d}/cpu": torch.full((5,), rank, dtype=torch.uint8)})


def save_twice(world: World, folder: Path, asynchronous: bool) -> list[dict[str, Any]]:
    saver = make(folder, world, asynchronous=asynchronous)
    for step in (1, 2):
        params, moments = weights(float(step)), state(float(step))
        saver.begin(step, params, moments | own(world.rank), {"step": step})
        for held in (params | moments).values():
            held.tensor.fill_(99.0)  # training goes on
    saver.wait()
    return [save.record() for save in saver.finished()]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("size", [1, 3])
def test_a_checkpoint_holds_the_state_at_the_start_of_the_save(
    tmp_path: Path, size: int, asynchronous: bool
) -> None:
    for records in on_ranks(size, save_twice, tmp_path, asynchronous):
        assert [r["step"] for r in records] == [1, 2]
        assert all(r["bytes"] == 64012 + 5 * size for r in records)
    for step in (1, 2):
        found = store.at_step(tmp_path / "checkpoints", step)
        assert found.manifest.world_size == size
        assert found.position() == {"step": step}
        expected = {store.MODEL: weights(float(step)), store.STATE: state(float(step))}
        for kind, placed in expected.items():
            held = found.tensors(kind)
            for name, value in placed.items():
                assert torch.equal(held[name], value.tensor), name
        for rank in range(size):
            assert torch.equal(held[f"rng/{rank:05d}/cpu"], own(rank)[f"rng/{rank:05d}/cpu"].tensor)


@pytest.mark.parametrize("done", [1, 3])
def test_host_memory_is_allocated_ahead_of_the_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    """The save uses the memory of the `done` tensors that the thread had allocated by then."""
    saver, threads = make(tmp_path, start(Ranks(), "cpu")), []
    empty, due = torch.empty_like, threading.Event()

    def allocated(tensor: torch.Tensor, **how: Any) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        if len(threads) == done:
            due.set()
            if done < 3:
                assert saver._save_is_due.wait(TIMEOUT)
        return empty(tensor, **how)

    monkeypatch.setattr(torch, "empty_like", allocated)
    saver.allocate(weights(1.0), state(1.0))
    assert due.wait(TIMEOUT)
    for step in (1, 2):
        saver.begin(step, weights(float(step)), state(float(step)), {})
    saver.wait()
    assert threads == ["pinning"] * done + ["MainThread"] * (3 - done)
    assert torch.equal(
        store.at_step(tmp_path / "checkpoints", 2).tensors(store.MODEL)["b"], torch.full((3,), 2.0)
    )


def fail_on_the_last_rank(world: World, folder: Path) -> tuple[str, str, list[int]]:
    saver = make(folder, world)
    saver.begin(1, weights(1.0), state(1.0) | own(world.rank), {})
    saver.wait()
    if world.rank == world.size - 1:
        tensors.write = full  # type: ignore[assignment]
    saver.begin(2, weights(2.0), state(2.0) | own(world.rank), {})
    try:
        saver.wait()
    except DttError as error:
        return type(error).__name__, str(error), store.steps(folder / "checkpoints")
    return "", "", []


def full(path: Path, pieces: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_a_full_disk_on_one_rank_fails_the_save_on_all_and_keeps_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    reported = on_ranks(3, fail_on_the_last_rank, tmp_path)
    assert reported[0] == reported[1] == reported[2]
    name, message, steps = reported[0]
    assert name == "DiskFull"
    assert "no space left on device" in message
    assert "00002.safetensors" in message
    assert steps == [1]
    assert store.verify(tmp_path / "checkpoints/step-000001").step == 1


@pytest.fixture
def alone() -> World:
    return start(Ranks(), "cpu")


def fail_with_a_bug(world: World, folder: Path, asynchronous: bool) -> str:
    saver = make(folder, world, asynchronous=asynchronous)
    position: dict[str, Any] = {"step": 1}
    if world.first:
        position["unexpected"] = object()  # json.dumps raises TypeError
    try:
        saver.begin(1, weights(1.0), state(1.0) | own(world.rank), position)
        saver.wait()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "saved"


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_bug_on_one_rank_ends_the_save_on_all(tmp_path: Path, asynchronous: bool) -> None:
    first, second = on_ranks(2, fail_with_a_bug, tmp_path, asynchronous)
    assert first.startswith("TypeError: Object of type object")
    assert second.startswith("PeerLost: rank 0 failed while it saved a checkpoint")
    assert "TypeError: Object of type object" in second
    assert store.newest(tmp_path / "checkpoints") is None


def test_insufficient_disk_space_is_detected_before_anything_is_written(
    tmp_path: Path, alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = make(tmp_path, alone)
    usage = files.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    saver.begin(1, weights(1.0), state(1.0), {})
    with pytest.raises(DiskFull, match="not enough disk space for the checkpoint of step 1"):
        saver.wait()
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_transient_error_restarts_the_write_of_the_file(
    tmp_path: Path, alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
    fsync = os.fsync

    def flaky(fd: int) -> None:
        code = next(failures, None)
        if code is not None:
            raise OSError(code, os.strerror(code))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", flaky)
    monkeypatch.setattr(reading, "PATIENCE", (0.0, 0.0, 0.0))
    saver = make(tmp_path, alone)
    saver.begin(1, weights(1.0), state(1.0) | own(0), {})
    saver.wait()
    assert next(failures, None) is None
    assert store.at_step(tmp_path / "checkpoints", 1).step == 1


def test_a_save_fails_if_the_read_back_verification_fails(
    tmp_path: Path, alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x01")

    monkeypatch.setattr(module, "forget_cached", damage)
    saver = make(tmp_path, alone)
    saver.begin(1, weights(1.0), state(1.0) | own(0), {})
    with pytest.raises(StorageError, match="read-back verification"):
        saver.wait()


def test_at_most_one_save_is_in_flight(
    tmp_path: Path, alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    going, release = threading.Event(), threading.Event()
    commit = store.commit

    def slow(*arguments: Any, **facts: Any) -> Any:
        going.set()
        release.wait(TIMEOUT)
        return commit(*arguments, **facts)

    monkeypatch.setattr(store, "commit", slow)
    saver = make(tmp_path, alone)
    saver.begin(1, weights(1.0), state(1.0), {})
    assert going.wait(TIMEOUT)  # `begin` has returned, the commit has not
    assert saver.finished() == []
    threading.Timer(0.05, release.set).start()
    saver.begin(2, weights(2.0), state(2.0), {})
    assert [save.step for save in saver.finished()] == [1]
    saver.wait()
    assert store.steps(tmp_path / "checkpoints") == [1, 2]
