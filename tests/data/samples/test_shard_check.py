"""Token files are verified once while training reads them; a flipped bit ends the run."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from support.running import Dtt
from support.tokenized_conversations import write_conversations

from dtt.base.errors import DamagedError, ExitCode
from dtt.data.samples import shard_check
from dtt.data.samples.shard_check import ShardCheck
from dtt.data.samples.token_shards import Shard, open_files

RUN = [
    "name=t", "model.dim=16", "model.n_layers=2", "model.n_heads=2", "train.precision=fp32",
    "train.steps=6", "train.seq_len=32", "train.micro_batch=8", "train.global_batch_tokens=256",
    "train.eval_every=3", "train.sample_tokens=0", "schedule.warmup=2",
]  # fmt: skip


def flip_a_bit(path: Path) -> None:
    """Flip the lowest bit of a byte in the middle, which leaves a valid id, length or mask."""
    content = bytearray(path.read_bytes())
    content[len(content) // 4 * 2] ^= 1
    path.write_bytes(content)


def shards_of(folder: Path) -> tuple[Shard, ...]:
    return open_files(folder, None, raw_dtype="uint16", end_of_document=None).shards


def wait_for_checks() -> None:
    for thread in threading.enumerate():
        if thread.name == "shard check":
            thread.join()


@pytest.fixture(params=[0, shard_check.AT_ONCE], ids=["in the background", "at once"])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_check, "AT_ONCE", request.param)
    monkeypatch.setattr(shard_check, "PIECE", 1000)  # a file is several of them


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("conversations"))


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_flipped_bit_ends_a_run(dtt: Dtt, tokens: Path, split: str) -> None:
    folder = shutil.copytree(tokens, dtt.folder / "tokens")
    damaged = max(folder.glob(f"{split}-*.bin"), key=lambda path: path.stat().st_size)
    flip_a_bit(damaged)
    # One shard of validation, so that all of training are among those that are checked at once: a
    # run as short as this one may end before the background thread.
    few = ["train.eval_tokens=32"] if split == "train" else []
    done = dtt("train", f"data.tokens={folder}", *RUN, *few, expect=ExitCode.DAMAGED)
    assert str(damaged) in done.stderr
    assert "sha256" in done.stderr
    assert "dtt tokenize" in done.stderr


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("suffix", ["bin", "idx", "mask"])
def test_each_file_of_a_shard_is_checked(conversations: Path, tmp_path: Path, suffix: str) -> None:
    folder = shutil.copytree(conversations, tmp_path / "tokens")
    shards = shards_of(folder)
    damaged = shards[0].path.with_suffix(f".{suffix}")
    flip_a_bit(damaged)
    checks = [ShardCheck(rank, 3) for rank in range(3)]  # one of them has the shard
    caught = []
    for check in checks:
        try:
            check.reads(shards)
            wait_for_checks()
            check.reads([])
        except DamagedError as error:
            caught.append(error)
    assert len(caught) == 1
    assert str(damaged) in str(caught[0])


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("size", [1, 3])
def test_every_file_is_read_once_by_one_rank(
    conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    read: list[Path] = []
    hash_file = shard_check._sha256

    def counted(path: Path) -> str:
        read.append(path)
        return hash_file(path)

    monkeypatch.setattr(shard_check, "_sha256", counted)
    for count in (3, 12):
        read.clear()
        shards = [
            shard
            for i in range(count)
            # Without the records of `dtt tokenize`, as a folder that was downloaded.
            for shard in shards_of(
                shutil.copytree(
                    conversations, tmp_path / f"{count}/{i}", ignore=lambda *_: {".units"}
                )
            )
        ]
        for rank in range(size):
            check = ShardCheck(rank, size)
            for _ in range(2):
                for shard in shards:
                    check.reads([shard])
            wait_for_checks()
        assert len(read) == len(set(read)) == 3 * len(shards)


def test_files_that_were_hashed_before_or_have_no_hash_are_not_read(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = tmp_path / "foreign.bin"
    np.arange(100, dtype=np.uint16).tofile(foreign)
    read: list[Path] = []
    monkeypatch.setattr(shard_check, "_sha256", read.append)
    ShardCheck(0, 1).reads([*shards_of(tokens), *shards_of(foreign)])
    wait_for_checks()
    assert read == []


def test_the_end_of_training_does_not_wait_for_a_check(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(tokens, tmp_path / "tokens")
    shards = shards_of(folder)
    for shard in shards:
        flip_a_bit(shard.path)
    entered, leave = threading.Event(), threading.Event()

    def slow(_: Path) -> str:
        entered.set()
        leave.wait()
        return ""

    monkeypatch.setattr(shard_check, "_sha256", slow)
    monkeypatch.setattr(shard_check, "AT_ONCE", 0)
    before = set(threading.enumerate())  # an earlier test in this process may have left a check
    ShardCheck(0, 1).reads(shards)
    entered.wait()
    (thread,) = (t for t in threading.enumerate() if t.name == "shard check" and t not in before)
    try:
        assert thread.daemon
    finally:
        leave.set()
        thread.join()
