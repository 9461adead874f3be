"""The live server: it answers only those who know its token, with pages and their data."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from dtt.artifacts.jobdir import JobDir
from dtt.base import local_server
from dtt.base.errors import DamagedError, EnvironmentUnfit, InputError
from dtt.base.local_server import LocalServer
from dtt.jobs.job_state import Status, find
from dtt.report.report_pages import Pages

SECONDS = 100.0
"""Longest time that a test waits for something that must happen."""


def write_job(folder: Path, name: str = "a", metrics: str = "") -> JobDir:
    """A job that has started once and trains somewhere else."""
    job = JobDir(folder / "jobs" / name)
    (job.root / "attempts/1/ranks").mkdir(parents=True)
    (job.root / "attempts/1/ranks/00000.json").write_text("{}")
    job.config.write_text("name: t\n")
    job.metrics.write_text(metrics)
    return job


def names_of(statuses: Sequence[Status]) -> dict[str, Any]:
    return {"title": "t", "names": [str(status.job.root) for status in statuses]}


@dataclass
class Site:
    """What the server is made of."""

    folder: Path
    jobs: Callable[[Sequence[Status]], Mapping[str, Any]] = names_of
    report: Callable[[Sequence[Status]], Mapping[str, Any]] = names_of

    def server(self, port: int = 0) -> LocalServer:
        return LocalServer(Pages(self._find, self._jobs, self._report), port)

    def _find(self) -> list[JobDir]:
        return find(self.folder / "jobs")

    def _jobs(self, statuses: Sequence[Status]) -> Mapping[str, Any]:
        return self.jobs(statuses)

    def _report(self, statuses: Sequence[Status]) -> Mapping[str, Any]:
        return self.report(statuses)

    @contextmanager
    def served(self) -> Iterator[Client]:
        server = self.server()
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Client(server, self)
        finally:
            server.shutdown()
            server.server_close()
            thread.join(SECONDS)
            assert not thread.is_alive()


class Client:
    """A browser, as far as the server can tell."""

    def __init__(self, server: LocalServer, pages: Site) -> None:
        self.server = server
        self.pages = pages
        parts = urlsplit(server.url)
        assert parts.port is not None
        self.port = parts.port
        self.root = parts.path
        self.token = parts.path.strip("/")

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS)

    def raw(self, head: bytes) -> bytes:
        """The complete response to some bytes; empty if the connection was closed without one."""
        with self.connect() as connection:
            received = b""
            with suppress(ConnectionError):
                connection.sendall(head)
                while piece := connection.recv(65536):
                    received += piece
        return received

    def request(self, path: str, method: str = "GET") -> Response:
        return Response.parse(self.raw(self.head(self.root + path, method)))

    def head(self, target: str, method: str = "GET", host: str = "") -> bytes:
        host = host or f"127.0.0.1:{self.port}"
        return f"{method} {target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()


@dataclass
class Response:
    status: int
    headers: dict[str, str]
    body: str

    @classmethod
    def parse(cls, received: bytes) -> Response:
        head, _, body = received.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        return cls(int(first.split()[1]), dict(x.split(": ", 1) for x in lines), body.decode())


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("PATH", str(tmp_path))  # there is no Slurm to ask
    (tmp_path / "jobs").mkdir()
    return Site(tmp_path)


@pytest.fixture
def client(pages: Site) -> Iterator[Client]:
    with pages.served() as client:
        yield client


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A server of one job, for tests that change nothing."""
    pages = Site(tmp_path_factory.mktemp("unchanged"))
    write_job(pages.folder)
    with pages.served() as client:
        yield client


def connection_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if "process_request_thread" in t.name}


# ---- who is answered -----------------------------------------------------------------------------

REFUSED = [
    "GET / HTTP/1.1",
    "GET /TOKEN HTTP/1.1",
    "GET TOKEN/ HTTP/1.1",
    "GET x/TOKEN/ HTTP/1.1",
    "GET //TOKEN/ HTTP/1.1",
    "GET /./TOKEN/ HTTP/1.1",
    "GET /x/../TOKEN/ HTTP/1.1",
    "GET /x/%2e%2e/TOKEN/ HTTP/1.1",
    "GET /%2e/TOKEN/ HTTP/1.1",
    "GET /%2FTOKEN/ HTTP/1.1",
    "GET /../../../../etc/passwd HTTP/1.1",
    "GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1",
    "GET \\TOKEN\\ HTTP/1.1",
    "GET /TOKENx/ HTTP/1.1",
    "GET /WRONG/ HTTP/1.1",
    "GET /WRONG/report?job=jobs/a HTTP/1.1",
    "GET /WRONG/jobs.json HTTP/1.1",
    "GET /?TOKEN/ HTTP/1.1",
    "GET /é\xff/ HTTP/1.1",
    "GET /\0TOKEN/ HTTP/1.1",
    "GET /TOKEN\0/ HTTP/1.1",
    "GET http://127.0.0.1/TOKEN/ HTTP/1.1",
    "GET http://example.org/ HTTP/1.1",
    "CONNECT 127.0.0.1:22 HTTP/1.1",
    "HEAD / HTTP/1.1",
    "POST / HTTP/1.1",
    "POST /WRONG/ HTTP/1.1\r\nContent-Length: 3",
    "PUT / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 3",
    "OPTIONS * HTTP/1.1",
    "TRACE / HTTP/1.1",
    "NONSENSE",
    "GET /TOKEN/ HTTP/1.0",
    "GET /TOKEN/ HTTP/2.0",
    "GET /TOKEN/ HTTP/x",
    "GET /TOKEN/",
    "GET /TOKEN/ too many words HTTP/1.1",
    "GET /TOKEN/ HTTP/1.1\r\n" + "\r\n".join(f"X-{i}: y" for i in range(200)),
    "GET /TOKEN/ HTTP/1.1\r\nHost: 127.0.0.1",
    "GET /TOKEN/ HTTP/1.1\r\nHost: example.org",
    "GET /TOKEN/ HTTP/1.1\r\nX: NO-HOST",
]


@pytest.mark.parametrize("first", REFUSED, ids=range(len(REFUSED)))
def test_a_request_that_is_not_exactly_right_learns_nothing(unchanged: Client, first: str) -> None:
    client = unchanged
    head = first.replace("TOKEN", client.token).replace("WRONG", "A" * len(client.token))
    host = "" if "NO-HOST" in head else f"Host: 127.0.0.1:{client.port}\r\n"
    received = client.raw(f"{head}\r\n{host}\r\n".encode("latin-1"))
    response = Response.parse(received)
    assert (response.status, response.body) == (403, "")
    # Exactly the same for all: nothing depends on the token.
    assert response.headers | {"Date": ""} == local_server.HEADERS | {
        "Date": "", "Content-Type": "text/plain; charset=utf-8", "Content-Length": "0",
    }  # fmt: skip


@pytest.mark.parametrize(
    "host",
    [
        "example.org", "127.0.0.1.example.org", "localhost.example.org", "127.0.0.1:80:80",
        "127.0.0.1:x", "127.0.0.2", "0.0.0.0", "::1", "[::2]", "localhost, example.org", "-",
        "user@127.0.0.1", "127.0.0.1/", "１２７.0.0.1", "127.0.0.1:٣",
        *(ANSWERED := ("localhost", "LOCALHOST:1", "127.0.0.1:9999", "[::1]:8080")),
    ],
)  # fmt: skip
def test_a_name_that_resolves_to_this_machine_is_refused_but_any_port_answered(
    unchanged: Client, host: str
) -> None:
    """SSH forwards other ports."""
    response = Response.parse(unchanged.raw(unchanged.head(unchanged.root, host=host)))
    assert response.status == (200 if host in ANSWERED else 403)
    assert (response.body == "") == (response.status == 403)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "FOO"])
@pytest.mark.parametrize("path", ["", "report", "jobs.json", "other"])
def test_only_reading_is_allowed(unchanged: Client, method: str, path: str) -> None:
    response = unchanged.request(path, method)
    assert (response.status, response.body) == (405, "")


def test_two_servers_have_different_long_tokens(pages: Site) -> None:
    with pages.served() as one, pages.served() as other:
        assert one.token != other.token
        assert min(len(one.token), len(other.token)) >= 32
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]+/", one.server.url)
        assert other.raw(other.head(one.root)).startswith(b"HTTP/1.1 403 ")


def test_a_port_in_use_is_an_error_that_names_it(client: Client) -> None:
    with pytest.raises(EnvironmentUnfit, match=rf"port {client.port} .*\n.*in use\n.*next:  "):
        client.pages.server(client.port)
    with pytest.raises(EnvironmentUnfit, match="port 99999 "):
        client.pages.server(99999)


# ---- pages ---------------------------------------------------------------------------------------


def test_pages_and_their_data_show_the_jobs_that_are_asked_for(pages: Site, client: Client) -> None:
    assert json.loads(client.request("jobs.json").body)["names"] == []
    one, two, three = (str(write_job(pages.folder, name).root) for name in "abc")
    response = client.request("")
    assert client.server.socket.getsockname() == ("127.0.0.1", client.port)
    assert response.status == 200
    assert response.body.startswith("<!doctype html>")
    assert response.headers["Content-Type"] == "text/html; charset=utf-8"
    assert response.headers["Cache-Control"] == "no-store"
    assert response.headers["Referrer-Policy"] == "no-referrer"
    assert response.headers["X-Frame-Options"] == "DENY"
    assert "Server" not in response.headers
    assert json.loads(client.request("jobs.json").body)["names"] == [one, two, three]
    asked = f"?job={quote(three)}&job={quote(one)}"
    assert json.dumps([three, one], separators=(",", ":")) in client.request(f"report{asked}").body
    data = client.request(f"report.json{asked}")
    assert json.loads(data.body)["names"] == [three, one]
    assert data.headers["Content-Type"] == "application/json; charset=utf-8"


@pytest.mark.parametrize(
    "path",
    [
        "report?job=jobs/unknown", "report?job=/etc", "report?job={job}/", "report?job={job}/../a",
        "report?job={job}%00", "report?job=", "report", "report?jobs=a", "report.json?job=/etc",
        "report.json", "other", "report/", "../report", "/report", "#report",
    ],
)  # fmt: skip
def test_what_does_not_exist_is_an_error_in_plain_text(unchanged: Client, path: str) -> None:
    response = unchanged.request(path.format(job=unchanged.pages.folder / "jobs/a"))
    assert (response.status, response.headers["Content-Type"]) == (404, "text/plain; charset=utf-8")
    assert "next:" in response.body


def test_head_is_answered_like_get_without_a_body(pages: Site, client: Client) -> None:
    job = write_job(pages.folder)
    name = quote(str(job.root))
    for path in ("", f"report?job={name}", "report?job=unknown"):
        got, headers = client.request(path), client.request(path, "HEAD")
        assert (headers.status, headers.body) == (got.status, "")
        assert headers.headers | {"Date": ""} == got.headers | {"Date": ""}


HOSTILE = [
    "<script>alert(1)</script>".replace("/", "%2F"),
    "\"'`&amp;",
    "line\nfeed\r\n",
    "ünï ☃ 😀",
    "a+b c%20d?e#f=g&h:9;i",
    "x\\..\\..\\y",
    "\udcff\udc80",
    "\x01\x7f\u202e\u2028",
]


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_of_jobs_survive_the_query(pages: Site, client: Client, name: str) -> None:
    job, other = write_job(pages.folder, name, "one\n"), write_job(pages.folder, "other")
    asked = f"job={quote(str(other.root))}&job={quote(os.fsencode(str(job.root)))}"
    opened: list[str] = []
    pages.report = lambda statuses: opened.extend(str(s.job.root) for s in statuses) or {}
    assert client.request(f"report.json?{asked}").status == 200
    assert opened == [str(other.root), str(job.root)]


def test_an_error_of_dtt_is_shown(pages: Site, client: Client) -> None:
    def refuse(statuses: Sequence[Status]) -> dict[str, Any]:
        raise DamagedError("the file is damaged: hf_" + "x" * 30, next="dtt data check")

    def miss(statuses: Sequence[Status]) -> dict[str, Any]:
        raise InputError("nothing here")

    pages.jobs = refuse
    response = client.request("")
    assert response.status == 500
    assert response.body == "the file is damaged: [secret]\n  next:  dtt data check"
    pages.jobs = miss
    assert (client.request("").status, client.request("").body) == (404, "nothing here")


def test_a_bug_in_a_page_is_logged_and_not_shown(
    pages: Site, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(statuses: Sequence[Status]) -> dict[str, Any]:
        raise KeyError("/home/alice/jobs")

    pages.jobs = fail
    with caplog.at_level(logging.WARNING, logger="dtt"):
        response = client.request("")
    assert response.status == 500
    assert response.headers["Content-Type"].startswith("text/plain")
    assert "alice" not in response.body
    assert "Traceback" not in response.body
    assert "\n" not in response.body
    assert "/home/alice/jobs" in caplog.text


def test_nothing_is_logged_for_requests(
    client: Client, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG):
        for first in (client.root, "/", "/\x1b[2J"):
            client.raw(client.head(first))
        client.raw(b"\xff\xfe\r\n\r\n")
    assert caplog.text == ""
    assert capfd.readouterr() == ("", "")


def test_a_client_that_goes_away_during_a_page_is_not_an_error(
    pages: Site, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    started, gone = threading.Event(), threading.Event()

    def large(statuses: Sequence[Status]) -> dict[str, Any]:
        started.set()
        gone.wait(SECONDS)
        return {"title": "x" * 10**7}

    pages.jobs = large
    with pages.served() as client:
        before = connection_threads()
        connection = client.connect()
        connection.sendall(client.head(client.root))
        assert started.wait(SECONDS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
        threads = connection_threads() - before
        gone.set()
        for thread in threads:
            thread.join(SECONDS)
            assert not thread.is_alive()
    assert (caplog.text, capfd.readouterr()) == ("", ("", ""))


def test_data_carries_no_secrets(
    pages: Site, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "correct-horse-battery")
    pages.jobs = lambda _: {"title": "t", "text": "correct-horse-battery", "<b>": "a&b"}
    for path in ("", "jobs.json"):
        body = client.request(path).body
        assert "correct-horse" not in body
        assert "[secret]" in body
    assert json.loads(body)["<b>"] == "a&b"


def test_a_viewer_changes_no_file_of_a_job(pages: Site, client: Client) -> None:
    job = write_job(pages.folder, metrics="one\n")

    def listing() -> dict[Path, tuple[int, int, int]]:
        paths = [pages.folder, *pages.folder.rglob("*")]
        stats = {path: path.lstat() for path in paths}
        return {path: (s.st_mtime_ns, s.st_size, s.st_ino) for path, s in stats.items()}

    before = listing()
    client.request("jobs.json")
    client.request(f"report?job={quote(str(job.root))}")
    assert listing() == before
