"""Checkpoints whose seal matches and whose content dtt never wrote: refused in one message, and the
checkpoint before is taken. Nothing is executed, nothing outside is touched, nothing hangs."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.running import Dtt

from dtt.artifacts.manifest import FileRecord
from dtt.artifacts.manifests import CheckpointManifest, sealed
from dtt.base.errors import DamagedError, ExitCode
from dtt.base.files import sha256_file
from dtt.checkpoint import store
from dtt.train.state import check_position

MODEL, STATE = store.rank_file(store.MODEL, 0), store.rank_file(store.STATE, 0)
MANIFEST = CheckpointManifest.filename
SETTINGS = {
    "train__ema_decay": 0.9, "guard__spike": "skip",
    "checkpoint__keep_last": 9, "train__steps": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., list[str]]) -> Path:
    """A folder with a real job: checkpoints of steps 4 and 8, with all kinds of state."""
    folder = tmp_path_factory.mktemp("trained")
    Dtt(folder)("train", *tiny(**SETTINGS))
    return folder


@pytest.fixture
def job(trained: Path, tmp_path: Path) -> Path:
    """A copy of that job."""
    shutil.copytree(trained / "jobs", tmp_path / "jobs")
    return tmp_path / "jobs/t"


def newest(job: Path) -> Path:
    return job / "checkpoints/step-000008"


def seal(folder: Path, **changes: Any) -> None:
    """Write a manifest that vouches for the files as they are now; `changes` of its fields."""
    content = json.loads((folder / MANIFEST).read_text())
    content.pop("seal")
    for record in content["files"]:
        path = folder / record["path"]
        record |= {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    content |= changes
    write_manifest(folder, content)


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    (folder / MANIFEST).write_text(sealed(content))


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def write_header(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def edit_header(name: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        header, data = header_of(folder / name)
        change(header)
        write_header(folder / name, header, data)

    return apply


def edit_position(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        position = json.loads((folder / store.POSITION).read_text())
        change(position)
        (folder / store.POSITION).write_text(json.dumps(position))

    return apply


class Bomb:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, ("went-off",)


def a_pickle(folder: Path) -> None:
    torch.save({"w": Bomb()}, folder / MODEL)


def a_bare_pickle(folder: Path) -> None:
    (folder / STATE).write_bytes(pickle.dumps(Bomb()))


def a_header_of_2_to_the_60(folder: Path) -> None:
    content = (folder / MODEL).read_bytes()
    (folder / MODEL).write_bytes((2**60).to_bytes(8, "little") + content[8:])


def overlapping(header: dict[str, Any]) -> None:
    one, two = [e for n, e in header.items() if n != "__metadata__"][:2]
    shift = two["data_offsets"][0] - one["data_offsets"][0]
    two["data_offsets"] = [n - shift for n in two["data_offsets"]]


def first(header: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = next(e for n, e in header.items() if n != "__metadata__")
    return entry


def pieces(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header.update(__metadata__={"pieces": value})


def piece(offset: int, size: int) -> Callable[[dict[str, Any]], None]:
    """Let the first tensor be a piece of a larger one."""

    def change(header: dict[str, Any]) -> None:
        name = next(n for n in header if n != "__metadata__")
        axes = len(header[name]["shape"])
        part = {"offset": [offset] * axes, "shape": [size] * axes}
        header["__metadata__"] = {"pieces": json.dumps({name: part})}

    return change


def deep(folder: Path) -> None:
    (folder / store.POSITION).write_bytes(b"[" * 100_000 + b"]" * 100_000)


CONTENT: dict[str, Callable[[Path], None]] = {
    "a zip with a pickle as weights": a_pickle,
    "a pickle as optimizer state": a_bare_pickle,
    "a header of 2^60 bytes": a_header_of_2_to_the_60,
    "no bytes": lambda folder: (folder / MODEL).write_bytes(b""),
    "overlapping offsets": edit_header(MODEL, overlapping),
    "negative offsets": edit_header(MODEL, lambda h: first(h).update(data_offsets=[-8, 8])),
    "an offset of 2^70": edit_header(MODEL, lambda h: first(h).update(data_offsets=[0, 2**70])),
    "an unknown dtype": edit_header(MODEL, lambda h: first(h).update(dtype="F1024")),
    "a dtype that no checkpoint has": edit_header(STATE, lambda h: first(h).update(dtype="C64")),
    "a shape of words": edit_header(MODEL, lambda h: first(h).update(shape=["a"])),
    "a negative shape": edit_header(MODEL, lambda h: first(h).update(shape=[-1, -256])),
    "pieces that are no JSON": edit_header(MODEL, pieces("{")),
    "pieces that are a list": edit_header(MODEL, pieces("[1]")),
    "pieces that are a number": edit_header(MODEL, pieces(7)),
    "pieces nested deeply": edit_header(MODEL, pieces("[" * 100_000)),
    "pieces of other tensors": edit_header(MODEL, pieces('{"x": {"offset": [0], "shape": [1]}}')),
    "a piece outside of its tensor": edit_header(MODEL, piece(2**61, 2**62)),
    "a piece of a tensor of 2^80 elements": edit_header(MODEL, piece(0, 2**40)),
    "a header that is a list": lambda folder: write_header(folder / MODEL, [1], b""),
    "a position nested deeply": deep,
    "a position without its step": edit_position(lambda p: p.pop("step")),
    "a position of another step": edit_position(lambda p: p.update(step=7)),
    "a ledger that is no number": edit_position(lambda p: p.update(ledger="zz")),
    "sources that are a list": edit_position(lambda p: p.update(sources=[1])),
    "a run id of None": edit_position(lambda p: p.update(run_id=None)),
    "a number of trained steps of None": edit_position(lambda p: p.update(trained=None)),
    "half a surrogate pair": edit_position(lambda p: p.update(run_id="\ud800")),
}


def falls_back(job: Path, culprit: str, most: int, caplog: pytest.LogCaptureFixture) -> None:
    """A resume takes step 4, names what is wrong with step 8, and needs at most so many kB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = store.newest(job / "checkpoints", check_position)
    assert found is not None
    assert found.step == 4
    assert culprit in caplog.text
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < most


@pytest.mark.parametrize("change", CONTENT.values(), ids=CONTENT)
def test_a_sealed_checkpoint_that_dtt_never_wrote_is_rejected(
    job: Path, change: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    change(newest(job))
    seal(newest(job))
    falls_back(job, "step-000008 is damaged", 200_000, caplog)
    assert not Path("went-off").exists()


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def sparse(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(20 * 10**9)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("put", [fifo, sparse, directory], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", [MANIFEST, store.POSITION, MODEL])
def test_fifos_and_devices_in_place_of_a_file_neither_hang_nor_fill_the_memory(
    job: Path, name: str, put: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    put(newest(job) / name)
    falls_back(job, name, 500_000, caplog)


def test_training_resumes_from_the_checkpoint_before_a_malformed_one(job: Path) -> None:
    a_pickle(newest(job))
    seal(newest(job))
    done = Dtt(job.parents[1])("train", "jobs/t")
    assert (
        "rejected a checkpoint: checkpoint jobs/t/checkpoints/step-000008 is damaged" in done.stderr
    )
    assert "resumed from jobs/t/checkpoints/step-000004" in done.stderr
    assert store.verify(newest(job)).step == 8


def test_if_all_checkpoints_are_malformed_training_exits_with_65_and_one_message(job: Path) -> None:
    for step in (4, 8):
        folder = job / f"checkpoints/step-{step:06d}"
        a_header_of_2_to_the_60(folder)
        seal(folder)
    done = Dtt(job.parents[1])("train", "jobs/t", expect=ExitCode.DAMAGED)
    assert done.stderr.count("none of the 2 checkpoints") == 1
    assert all(f"step-{step:06d} is damaged" in done.stderr for step in (4, 8))


def test_a_link_that_leads_out_of_the_job_is_never_followed(job: Path) -> None:
    """To a file of the right size and sha256."""
    (newest(job) / MODEL).rename(job.parents[1] / "victim")
    (newest(job) / MODEL).symlink_to(job.parents[1] / "victim")
    with pytest.raises(DamagedError, match="a link to"):
        store.verify(newest(job))


def test_branching_from_a_manifest_with_a_name_that_leads_out_overwrites_nothing(job: Path) -> None:
    root = job.parents[1]
    shutil.copytree(job, root / "elsewhere/mallory")
    source = root / "elsewhere/mallory/checkpoints/step-000004"
    content = json.loads((source / MANIFEST).read_text())
    content.pop("seal")
    # From `jobs/child/checkpoints/.tmp-…/` the same name leads to the file beside the child.
    victim, planted = root / "jobs/victim", root / "elsewhere/victim"
    victim.write_text("mine")
    planted.write_text("theirs")
    record = FileRecord(path="../../../victim", bytes=6, sha256=sha256_file(planted))
    content["files"].append(record.model_dump())
    write_manifest(source, content)
    done = Dtt(root)(
        "train", "--branch", "elsewhere/mallory@4", "name=child", "schedule.type=wsd",
        "schedule.decay=50%", "train.steps=8", "--allow-change", "schedule.type",
        expect=ExitCode.DAMAGED,
    )  # fmt: skip
    assert "a manifest names a file outside its folder" in done.stderr
    assert victim.read_text() == "mine"
