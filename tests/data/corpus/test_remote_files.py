"""Corpora behind URLs: the bytes of the objects, or a refusal by name, whatever goes wrong."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.object_server import KEY, LISTED, ObjectServer, object_server
from support.ranks import on_ranks

from dtt.artifacts.corpus import CorpusManifest
from dtt.base import object_store
from dtt.base.errors import ConfigError, DamagedError, DttError, EnvironmentUnfit, InputError
from dtt.config.data import DownloadConfig
from dtt.data.corpus import remote_files as module
from dtt.data.corpus.download import download
from dtt.data.corpus.file_choice import FilePatterns

pytest.importorskip("moto")
Log = pytest.LogCaptureFixture


@pytest.fixture(scope="module")
def started() -> Iterator[ObjectServer]:
    with object_server() as server:
        yield server


@pytest.fixture
def server(started: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> ObjectServer:
    monkeypatch.setattr(object_store, "DELAYS", (0, 0, 0))
    monkeypatch.setattr(object_store, "RANGE_BYTES", 1000)
    return started.prepared(monkeypatch)


def lines(number: int) -> bytes:
    return b"".join(b'{"text": "document %d"}\n' % i for i in range(number))


def fetch(dataset: str, out: Path, **options: Any) -> CorpusManifest:
    return download(DownloadConfig(dataset=dataset, **options), out)


def content(out: Path, manifest: CorpusManifest) -> dict[str, bytes]:
    return {file.path: (out / file.path).read_bytes() for file in manifest.files}


def test_objects_are_chosen_as_files_of_a_folder_and_pinned(
    server: ObjectServer, tmp_path: Path
) -> None:
    files = {
        "text/a.jsonl": lines(200), "text/b/c.jsonl": lines(9), "text/_hidden/d.jsonl": b"no",
        "text/b/old/e.jsonl": b"no", "text/.f.jsonl": b"no", "texts/g.jsonl": b"no",
        "text/notes.md": b"no",
    }  # fmt: skip
    url = server.bucket("chosen", files) + "/text"
    manifest = fetch(url, tmp_path, exclude=("old/",))
    assert content(tmp_path, manifest) == {
        "a.jsonl": files["text/a.jsonl"],
        "b/c.jsonl": files["text/b/c.jsonl"],
    }
    assert manifest.source.id == url
    assert all(re.fullmatch("[0-9a-f]{32}", str(file.version)) for file in manifest.files)
    server.requests.clear()
    assert fetch(url, tmp_path, exclude=("old/",)) == manifest
    assert server.requests == []  # the manifest pins the versions: nothing is asked
    # A file that got lost is fetched again, but not in another state.
    (tmp_path / "a.jsonl").unlink()
    assert content(tmp_path, fetch(url, tmp_path, exclude=("old/",)))["a.jsonl"] == lines(200)
    (tmp_path / "a.jsonl").unlink()
    server.call("PUT", "/chosen/text/a.jsonl", b"other")
    with pytest.raises(DamagedError, match=r"changed since .*\n.*a\.jsonl"):
        fetch(url, tmp_path, exclude=("old/",))
    everything = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    assert KEY.encode() not in everything


@pytest.mark.parametrize("fault", ["reset", "throttled", "truncated"])
def test_faults_of_the_network_are_repeated_and_change_no_byte(
    server: ObjectServer, tmp_path: Path, caplog: Log, fault: Any
) -> None:
    files = {f"{name}.jsonl": lines(size) for name, size in (("a", 150), ("b", 60), ("c", 1))}
    url = server.bucket(f"faults-{fault}", files)
    seen: dict[tuple[str, str], int] = {}

    def every_other(method: str, path: str) -> Any:
        seen[method, path] = seen.get((method, path), 0) + 1
        return fault if seen[method, path] % 2 else None

    server.fault = every_other
    assert content(tmp_path, fetch(url, tmp_path)) == files


def test_a_store_that_stays_busy_is_reported_once_and_the_rest_is_fetched_later(
    server: ObjectServer, tmp_path: Path, caplog: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.bucket("busy", {"a.jsonl": lines(400)})
    calls = []

    def after_three(method: str, path: str) -> Any:
        calls.append(path)
        return "reset" if method == "GET" and path == "/busy/a.jsonl" and len(calls) > 7 else None

    server.fault = after_three
    with pytest.raises(EnvironmentUnfit, match=r"cannot read s3://busy/a\.jsonl: tried 4 times"):
        fetch(url, tmp_path)
    assert sum("are repeated" in record.message for record in caplog.records) == 1
    [part] = (tmp_path / module.PARTS).iterdir()
    there = part.stat().st_size
    assert there > 0
    server.fault = lambda method, path: None
    ranges: list[int] = []
    real = object_store.ObjectStore.read
    monkeypatch.setattr(
        object_store.ObjectStore,
        "read",
        lambda self, one, start: ranges.append(start) or real(self, one, start),
    )
    assert content(tmp_path, fetch(url, tmp_path)) == {"a.jsonl": lines(400)}
    assert ranges[0] == there
    assert not (tmp_path / module.PARTS).exists()


@pytest.mark.parametrize("when", ["before the read", "during the read", "after the read"])
def test_an_object_that_changes_is_refused_by_name(
    server: ObjectServer, tmp_path: Path, when: str
) -> None:
    bucket = f"changes-{when.split()[0]}"
    url = server.bucket(bucket, {"a.jsonl": lines(100), "b.jsonl": lines(3)})
    size = len(lines(100))
    reads: list[str] = []

    def change(method: str, path: str) -> Any:
        if path != f"/{bucket}/a.jsonl":
            return None
        reads.append(method)
        number = reads.count("GET")
        due = {"before": 0, "during": 2, "after": -(-size // 1000)}[when.split()[0]]
        if number == due and "changed" not in reads and (method == "GET" or due == 0):
            reads.append("changed")
            # "after": this request still gets the old bytes, as if the change came right behind.
            if when.startswith("after"):
                late.append(path)
                return None
            server.call("PUT", path, b"x" * size)
        elif late and method == "HEAD":
            server.call("PUT", late.pop(), b"x" * size)
        return None

    late: list[str] = []
    server.fault = change
    with pytest.raises(DamagedError, match=rf"changed while .*\n.*s3://{bucket}/a\.jsonl"):
        fetch(url, tmp_path)
    assert not CorpusManifest.exists(tmp_path)
    # The same command then takes the new state as a whole.
    server.fault = lambda method, path: None
    server.call("PUT", f"/{bucket}/a.jsonl", lines(7))
    files = {"a.jsonl": lines(7), "b.jsonl": lines(3)}
    assert content(tmp_path, fetch(url, tmp_path)) == files


def test_10000_objects_take_a_request_a_thousand(server: ObjectServer) -> None:
    patterns = FilePatterns(DownloadConfig(exclude=("3/",)))
    found = module.remote_files((f"s3://{LISTED}10000/data",), "many", None, patterns)
    assert len(found) == 10_000 - len(range(3, 10_000, 7))
    assert len(server.requests) <= 10_000 // 1000 + 2


class SampledPatterns(FilePatterns):
    """Patterns that note how much memory the process has while they are asked."""

    calls = peak = 0

    def excludes(self, name: str) -> bool:
        if self.calls % 2500 == 0:
            used = psutil.Process().memory_info()
            self.peak = max(self.peak, used.rss - used.shared)
        self.calls += 1
        return super().excludes(name)


def listed(_: object, environment: dict[str, str], objects: int) -> tuple[int, int]:
    """List a bucket; return the number of chosen objects, and the bytes by which memory grew.

    A small listing comes first, for what libraries allocate once.
    """
    os.environ |= environment
    peaks = []
    for number in (5000, objects):
        patterns = SampledPatterns(DownloadConfig(include=("part-*999.jsonl",), exclude=("3/",)))
        found = module.remote_files((f"s3://{LISTED}{number}/data",), "many", None, patterns)
        peaks.append(patterns.peak)
    return len(found), peaks[1] - peaks[0]


@pytest.mark.slow
def test_100000_objects_are_listed_in_the_memory_of_a_page(server: ObjectServer) -> None:
    objects = range(100_000)
    [(found, memory)] = on_ranks(1, listed, server.environment, len(objects))
    assert found == len([n for n in objects[999::1000] if n % 7 != 3])
    # What Python has not collected yet; the dicts that `find` of s3fs returns were 120 MiB.
    assert memory < 48 * 2**20


def test_two_objects_of_one_path_are_refused(server: ObjectServer) -> None:
    url = server.bucket("twice", {"a/b.jsonl": b"1", "a/c.jsonl": b"1"})
    urls, patterns = (url, f"{url}/a/b.jsonl"), FilePatterns(DownloadConfig())
    with pytest.raises(InputError, match=r"two objects of both have the path twice/a/b\.jsonl"):
        module.remote_files(urls, "both", None, patterns)


@pytest.mark.parametrize("ranges", [True, False])
def test_files_of_a_web_server_and_of_a_bucket_become_one_corpus(
    server: ObjectServer, tmp_path: Path, ranges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = gzip.compress(lines(300) + json.dumps({"text": "x" * 3000}).encode() + b"\n")
    bucket = f"web-{ranges}".lower()
    url = server.bucket(bucket, {"a.jsonl.gz": packed, "more/b.jsonl": lines(5)}) + "/more"
    if not ranges:  # a server that answers each request with the whole file
        real = server.call

        def whole(method: str, path: str, body: Any = None, **headers: str) -> Any:
            return real(method, path, body, **{k: v for k, v in headers.items() if k != "Range"})

        monkeypatch.setattr(server, "call", whole)
        url = server.endpoint + f"/{bucket}/more/b.jsonl"
    host = server.endpoint.removeprefix("http://")
    manifest = fetch(f"{server.endpoint}/{bucket}/a.jsonl.gz {url}", tmp_path)
    other = f"{host}/{bucket}/more/b.jsonl" if not ranges else f"{bucket}/more/b.jsonl"
    assert content(tmp_path, manifest) == {
        f"{host}/{bucket}/a.jsonl.gz": packed,
        other: lines(5),
    }


@pytest.mark.parametrize(
    ("dataset", "options", "error", "says"),
    [
        ("ftp://host/a.jsonl", {}, InputError, "does not read ftp://"),
        ("s3://nothing-there/x", {}, InputError, "there is nothing at s3://nothing-there/x"),
        ("gs://bucket/x", {}, EnvironmentUnfit, r"pip install 'dtt-lm\[gcs\]'"),
        ("s3://refused/x", {"revision": "main"}, ConfigError, "download.revision"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    server: ObjectServer, tmp_path: Path, dataset: str, options: Any, error: Any, says: str
) -> None:
    with pytest.raises(DttError, match=says) as raised:
        fetch(dataset, tmp_path, **options)
    assert isinstance(raised.value, error)
