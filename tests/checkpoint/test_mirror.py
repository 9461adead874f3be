"""Copies of checkpoints in a bucket: complete and equal or absent, whatever goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.object_server import KEY, ObjectServer, object_server
from support.running import TIMEOUT, wait_until

from dtt.artifacts.jobdir import MIRRORED, JobDir
from dtt.base import object_store, remote_folder
from dtt.base.errors import ConfigError, DamagedError, EnvironmentUnfit, InputError
from dtt.base.ranks import Ranks
from dtt.base.reading import read_record
from dtt.checkpoint import fetch, mirror, store
from dtt.checkpoint.mirror import Mirror, copies
from dtt.checkpoint.saver import Saver
from dtt.config.train import CheckpointConfig
from dtt.mesh.dist import start
from dtt.mesh.sharding import on_every_rank

pytest.importorskip("moto")
FACTS = {"config_sha256": "c" * 64, "data_key": "d" * 64, "versions": {"dtt": "1", "torch": "2"}}
CONFIG = "name: run\ncheckpoint: {{mirror: '{}'}}\n"


@pytest.fixture(scope="module")
def started() -> Iterator[ObjectServer]:
    with object_server() as server:
        yield server


@pytest.fixture
def server(started: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> ObjectServer:
    monkeypatch.setattr(object_store, "DELAYS", (0, 0, 0))
    monkeypatch.setattr(object_store, "RANGE_BYTES", 1000)
    monkeypatch.setattr(mirror, "DELAYS", (0.01,))
    return started.prepared(monkeypatch)


class Mirrored:
    """A job whose saves are mirrored; `save` waits for the copy unless told not to."""

    def __init__(self, folder: Path, url: str, run_id: str = "a1b2", **rules: Any) -> None:
        self.job = JobDir(folder / "jobs/run")
        self.job.checkpoints.mkdir(parents=True, exist_ok=True)
        self.job.config.write_text(CONFIG.format(url))
        (self.job.root / "run_id").write_text(f"{run_id}\n")
        self.job.metrics.write_text('{"kind": "train", "step": 1}\n')
        config = CheckpointConfig(mirror=url, **rules)
        self.mirror = Mirror(f"{url}/run", self.job, run_id, config)
        world = start(Ranks(), "cpu")
        self.saver = Saver(self.job, 1, world, config, FACTS, mirror=self.mirror)
        newest = max(store.steps(self.job.checkpoints), default=None)
        self.mirror.start(newest, lambda: dict(self.saver.losses))

    def save(self, step: int, value: float = 1.0, wait: bool = True, size: int = 500) -> None:
        weights = on_every_rank({"w": torch.full((size,), value * step)})
        self.saver.begin(step, weights, {}, {"step": step})
        self.saver.wait()
        if wait:
            wait_until(lambda: step in self.state()["steps"] and not self.state()["pending"])

    def state(self) -> dict[str, Any]:
        return read_record(self.job.mirror, MIRRORED) or {"steps": [], "pending": []}

    def finish(self, seconds: float = TIMEOUT) -> bool:
        return self.mirror.finish(seconds)


def no_thread() -> bool:
    """Return True if no upload is in progress."""
    return not any(thread.name == "mirror" for thread in threading.enumerate())


def keys(server: ObjectServer, bucket: str) -> list[str]:
    text = server.call("GET", f"/{bucket}?list-type=2")[2].decode()
    return [part.partition("</Key>")[0] for part in text.split("<Key>")[1:]]


def whole(server: ObjectServer, bucket: str) -> list[int]:
    names = [key.removeprefix("run/") for key in keys(server, bucket)]
    return copies(dict.fromkeys(names, 1))[0]


def check_equal(server: ObjectServer, bucket: str, job: JobDir, step: int) -> None:
    folder = store.folder_of(job.checkpoints, step)
    for path in folder.iterdir():
        assert server.object(bucket, f"run/{folder.name}/{path.name}") == path.read_bytes()


def test_each_checkpoint_is_copied_and_the_copies_are_kept_by_the_same_rules(
    server: ObjectServer, tmp_path: Path
) -> None:
    run = Mirrored(tmp_path, server.bucket("kept", {}), keep_last=2, keep_every=4, keep_best=1)
    for step in range(1, 9):
        run.saver.losses[step] = abs(step - 2.2)
        run.save(step)
    assert run.finish()
    assert store.steps(run.job.checkpoints) == whole(server, "kept") == [2, 4, 7, 8]
    for step in (2, 4, 7, 8):
        check_equal(server, "kept", run.job, step)
    assert not any(name.startswith("run/step-000001/") for name in keys(server, "kept"))
    assert server.object("kept", "run/job/metrics.jsonl") == run.job.metrics.read_bytes()
    assert run.state()["failure"] is None
    everything = b"".join(server.object("kept", key) for key in keys(server, "kept"))
    assert KEY.encode() not in everything + run.job.mirror.read_bytes()


def test_of_two_processes_of_one_run_the_later_one_copies(
    server: ObjectServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = server.bucket("two", {})
    first, second = Mirrored(tmp_path / "first", url), Mirrored(tmp_path / "second", url)
    first.save(1)
    second.save(2, value=7.0)
    first.save(2, wait=False)
    first.save(3, wait=False)
    assert not first.finish()
    assert "no checkpoint is copied to the mirror any more: another process" in caplog.text
    assert first.state()["failure"]["step"] in (2, 3)
    second.save(4)
    assert second.finish()
    assert whole(server, "two") == [2, 4]
    for step in (2, 4):
        check_equal(server, "two", second.job, step)
    # Started again, the first one takes over.
    again = Mirrored(tmp_path / "first", url)
    assert again.finish()
    check_equal(server, "two", first.job, 3)


@pytest.mark.parametrize("fault", ["reset", "throttled", "truncated", "cut"])
def test_faults_are_repeated_and_no_copy_has_a_wrong_byte(
    server: ObjectServer, tmp_path: Path, fault: Any
) -> None:
    run = Mirrored(tmp_path, server.bucket(f"faulty-{fault}", {}))
    seen: dict[tuple[str, str], int] = {}
    lock = threading.Lock()

    def often(method: str, path: str) -> Any:
        if fault == "cut" and (method != "PUT" or ".safetensors" not in path):
            return None
        with lock:
            seen[method, path] = seen.get((method, path), 0) + 1
            return fault if seen[method, path] % 3 else None

    server.fault = often
    run.save(4, wait=False)
    assert run.finish()
    # Each request is repeated by itself: a copy that starts again with its first file whenever one
    # fails needs three times the requests for each file more.
    assert max(seen.values()) <= 12
    server.fault = lambda method, path: None
    assert whole(server, f"faulty-{fault}") == [4]
    check_equal(server, f"faulty-{fault}", run.job, 4)


def test_a_large_file_is_copied_in_parts(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_folder, "PART_BYTES", 5 * 2**20)
    run = Mirrored(tmp_path, server.bucket("parts", {}))
    run.save(1, size=3_000_000)
    assert run.finish()
    check_equal(server, "parts", run.job, 1)
    parts = [path for method, path in server.requests if method == "PUT" and "partNumber=" in path]
    assert len(parts) == 3


def test_a_store_that_is_down_stops_no_save_and_gets_the_copy_later(
    server: ObjectServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Mirrored(tmp_path, server.bucket("down", {}), keep_last=1)
    server.fault = lambda method, path: "reset"
    run.save(1, wait=False)
    wait_until(lambda: run.state().get("failure"))
    run.save(2, wait=False)
    run.save(3, wait=False)
    assert store.steps(run.job.checkpoints)[-1] == 3
    wait_until(lambda: (run.state()["failure"] or {}).get("tries", 0) > 3)
    assert 3 in {*run.state()["pending"], run.state()["uploading"]}
    failures = [r for r in caplog.records if "of step 1 failed, and is tried again" in r.message]
    assert len(failures) <= 1
    server.fault = lambda method, path: None
    assert run.finish()
    assert whole(server, "down") == [3]
    check_equal(server, "down", run.job, 3)
    assert run.state()["failure"] is None


def test_what_is_missing_at_the_end_is_said_and_the_next_process_copies_it(
    server: ObjectServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = server.bucket("missing", {})
    run = Mirrored(tmp_path, url)
    run.save(1)
    # All but the marker arrives: this is where a killed process may stop.
    server.fault = lambda method, path: (
        "throttled" if method == "PUT" and path.endswith("2/MANIFEST.json") else None
    )
    run.save(2, wait=False)
    wait_until(lambda: run.state().get("failure"))
    assert not run.finish(seconds=0.1)
    assert "not in the mirror" in caplog.text
    assert "dtt train" in caplog.text
    assert "run/step-000002/position.json" in keys(server, "missing")
    assert whole(server, "missing") == [1]
    server.fault = lambda method, path: None
    again = Mirrored(tmp_path, url)
    assert again.finish()
    assert whole(server, "missing") == [1, 2]
    check_equal(server, "missing", run.job, 2)
    wait_until(no_thread)


def test_a_checkpoint_stays_on_the_disk_while_it_is_copied(
    server: ObjectServer, tmp_path: Path
) -> None:
    run = Mirrored(tmp_path, server.bucket("slow", {}), keep_last=1)
    go = threading.Event()

    def hold(method: str, path: str) -> None:
        if "step-000001/model" in path:
            go.wait(TIMEOUT)

    server.fault = hold
    run.save(1, wait=False)
    wait_until(lambda: any("step-000001/model" in path for _, path in server.requests))
    run.save(2, wait=False)
    run.save(3, wait=False)
    assert store.steps(run.job.checkpoints) == [1, 3]  # 2 was not begun
    go.set()
    assert run.finish()
    assert whole(server, "slow") == [3]


def test_copies_of_a_superseded_timeline_go_and_another_run_is_refused(
    server: ObjectServer, tmp_path: Path
) -> None:
    url = server.bucket("timeline", {})
    run = Mirrored(tmp_path, url, keep_last=5)
    for step in (1, 2, 3):
        run.save(step)
    assert run.finish()
    store.supersede(run.job.checkpoints, 1, attempt=2)
    again = Mirrored(tmp_path, url, keep_last=5)
    again.save(2, value=7.0)
    assert again.finish()
    assert whole(server, "timeline") == [1, 2]
    check_equal(server, "timeline", run.job, 2)
    other = Mirrored(tmp_path / "other", url, run_id="ffff")
    with pytest.raises(ConfigError, match=r"another run\n.*mirror\n.*run_id is a1b2.*is ffff"):
        other.mirror.claim()
    other.save(9, wait=False)
    wait_until(lambda: other.state().get("failure"))
    assert "another run" in other.state()["failure"]["reason"]
    assert not other.finish(seconds=0.1)
    assert whole(server, "timeline") == [1, 2]
    server.call("PUT", "/timeline/run/run_id", b"ffff\n")  # so that its thread ends
    wait_until(no_thread)


def test_a_file_that_changed_on_the_disk_is_not_copied(
    server: ObjectServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = server.bucket("rotten", {})
    run = Mirrored(tmp_path, url)
    run.save(1)
    run.finish()
    server.call("DELETE", "/rotten/run/step-000001/MANIFEST.json")
    path = store.folder_of(run.job.checkpoints, 1) / "model-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    again = Mirrored(tmp_path, url)
    again.finish()
    assert whole(server, "rotten") == []
    assert "has changed since it was verified" in caplog.text


# ---- dtt ckpt fetch ------------------------------------------------------------------------------


@pytest.fixture
def copied(server: ObjectServer, tmp_path: Path) -> Mirrored:
    """A job with copies of steps 1 and 2."""
    name = tmp_path.name.lower().replace("_", "-")  # a bucket for each test
    run = Mirrored(tmp_path, server.bucket(name, {}), keep_last=5)
    run.save(1)
    run.save(2)
    assert run.finish()
    return run


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def damage(run: Mirrored, step: int) -> dict[str, bytes]:
    """Damage the checkpoint of a step on the disk; return its files from before."""
    folder = store.folder_of(run.job.checkpoints, step)
    before = files_of(folder)
    (folder / "model-00000.safetensors").write_bytes(b"damaged")
    return before


def test_fetch_replaces_a_damaged_checkpoint_by_its_copy(
    copied: Mirrored, capsys: pytest.CaptureFixture[str]
) -> None:
    before = damage(copied, 1)
    fetch.run(str(copied.job.root), 1)
    assert files_of(store.folder_of(copied.job.checkpoints, 1)) == before
    assert store.steps(copied.job.checkpoints) == [1, 2]
    assert "--from-step 1" in capsys.readouterr().out
    assert [path.name for path in copied.job.checkpoints.glob(".*")] == []


def test_fetch_by_url_restores_a_lost_job(
    server: ObjectServer, copied: Mirrored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = tmp_path / "lost"
    copied.job.root.rename(lost)
    monkeypatch.chdir(tmp_path)
    fetch.run(copied.mirror.url, None)
    job = JobDir(Path("jobs/run"))
    assert store.steps(job.checkpoints) == [2]
    for name in ("config.yaml", "run_id", "metrics.jsonl"):
        assert (job.root / name).read_bytes() == (lost / name).read_bytes()
    assert files_of(store.folder_of(job.checkpoints, 2)) == files_of(
        store.folder_of(lost / "checkpoints", 2)
    )


def flipped(server: ObjectServer, bucket: str, key: str) -> bytes:
    content = bytearray(server.object(bucket, key))
    content[-1] ^= 1
    return bytes(content)


@pytest.mark.parametrize("when", ["before", "during"])
def test_fetch_refuses_a_copy_that_changed_and_leaves_what_is_there(
    server: ObjectServer, copied: Mirrored, when: str
) -> None:
    before = damage(copied, 2)
    bucket = copied.mirror.url.split("/")[2]
    key = "run/step-000002/model-00000.safetensors"
    other = flipped(server, bucket, key)

    def change(method: str, path: str) -> None:
        if method == "GET" and path == f"/{bucket}/{key}":
            server.call("PUT", path, other)

    if when == "before":
        server.call("PUT", f"/{bucket}/{key}", other)
    else:
        server.fault = change
    with pytest.raises(DamagedError, match=r"changed while|differs from the manifest"):
        fetch.run(str(copied.job.root), 2)
    path = store.folder_of(copied.job.checkpoints, 2) / "model-00000.safetensors"
    assert path.read_bytes() == b"damaged"
    server.fault = lambda method, path: None
    server.call("PUT", f"/{bucket}/{key}", before["model-00000.safetensors"])
    fetch.run(str(copied.job.root), 2)
    assert files_of(path.parent) == before


def test_an_interrupted_fetch_is_continued(
    server: ObjectServer, copied: Mirrored, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = damage(copied, 2)
    reads: list[int] = []

    def fail_after_two(method: str, path: str) -> Any:
        if method == "GET" and "2/model" in path:
            reads.append(1)
            return "reset" if len(reads) > 2 else None
        return None

    server.fault = fail_after_two
    with pytest.raises(EnvironmentUnfit, match="cannot read"):
        fetch.run(str(copied.job.root), 2)
    [part] = copied.job.checkpoints.glob(".tmp-*/model-00000.safetensors")
    there = part.stat().st_size
    assert 0 < there < len(before["model-00000.safetensors"])
    server.fault = lambda method, path: None
    starts: list[int] = []
    real = remote_folder.RemoteFolder.read

    def noted(self: Any, one: Any, start: int) -> bytes:
        if one.name.endswith("model-00000.safetensors"):
            starts.append(start)
        return real(self, one, start)

    monkeypatch.setattr(remote_folder.RemoteFolder, "read", noted)
    fetch.run(str(copied.job.root), 2)
    assert starts[0] == there
    assert files_of(store.folder_of(copied.job.checkpoints, 2)) == before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda run: (run.mirror.url, 7), r"no complete copy of step 7\n.*\n.*there are: 1, 2"),
        (lambda run: ("jobs/nothing", None), "is not a job directory"),
        (lambda run: (run.mirror.url + "/step-000001", None), "is not the mirror of a job"),
    ],
)
def test_what_cannot_be_fetched_is_refused_by_name(
    copied: Mirrored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Mirrored], tuple[str, int | None]], says: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=says):
        fetch.run(*change(copied))


def test_a_mirror_on_another_disk_needs_no_library(tmp_path: Path) -> None:
    run = Mirrored(tmp_path, f"{tmp_path}/disk", keep_last=1)
    run.save(1)
    run.save(2)
    assert run.finish()
    there = tmp_path / "disk/run"
    found = sorted(path.name for path in there.iterdir())
    assert found == ["job", "run_id", "step-000002", "writer"]
    before = damage(run, 2)
    fetch.run(str(run.job.root), None)
    assert files_of(store.folder_of(run.job.checkpoints, 2)) == before
