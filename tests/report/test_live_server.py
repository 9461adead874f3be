"""The live server: it answers only those who know its token, and streams what jobs append."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from dtt.artifacts.jobdir import JobDir
from dtt.base import local_server
from dtt.base.errors import DamagedError, EnvironmentUnfit, InputError
from dtt.jobs.job_state import Status, find
from dtt.report import live_rows, live_server
from dtt.report.live_rows import MAX_STREAMS
from dtt.report.live_server import LiveServer

SECONDS = 10.0
"""Longest time that a test waits for something that must happen."""


def write_job(folder: Path, name: str = "a", metrics: str = "") -> JobDir:
    """A job that has started once and trains somewhere else."""
    job = JobDir(folder / "jobs" / name)
    (job.root / "attempts/1/ranks").mkdir(parents=True)
    (job.root / "attempts/1/ranks/00000.json").write_text("{}")
    job.config.write_text("name: t\n")
    job.metrics.write_text(metrics)
    return job


def end(job: JobDir, reason: str) -> None:
    record = {"code": 76, "reason": reason, "step": 8, "rank": 0, "node": "n1"}
    (job.root / "attempts/1/exit.json").write_text(json.dumps(record))
    with job.metrics.open("a"):
        os.utime(job.metrics, ns=(1, job.metrics.stat().st_mtime_ns + 1))


def append(job: JobDir, text: str) -> None:
    with job.metrics.open("a", encoding="utf-8") as file:
        file.write(text)


def names_of(statuses: Sequence[Status]) -> str:
    return "<p>" + "|".join(str(status.job.root) for status in statuses)


@dataclass
class Pages:
    """What the server is made of, and what it has called."""

    folder: Path
    list_page: Callable[[Sequence[Status]], str] = names_of
    report_page: Callable[[Sequence[Status]], str] = names_of
    rows: list[str] = field(default_factory=list)
    """Name of the job of each call of `row`."""
    progress: int = 0

    def find(self) -> list[JobDir]:
        return find(self.folder / "jobs")

    def row(self, status: Status) -> dict[str, Any]:
        self.rows.append(str(status.job.root))
        verdict = {"state": status.state.value, "detail": status.detail}
        return {"job": str(status.job.root), "verdict": verdict, "calls": self.progress}

    def _show_list(self, statuses: Sequence[Status]) -> str:
        return self.list_page(statuses)

    def _show_report(self, statuses: Sequence[Status]) -> str:
        return self.report_page(statuses)

    @contextmanager
    def served(self) -> Iterator[Client]:
        server = LiveServer(
            self.find,
            self._show_list,
            self._show_report,
            self.row,
        )
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Client(server, self)
        finally:
            server.close()
            thread.join(SECONDS)
            assert not thread.is_alive()


class Client:
    """A browser, as far as the server can tell."""

    def __init__(self, server: LiveServer, pages: Pages) -> None:
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

    def stream(self, *jobs: tuple[JobDir, int]) -> Stream:
        query = "&".join(f"job={quote(f'{job.root}:{offset}')}" for job, offset in jobs)
        connection = self.connect()
        connection.sendall(self.head(f"{self.root}stream{'?' * bool(query)}{query}"))
        return Stream(connection)


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


class Stream:
    """A stream of lines. `wire` is all that arrived after the headers."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.wire = b""
        self._lines: list[str] = []
        self._rest = b""
        self._read = 0
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            byte = connection.recv(1)
            assert byte, head
            head += byte
        self.head = Response.parse(head)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()

    def line(self) -> str:
        """The next line; TimeoutError if there is none for SECONDS, EOFError after the last."""
        while not self._lines:
            self._receive_chunk()
        return self._lines.pop(0)

    def lines(self, count: int) -> list[str]:
        return [self.line() for _ in range(count)]

    def metrics(self, count: int) -> list[str]:
        """The next lines of metrics, without rows of jobs."""
        found: list[str] = []
        while len(found) < count:
            line = self.line()
            if not re.match(r"\d+!", line):
                found.append(line)
        return found

    def quiet(self) -> bool:
        """True if nothing arrives within two looks of the server."""
        self.connection.settimeout(2 * live_server.LOOK_SECONDS)
        try:
            self.line()
        except TimeoutError:
            return True
        finally:
            self.connection.settimeout(SECONDS)
        return False

    def _receive_chunk(self) -> None:
        while b"\r\n" not in self.wire[self._read :]:
            self._receive()
        size, _, rest = self.wire[self._read :].partition(b"\r\n")
        length = int(size, 16)
        while len(rest) < length + 2:
            rest += self._receive()
        assert rest[length : length + 2] == b"\r\n"
        if length == 0:
            raise EOFError
        self._read += len(size) + 2 + length + 2
        *complete, self._rest = (self._rest + rest[:length]).split(b"\n")
        self._lines += [line.decode() for line in complete]

    def _receive(self) -> bytes:
        piece = self.connection.recv(65536)
        if not piece:
            raise EOFError("the stream was cut off")
        self.wire += piece
        return piece


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pages:
    monkeypatch.setenv("PATH", str(tmp_path))  # there is no Slurm to ask
    (tmp_path / "jobs").mkdir()
    return Pages(tmp_path)


@pytest.fixture
def client(pages: Pages) -> Iterator[Client]:
    with pages.served() as client:
        yield client


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A server of one job, for tests that change nothing."""
    pages = Pages(tmp_path_factory.mktemp("unchanged"))
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
    "GET /WRONG/stream HTTP/1.1",
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
]


@pytest.mark.parametrize("first", REFUSED, ids=range(len(REFUSED)))
def test_a_request_that_is_not_exactly_right_learns_nothing(unchanged: Client, first: str) -> None:
    client = unchanged
    head = first.replace("TOKEN", client.token).replace("WRONG", "A" * len(client.token))
    received = client.raw(f"{head}\r\nHost: 127.0.0.1:{client.port}\r\n\r\n".encode("latin-1"))
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
    ],
)  # fmt: skip
def test_a_web_site_whose_name_resolves_to_this_machine_is_refused(
    unchanged: Client, host: str
) -> None:
    response = Response.parse(unchanged.raw(unchanged.head(unchanged.root, host=host)))
    assert (response.status, response.body) == (403, "")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:9999", "[::1]:8080"])
def test_any_port_of_this_machine_is_answered_since_ssh_forwards_others(
    unchanged: Client, host: str
) -> None:
    assert Response.parse(unchanged.raw(unchanged.head(unchanged.root, host=host))).status == 200


def test_a_request_without_a_host_is_refused(unchanged: Client) -> None:
    received = unchanged.raw(f"GET {unchanged.root} HTTP/1.1\r\n\r\n".encode())
    assert Response.parse(received).status == 403


@pytest.mark.parametrize(
    "head", [b"GET /" + b"x" * 10**6 + b" HTTP/1.1", b"GET / HTTP/1.1\r\nX: " + b"y" * 10**6]
)
def test_an_endless_request_is_not_answered(unchanged: Client, head: bytes) -> None:
    assert unchanged.raw(head + b"\r\n") == b""


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "FOO"])
@pytest.mark.parametrize("path", ["", "report", "stream", "other"])
def test_only_reading_is_allowed(unchanged: Client, method: str, path: str) -> None:
    response = unchanged.request(path, method)
    assert (response.status, response.body) == (405, "")


def test_two_servers_have_different_long_tokens(pages: Pages) -> None:
    with pages.served() as one, pages.served() as other:
        assert one.token != other.token
        assert min(len(one.token), len(other.token)) >= 32
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]+/", one.server.url)
        assert other.raw(other.head(one.root)).startswith(b"HTTP/1.1 403 ")


def test_the_server_listens_on_the_loopback_interface_only(client: Client) -> None:
    address = client.server._listener.socket.getsockname()
    assert address == ("127.0.0.1", client.port)


def test_a_port_in_use_is_an_error_that_names_it(client: Client) -> None:
    with pytest.raises(EnvironmentUnfit, match=rf"port {client.port} .*\n.*in use\n.*next:  "):
        LiveServer(list, names_of, names_of, lambda status: {}, port=client.port)
    with pytest.raises(EnvironmentUnfit, match="port 99999 "):
        LiveServer(list, names_of, names_of, lambda status: {}, port=99999)


# ---- pages ---------------------------------------------------------------------------------------


def test_pages_show_the_jobs_that_are_asked_for(pages: Pages, client: Client) -> None:
    one, two, three = (write_job(pages.folder, name) for name in "abc")
    response = client.request("")
    assert (response.status, response.body) == (200, f"<p>{one.root}|{two.root}|{three.root}")
    assert response.headers["Content-Type"] == "text/html; charset=utf-8"
    assert response.headers["Cache-Control"] == "no-store"
    assert response.headers["Referrer-Policy"] == "no-referrer"
    assert response.headers["X-Frame-Options"] == "DENY"
    assert "Server" not in response.headers
    asked = f"report?job={quote(str(three.root))}&job={quote(str(one.root))}"
    assert client.request(asked).body == f"<p>{three.root}|{one.root}"


def test_a_job_that_appears_later_is_listed(pages: Pages, client: Client) -> None:
    assert client.request("").body == "<p>"
    job = write_job(pages.folder)
    assert client.request("").body == f"<p>{job.root}"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("report?job=jobs/unknown", 404),
        ("report?job=/etc", 404),
        ("report?job={job}/", 404),
        ("report?job={job}/../a", 404),
        ("report?job={job}%00", 404),
        ("report?job=", 404),
        ("report", 400),
        ("report?jobs=a", 400),
        ("stream?job={job}", 400),
        ("stream?job={job}:-1", 400),
        ("stream?job={job}:x", 400),
        ("stream?job={job}:1.5", 400),
        ("stream?job={job}:", 400),
        ("stream?job={job}:%D9%A3", 400),
        ("stream?job={job}:99999999999999999999999", 400),
        ("stream?job=/etc:0", 404),
        ("other", 404),
        ("report/", 404),
        ("../report", 404),
        ("/report", 404),
        ("#report", 404),
    ],
)
def test_what_does_not_exist_is_an_error_in_plain_text(
    unchanged: Client, path: str, status: int
) -> None:
    response = unchanged.request(path.format(job=unchanged.pages.folder / "jobs/a"))
    assert (response.status, response.headers["Content-Type"]) == (
        status, "text/plain; charset=utf-8",
    )  # fmt: skip
    assert "next:" in response.body


def test_head_is_answered_like_get_without_a_body(pages: Pages, client: Client) -> None:
    job = write_job(pages.folder)
    name = quote(str(job.root))
    for path in ("", f"report?job={name}", "report?job=unknown"):
        got, headers = client.request(path), client.request(path, "HEAD")
        assert (headers.status, headers.body) == (got.status, "")
        assert headers.headers | {"Date": ""} == got.headers | {"Date": ""}
    stream = client.request(f"stream?job={name}:0", "HEAD")
    assert (stream.status, stream.body) == (200, "")


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
def test_hostile_names_of_jobs_survive_the_query(pages: Pages, client: Client, name: str) -> None:
    job, other = write_job(pages.folder, name, "one\n"), write_job(pages.folder, "other")
    opened: list[str] = []
    pages.report_page = lambda statuses: str(opened.extend(str(s.job.root) for s in statuses))
    asked = f"job={quote(os.fsencode(str(job.root)))}"
    assert client.request(f"report?job={quote(str(other.root))}&{asked}").status == 200
    assert opened == [str(other.root), str(job.root)]
    connection = client.connect()
    connection.sendall(client.head(f"{client.root}stream?{asked}:0"))
    with Stream(connection) as stream:
        lines = stream.lines(2)
    assert sorted(lines)[0] == "0 one"
    assert json.loads(sorted(lines)[1].removeprefix("0! "))["state"] == "running"


def test_an_error_of_dtt_is_shown(pages: Pages, client: Client) -> None:
    def refuse(statuses: Sequence[Status]) -> str:
        raise DamagedError("the file is damaged: hf_" + "x" * 30, next="dtt data check")

    def miss(statuses: Sequence[Status]) -> str:
        raise InputError("nothing here")

    pages.list_page = refuse
    response = client.request("")
    assert response.status == 500
    assert response.body == "the file is damaged: [secret]\n  next:  dtt data check"
    pages.list_page = miss
    assert (client.request("").status, client.request("").body) == (404, "nothing here")


def test_a_bug_in_a_page_is_logged_and_not_shown(
    pages: Pages, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(statuses: Sequence[Status]) -> str:
        raise KeyError("/home/alice/jobs")

    pages.list_page = fail
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
    pages: Pages, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    started, gone = threading.Event(), threading.Event()

    def large(statuses: Sequence[Status]) -> str:
        started.set()
        gone.wait(SECONDS)
        return "x" * 10**7

    pages.list_page = large
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


# ---- streams of metrics --------------------------------------------------------------------------


def test_a_stream_sends_the_lines_after_the_offset_of_each_job(
    pages: Pages, client: Client
) -> None:
    one = write_job(pages.folder, "a", "1\n22\n333\n")
    two = write_job(pages.folder, "b", '{"é": 1}\n')
    with client.stream((two, 0), (one, 2)) as stream:
        assert stream.head.status == 200
        assert stream.head.headers["Transfer-Encoding"] == "chunked"
        assert stream.head.headers["Content-Type"] == "text/plain; charset=utf-8"
        assert stream.head.headers["X-Content-Type-Options"] == "nosniff"
        assert sorted(stream.metrics(3)) == ['0 {"é": 1}', "1 22", "1 333"]
        append(one, "4444\n55")
        assert stream.metrics(1) == ["1 4444"]
        append(two, "6\n")
        assert stream.metrics(1) == ["0 6"]
        append(one, "555\n")
        assert stream.metrics(1) == ["1 55555"]


def test_a_record_that_is_appended_arrives_within_five_seconds(
    pages: Pages, client: Client
) -> None:
    job = write_job(pages.folder)
    with client.stream((job, 0)) as stream:
        stream.connection.settimeout(5)
        for i in range(3):
            append(job, f"{i}\n")
            assert stream.metrics(1) == [f"0 {i}"]


def test_a_stream_sends_no_more_bytes_than_were_appended(pages: Pages, client: Client) -> None:
    job = write_job(pages.folder)
    record = {
        "kind": "train", "step": 1234, "loss": 4.123456789012345, "lr": 0.0012, "tokens": 123456789,
        "grad_norm": 1.0123456789012345, "ledger": "0123456789abcdef" * 2, "time": 1760000000.123,
    }  # fmt: skip
    content = "".join(json.dumps(record | {"step": i}) + "\n" for i in range(10))
    assert 1800 < len(content) < 2200
    with client.stream((job, 0)) as stream:
        for _ in range(10):  # log lines
            append(job, content)
            assert stream.metrics(10) == [f"0 {line}" for line in content.splitlines()]
        assert 0.95 < len(stream.wire) / (10 * len(content)) < 1.05


def test_an_idle_stream_is_silent(pages: Pages, client: Client) -> None:
    job = write_job(pages.folder, metrics="one\n")
    with client.stream((job, 4)) as stream:
        assert stream.line().startswith("0! ")
        assert stream.quiet()


def test_an_empty_line_keeps_an_idle_stream_open(
    pages: Pages, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write_job(pages.folder)
    monkeypatch.setattr(live_server, "QUIET_SECONDS", 0.0)
    with client.stream((job, 0)) as stream:
        assert stream.metrics(2) == ["", ""]
        assert stream.wire.count(b"1\r\n\n\r\n") == 2


def test_an_incomplete_line_is_held_back(pages: Pages, client: Client) -> None:
    job = write_job(pages.folder, metrics="one\ntw")
    with client.stream((job, 0)) as stream:
        assert stream.metrics(1) == ["0 one"]
        append(job, "o\nthr")
        assert stream.metrics(1) == ["0 two"]
        append(job, "ee\n")
        assert stream.metrics(1) == ["0 three"]


def test_the_page_is_told_once_that_a_job_resumed(pages: Pages, client: Client) -> None:
    one, two = write_job(pages.folder, "a", "one\ntwo\n"), write_job(pages.folder, "b")
    with client.stream((one, 8), (two, 0)) as stream:
        append(one, "three\n")
        assert stream.metrics(1) == ["0 three"]
        other = one.root / "other"
        other.write_text("one\ntwo\n")
        other.replace(one.metrics)
        assert stream.metrics(1) == ["0~"]
        append(one, "no longer followed\n")
        append(two, "followed\n")
        assert stream.metrics(1) == ["1 followed"]


@pytest.mark.parametrize("offset", [2, 5, 10**15])
def test_an_offset_that_does_not_fit_the_file_reloads_the_page(
    pages: Pages, client: Client, offset: int
) -> None:
    job = write_job(pages.folder, metrics="one\n")
    with client.stream((job, offset)) as stream:
        assert stream.metrics(1) == ["0~"]


def test_metrics_of_a_job_that_has_not_started_are_waited_for(pages: Pages, client: Client) -> None:
    job = write_job(pages.folder)
    job.metrics.unlink()
    with client.stream((job, 0)) as stream:
        stream.line()
        append(job, "one\n")
        assert stream.metrics(1) == ["0 one"]


def test_streams_carry_no_secrets(
    pages: Pages, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "correct-horse-battery")
    job = write_job(pages.folder)
    end(job, "cannot open https://user:hunter2hunter2@host")
    append(job, json.dumps({"text": "correct-horse-battery\n", "url": "s3://b?key=abc"}) + "\n")
    with client.stream((job, 0)) as stream:
        lines = sorted(stream.lines(2))
    assert json.loads(lines[0][2:]) == {"text": "[secret]\n", "url": "s3://b[secret]"}
    assert json.loads(lines[1][3:])["detail"] == "cannot open https://[secret]host"


def test_a_slow_page_does_not_delay_streams(pages: Pages, client: Client) -> None:
    job = write_job(pages.folder)
    started, released = threading.Event(), threading.Event()

    def slow(statuses: Sequence[Status]) -> str:
        started.set()
        released.wait(SECONDS)
        return "slow"

    pages.report_page = slow
    with client.stream((job, 0)) as stream, client.connect() as page:
        page.sendall(client.head(f"{client.root}report?job={quote(str(job.root))}"))
        assert started.wait(SECONDS)
        append(job, "one\n")
        assert stream.metrics(1) == ["0 one"]
        released.set()
        assert b"200 OK" in page.recv(65536)


def test_a_viewer_changes_no_file_of_a_job(pages: Pages, client: Client) -> None:
    job = write_job(pages.folder, metrics="one\n")
    end(job, "why")

    def listing() -> dict[Path, tuple[int, int, int]]:
        paths = [pages.folder, *pages.folder.rglob("*")]
        stats = {path: path.lstat() for path in paths}
        return {path: (s.st_mtime_ns, s.st_size, s.st_ino) for path, s in stats.items()}

    before = listing()
    with client.stream((job, 0)) as stream, client.stream() as jobs:
        stream.lines(2)
        jobs.line()
        client.request("")
        client.request(f"report?job={quote(str(job.root))}")
    assert listing() == before


# ---- streams of states ---------------------------------------------------------------------------


def test_a_row_is_sent_when_it_changes_and_only_then(
    pages: Pages, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_rows, "STATE_SECONDS", 0.1)
    monkeypatch.setattr(live_rows, "COMPLETE_SECONDS", 0.0)
    one, two = write_job(pages.folder, "a"), write_job(pages.folder, "b")
    with client.stream() as jobs, client.stream((two, 0), (one, 0)) as report:
        rows = [json.loads(line) for line in jobs.lines(2)]
        assert [row["job"] for row in rows] == [str(one.root), str(two.root)]
        assert {line[:3] for line in report.lines(2)} == {"0! ", "1! "}
        before = len(pages.rows)
        assert jobs.quiet()
        assert report.quiet()
        assert len(pages.rows) > before + 2  # they were examined, and had not changed
        end(one, "training diverged")
        verdict = {"state": "diverged", "detail": "training diverged"}
        assert json.loads(jobs.line()) == {"job": str(one.root), "verdict": verdict, "calls": 0}
        assert report.line() == f"1! {json.dumps(verdict)}"
        pages.progress = 1  # a report knows the progress from the metrics
        assert {json.loads(line)["calls"] for line in jobs.lines(2)} == {1}
        assert jobs.quiet()
        assert report.quiet()


def test_a_job_that_appears_later_comes_with_the_list(
    pages: Pages, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_rows, "STATE_SECONDS", 0.1)
    with client.stream() as jobs:
        job = write_job(pages.folder)
        assert json.loads(jobs.line())["job"] == str(job.root)


def test_jobs_are_examined_once_for_all_streams_and_only_if_they_are_followed(
    pages: Pages, client: Client
) -> None:
    job, other = write_job(pages.folder, "a"), write_job(pages.folder, "b")
    with ExitStack() as stack:
        streams = [stack.enter_context(client.stream((job, 0))) for _ in range(8)]
        for stream in streams:
            assert stream.line().startswith("0! ")
    assert len(pages.rows) < len(streams)
    assert str(other.root) not in pages.rows


def test_ended_jobs_are_examined_again_only_after_their_files_have_changed(
    pages: Pages, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_rows, "STATE_SECONDS", 0.05)
    ended, running = write_job(pages.folder, "a"), write_job(pages.folder, "b")
    end(ended, "why")
    with client.stream() as jobs:
        states = [json.loads(line)["verdict"]["state"] for line in jobs.lines(2)]
        assert states == ["diverged", "running"]
        assert jobs.quiet()
        assert pages.rows.count(str(ended.root)) == 1
        assert pages.rows.count(str(running.root)) > 1
        (ended.root / "attempts/2").mkdir()
        changed = json.loads(jobs.line())
        assert (changed["job"], changed["verdict"]["state"]) == (str(ended.root), "running")


def test_nothing_is_examined_while_nobody_is_connected(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_rows, "STATE_SECONDS", 0.05)
    monkeypatch.setattr(live_rows, "COMPLETE_SECONDS", 0.0)
    write_job(pages.folder)
    examined = threading.Event()
    pages.find = lambda: (examined.set(), Pages.find(pages))[1]
    with pages.served() as client:
        assert not examined.wait(0.5)
        before = connection_threads()
        with client.stream() as jobs:
            jobs.line()
            threads = connection_threads() - before
        for thread in threads:
            thread.join(SECONDS)
        examined.wait(0.2)  # the last examination
        examined.clear()
        assert not examined.wait(0.5)


def test_an_error_while_jobs_are_examined_is_logged_once_and_does_not_end_the_rows(
    pages: Pages, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live_rows, "STATE_SECONDS", 0.02)
    write_job(pages.folder)
    failures = iter(range(5))

    def row(status: Status) -> dict[str, Any]:
        if next(failures, None) is not None:
            raise ValueError("a bug")
        return {"job": str(status.job.root), "verdict": {}}

    pages.row = row
    with (
        caplog.at_level(logging.WARNING, logger="dtt"),
        pages.served() as client,
        client.stream() as jobs,
    ):
        assert json.loads(jobs.line())["verdict"] == {}
    assert caplog.text.count("cannot read the states of the jobs: a bug") == 1


# ---- connections ---------------------------------------------------------------------------------


def test_a_client_that_went_away_frees_its_thread(pages: Pages, client: Client) -> None:
    job = write_job(pages.folder)
    before = connection_threads()
    with client.stream((job, 0)) as stream, client.stream() as jobs:
        stream.line()
        jobs.line()
        threads = connection_threads() - before
        assert len(threads) == 2
    for thread in threads:  # nothing is appended
        thread.join(SECONDS)
        assert not thread.is_alive()


def test_there_are_at_most_64_streams(pages: Pages, client: Client) -> None:
    job = write_job(pages.folder)
    before = connection_threads()
    with ExitStack() as stack:
        for _ in range(MAX_STREAMS):
            assert stack.enter_context(client.stream((job, 0))).head.status == 200
        refused = client.request(f"stream?job={quote(str(job.root))}:0")
        assert (refused.status, refused.body[:3]) == (503, "64 ")
        assert client.request("").status == 200  # pages are still shown
        threads = connection_threads() - before
    for thread in threads:
        thread.join(SECONDS)
    with client.stream((job, 0)) as stream:
        assert stream.head.status == 200


def test_connections_without_a_request_are_limited_and_closed(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_server, "MAX_CONNECTIONS", 4)
    with pages.served() as client, ExitStack() as stack:
        before = connection_threads()
        idle = [stack.enter_context(client.connect()) for _ in range(4)]
        with suppress(ConnectionError):
            assert client.raw(client.head(client.root)) == b""
        threads = connection_threads() - before
        for connection in idle:
            connection.close()
        for thread in threads:
            thread.join(SECONDS)
        assert client.request("").status == 200


def test_a_client_that_sends_its_request_too_slowly_is_disconnected(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_server, "PATIENCE_SECONDS", 0.3)
    with pages.served() as client, client.connect() as silent, client.connect() as slow:
        assert silent.recv(1) == b""
        slow.settimeout(0.02)
        with suppress(ConnectionError):
            for _ in range(1000):
                slow.send(b"x")
                try:
                    assert slow.recv(1) == b""
                    break
                except TimeoutError:
                    pass
            else:
                pytest.fail("it may send a byte now and then forever")


def test_closing_ends_all_streams(pages: Pages) -> None:
    job = write_job(pages.folder)
    before = connection_threads()
    with pages.served() as client:
        stream, jobs = client.stream((job, 0)), client.stream()
        stream.line()
        jobs.line()
        threads = connection_threads() - before
        client.server.close()
        for ended in (stream, jobs):
            with pytest.raises(EOFError, match=r"^$"), ended:
                ended.line()
        with pytest.raises(ConnectionError):
            client.connect()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()


def test_a_server_that_never_served_can_be_closed_twice() -> None:
    server = LiveServer(list, names_of, names_of, lambda status: {})
    address = ("127.0.0.1", server.port)
    socket.create_connection(address, SECONDS).close()
    server.close()
    server.close()
    server.serve_forever()  # returns at once
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, SECONDS)
