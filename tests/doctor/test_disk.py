"""A disk is judged by what it does with a file; what it refuses comes with what to do."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.ranks import on_ranks

from dtt.base.errors import EnvironmentUnfit
from dtt.base.ranks import Ranks
from dtt.doctor import disk
from dtt.mesh.dist import World, start


def test_a_folder_that_works_is_reported_with_its_file_system_and_left_as_it_was(
    tmp_path: Path,
) -> None:
    found = disk.examine(tmp_path / "jobs/not-there-yet")
    asked = ["findmnt", "--noheadings", "--output=FSTYPE", f"--target={tmp_path}"]
    kind = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    assert (found.path, found.kind) == (str(tmp_path), kind)
    assert min(found.free, found.write_mb_s, found.read_mb_s, found.fsync_ms) > 0
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def nobody() -> Iterator[None]:
    """Not root, who may write everywhere."""
    me = os.geteuid()
    os.seteuid(me or 65534)
    yield
    os.seteuid(me)


@pytest.mark.usefixtures("nobody")
def test_a_folder_that_cannot_be_written_is_refused_with_what_to_do() -> None:
    with pytest.raises(EnvironmentUnfit) as caught:
        disk.examine(Path("/usr/jobs"))
    message = str(caught.value)
    assert "the file system does not allow us to write a file" in message
    assert f"where: /usr on node {socket.gethostname()}\n" in message
    assert "specify another folder" in message


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    tmp_path.chmod(0)
    yield tmp_path
    tmp_path.chmod(0o700)


def test_a_folder_without_search_permission_is_refused_too(locked: Path, nobody: None) -> None:
    with pytest.raises(EnvironmentUnfit, match="permission denied"):
        disk.examine(locked / "jobs/run")
    disk.check_shared(start(Ranks(), "cpu"), locked / "jobs/run")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB; files of at most as much where we may not mount one."""
    size = disk.BLOCK * 8
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(tmp_path)]
    if os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0:
        yield tmp_path
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    yield tmp_path
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_reported_with_what_to_do_and_nothing_is_left_on_it(
    small_disk: Path,
) -> None:
    with pytest.raises(EnvironmentUnfit) as caught:
        disk.examine(small_disk)
    message = str(caught.value)
    assert "the file system does not allow us to write a file" in message
    assert "free some space there" in message or "ulimit -f" in message
    assert list(small_disk.iterdir()) == []


def test_a_disk_that_returns_different_data_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(12_345_678)
            file.write(b"\x00\x01\x02\x03")

    monkeypatch.setattr(disk, "forget_cached", damage)
    with pytest.raises(EnvironmentUnfit, match="reads back differently from what was written"):
        disk.examine(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_every_mount_has_its_own_kind() -> None:
    assert disk._kind(Path("/proc/self")) == "proc"
    assert disk._kind(Path("/dev/shm")) == "tmpfs"


def see(world: World, folders: list[Path]) -> str | None:
    """What is said of the folder that each rank takes for the same one."""
    try:
        disk.check_shared(world, folders[world.rank])
    except EnvironmentUnfit as problem:
        return str(problem)
    return None


def test_a_rank_that_does_not_see_the_folder_of_rank_0_is_reported(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    first, second, third = on_ranks(3, see, [tmp_path, tmp_path, other])
    assert first is second is None
    assert third is not None
    assert "rank 2 does not see the files of rank 0" in third
    assert list(tmp_path.iterdir()) == [other]


def test_a_rank_looks_for_the_file_of_rank_0_only_once_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of NFS that looked before would not see it for a minute."""
    missed: set[Path] = set()

    def cached(path: Path) -> bool:
        if path not in missed and not path.exists():
            missed.add(path)
        return path not in missed

    def from_first(own: object) -> object:
        """What rank 0 sends: the name, and then, once the file is there, that it is."""
        if isinstance(own, str):
            return name
        (tmp_path / name).touch()
        return True

    name = "from-rank-0"
    monkeypatch.setattr(disk, "_exists", cached)
    other: Any = SimpleNamespace(first=False, rank=1, from_first=from_first, barrier=lambda: None)
    disk.check_shared(other, tmp_path)
    assert missed == set()
