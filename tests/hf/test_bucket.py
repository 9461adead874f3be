"""`dtt export --upload s3://…`: all files arrive with their bytes, or there is no manifest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.object_server import ObjectServer, object_server
from support.tiny_job import write_job

from dtt.artifacts.manifests import ExportManifest
from dtt.base import object_store
from dtt.base.errors import ConfigError, DttError
from dtt.hf import bucket, export

pytest.importorskip("moto")


@pytest.fixture(scope="module")
def started() -> Iterator[ObjectServer]:
    with object_server() as server:
        yield server


@pytest.fixture
def server(started: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> ObjectServer:
    monkeypatch.setattr(object_store, "DELAYS", (0, 0, 0))
    return started.prepared(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    (tmp_path / bucket.MARKER).write_text('{"job": "run"}')
    return tmp_path


NAMES = ("config.json", "model.safetensors", bucket.MARKER)


def test_an_export_is_uploaded_and_another_job_is_refused(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    stale = {"tiny/model-00001-of-00002.safetensors": b"old", "tiny/notes.txt": b"mine"}
    url = server.bucket("exported", stale) + "/tiny"
    export.run(str(write_job(tmp_path)), [], out=None, upload=url)
    assert capsys.readouterr().out.endswith(f"\n{url}\n")
    manifest = ExportManifest.read(Path("exports/tiny"))
    for name in (manifest.filename, *manifest.names()):
        assert server.object("exported", f"tiny/{name}") == Path("exports/tiny", name).read_bytes()
    assert server.object("exported", "tiny/notes.txt") == b"mine"
    assert server.call("GET", "/exported/tiny/model-00001-of-00002.safetensors")[0] == 404
    with pytest.raises(ConfigError, match="holds the export of another job: tiny"):
        bucket.prepare(url, "other")
    with pytest.raises(ConfigError, match="cannot upload to https://host/x"):
        bucket.prepare("https://host/x", "tiny")


@pytest.mark.parametrize("fault", ["reset", "throttled", "cut"])
def test_faults_are_repeated_and_change_no_byte(
    server: ObjectServer, folder: Path, fault: Any
) -> None:
    url = server.bucket(f"upload-{fault}", {})
    puts: list[str] = []

    def first_two(method: str, path: str) -> Any:
        if method != "PUT":
            return None
        puts.append(path)
        return fault if puts.count(path) <= 2 else None

    server.fault = first_two
    assert bucket.upload(folder, NAMES, url) == url
    for name in NAMES:
        assert server.object(f"upload-{fault}", name) == (folder / name).read_bytes()


def test_an_upload_that_keeps_failing_leaves_no_manifest(
    server: ObjectServer, folder: Path
) -> None:
    url = server.bucket("failing", {bucket.MARKER: b"{}"})
    server.fault = lambda method, path: (
        "throttled" if method == "PUT" and path.endswith("model.safetensors") else None
    )
    with pytest.raises(DttError, match=r"cannot write s3://failing/model\.safetensors"):
        bucket.upload(folder, NAMES, url)
    assert server.call("GET", f"/failing/{bucket.MARKER}")[0] == 404


def test_other_bytes_of_the_same_size_are_found(server: ObjectServer, folder: Path) -> None:
    url, other = server.bucket("rotten", {}), bytes(25600)

    def replace(method: str, path: str) -> Any:
        if method == "GET" and path.endswith("/model.safetensors"):
            server.call("PUT", "/rotten/model.safetensors", other)

    server.fault = replace
    with pytest.raises(DttError, match=r"changed while|not uploaded right|cannot read"):
        bucket.upload(folder, NAMES, url)
    assert server.call("GET", f"/rotten/{bucket.MARKER}")[0] == 404
