"""Training with `checkpoint.mirror`: it is killed during an upload, and its folder is lost."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.forked_runs import run
from support.object_server import ObjectServer, object_server
from support.resumed import SETTINGS
from support.running import TIMEOUT, Dtt, wait_until

pytest.importorskip("moto")


@pytest.fixture(scope="module")
def started() -> Iterator[ObjectServer]:
    with object_server() as server:
        yield server


@pytest.fixture
def server(started: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> ObjectServer:
    return started.prepared(monkeypatch)


def copies(server: ObjectServer, bucket: str, folder: Path) -> dict[str, bool]:
    """Return by name whether the mirror has each file of the checkpoints with the same bytes."""
    return {
        f"{path.parent.name}/{path.name}": path.read_bytes()
        == server.object(bucket, f"t/{path.parent.name}/{path.name}")
        for path in (folder / "jobs/t/checkpoints").glob("step-*/*")
    }


def test_a_run_killed_during_an_upload_completes_the_mirror_when_it_resumes(
    server: ObjectServer, dtt: Dtt
) -> None:
    mirror = server.bucket("killed", {})
    arrived, go = threading.Event(), threading.Event()

    def hold(method: str, path: str) -> Any:
        if method == "PUT" and "/state-00000" in path:
            arrived.set()
            go.wait(TIMEOUT)
            return "reset"
        return None

    server.fault = hold
    process = dtt.start("train", *SETTINGS, f"checkpoint.mirror={mirror}")
    wait_until(arrived.is_set, process)  # the file is half there, and there is no marker
    process.kill()
    dtt.wait(process)
    server.fault = lambda method, path: None
    go.set()
    there = server.call("GET", "/killed?list-type=2")[2].decode()
    assert "<Key>t/run_id</Key>" in there
    assert "MANIFEST.json" not in there
    run(dtt, "train", "jobs/t", ranks=1)
    found = copies(server, "killed", dtt.folder)
    assert {name.partition("/")[0] for name in found} == {"step-000002", "step-000004"}
    assert all(found.values()), found
    assert "mirror      s3://killed/t: step 2, 4\n" in dtt("job", "status", "jobs/t").stdout


def test_a_job_of_two_ranks_whose_folder_is_lost_continues_from_its_mirror(
    server: ObjectServer, dtt: Dtt
) -> None:
    mirror, job = server.bucket("lost", {}), dtt.folder / "jobs/t"
    run(dtt, "train", *SETTINGS, "parallel.shard=2", f"checkpoint.mirror={mirror}", ranks=2)
    assert all(copies(server, "lost", dtt.folder).values())
    whole = dtt.folder / "whole"
    shutil.move(job, whole)
    said = dtt("ckpt", "fetch", f"{mirror}/t", "2").stdout
    assert "jobs/t/checkpoints/step-000002: verified, 5 files\n" in said
    assert "resume with: dtt train jobs/t\n" in said
    run(dtt, "train", "jobs/t", ranks=2)
    tensors = sorted((whole / "checkpoints").glob("step-*/*.safetensors"))
    assert len(tensors) == 8
    for path in tensors:
        assert (job / path.relative_to(whole)).read_bytes() == path.read_bytes(), path
    assert all(copies(server, "lost", dtt.folder).values())
