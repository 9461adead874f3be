"""The HTTP server of `dtt report --serve`: pages of jobs, and streams of what changes in them.

It listens on 127.0.0.1, which all users of a login node can reach. So each path starts with a
secret token, and a request without it learns nothing.
"""

from __future__ import annotations

import io
import re
import secrets
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import DttError, EnvironmentUnfit, InputError
from dtt.base.log import log
from dtt.base.secrets import redacted
from dtt.jobs.job_state import Status, examine
from dtt.report.appended_lines import AppendedLines
from dtt.report.live_rows import MAX_STREAMS, Find, LiveRow, Row, RowRefresher

MAX_CONNECTIONS = 192
"""Maximum number of connections, with and without the token. Each one has a thread."""
PATIENCE_SECONDS = 30.0
"""Time in which a client must send its request, and take each piece of the response."""
LONGEST_REQUEST = 2**16
PIECE = 2**16
LOOK_SECONDS = 0.5
"""Time between two looks at the files that a stream follows."""
CLOSE_SECONDS = 0.1
"""Time between two looks of the listener at whether it is to close."""
QUIET_SECONDS = 15.0
"""Time without news after which a stream sends an empty line, so that tunnels keep it open."""
HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.ASCII | re.IGNORECASE)
"""Hosts by which a browser may address the server, also through `ssh -L`. Any other host is a web
site whose name resolves to 127.0.0.1 (DNS rebinding)."""
OFFSET = re.compile(r"\d{1,18}", re.ASCII)
HEADERS = {
    "Cache-Control": "no-store",
    "Connection": "close",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

T = TypeVar("T")
Page = Callable[[Sequence[Status]], str]
News = Callable[[], list[str]]
"""Returns the lines that a stream has not sent yet."""


class BadRequest(DttError):
    """A request that names no jobs, or an invalid offset."""


class LiveServer:
    """A server of the list of jobs, of report pages, and of the news of both."""

    def __init__(
        self, find: Find, list_page: Page, report_page: Page, row: Row, *, port: int = 0
    ) -> None:
        """Listen on `port` of 127.0.0.1 (0: any free port); raise EnvironmentUnfit if it is in use.

        `find` returns the jobs that may be opened, again for each request. `list_page` and
        `report_page` return HTML pages of jobs. `row` returns the JSON object that describes a job.
        """
        self._rows = RowRefresher(find, row)
        site = Site(secrets.token_urlsafe(24), find, list_page, report_page, self._rows)
        try:
            self._listener = Listener(site, port)
        except (OSError, OverflowError) as error:
            raise EnvironmentUnfit(
                f"cannot listen on port {port} of 127.0.0.1",
                why=getattr(error, "strerror", None) or str(error),
                next="choose another port, or 0 for any free port",
            ) from error
        self.port: int = self._listener.server_port
        self.url = f"http://127.0.0.1:{self.port}/{site.token}/"
        self._lock = threading.Lock()
        self._serving = self._closed = False

    def serve_forever(self) -> None:
        """Answer requests until `close` is called or an exception such as KeyboardInterrupt."""
        with self._lock:
            if self._closed:
                return
            self._serving = True
        self._listener.serve_forever(poll_interval=CLOSE_SECONDS)

    def close(self) -> None:
        """Stop listening, and end all streams. Call it from another thread than `serve_forever`,
        or after that has returned."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._serving:  # else it would wait forever
                self._listener.shutdown()
        self._listener.server_close()
        self._rows.close()


@dataclass(frozen=True)
class Site:
    """The content of the server."""

    token: str
    find: Find
    list_page: Page
    report_page: Page
    rows: RowRefresher
    one_at_a_time: threading.Lock = field(default_factory=threading.Lock)

    def page(self, path: str, names: Sequence[str]) -> str:
        """Return the HTML page at a path; raise InputError if there is none."""
        if path == "":
            return self.list_page(self._examined(self.find()))
        if path == "report":
            with self.one_at_a_time:  # each may take a core and a gigabyte for a minute
                return self.report_page(self._examined(self._open(names)))
        raise InputError("there is no such page", next="open the list of jobs")

    def _examined(self, jobs: Sequence[JobDir]) -> list[Status]:
        statuses = examine(jobs)
        self.rows.learn(statuses)
        return statuses

    def open_stream(self, followed: Sequence[str]) -> tuple[Sequence[JobDir] | None, News]:
        """Return the jobs of a stream (None: all) and its news.

        `followed` has `NAME:OFFSET` of each job, as in the page; it is empty for the list of jobs.
        """
        if not followed:
            return None, self._news_of_list()
        pairs = [text.rpartition(":") for text in followed]
        if invalid := [offset for _, _, offset in pairs if OFFSET.fullmatch(offset) is None]:
            raise BadRequest(f"invalid offset {invalid[0]!r}", next="reload the page")
        jobs = self._open([name for name, _, _ in pairs])
        return jobs, self._news_of_report(jobs, [int(offset) for _, _, offset in pairs])

    def _open(self, names: Sequence[str]) -> list[JobDir]:
        if not names:
            raise BadRequest("the address names no job", next="open a job from the list of jobs")
        # Names are looked up, so that no path of a request is ever opened.
        known = {str(job.root): job for job in self.find()}
        if unknown := [name for name in names if name not in known]:
            raise InputError(f"no job {unknown[0]!r}", next="open a job from the list of jobs")
        return [known[name] for name in names]

    def _news_of_list(self) -> News:
        """Return the news of the list of jobs: the rows that have changed."""
        sent: dict[str, str] = {}
        seen: Mapping[str, LiveRow] = {}

        def news() -> list[str]:
            nonlocal seen
            if self.rows.rows is seen:
                return []
            seen = self.rows.rows
            texts = {name: row.complete for name, row in seen.items()}
            changed = {name: text for name, text in texts.items() if sent.get(name) != text}
            sent.update(changed)
            return list(changed.values())

        return news

    def _news_of_report(self, jobs: Sequence[JobDir], offsets: Sequence[int]) -> News:
        """Return the news of a report: new lines after the offsets of metrics, and verdicts."""
        files: dict[int, AppendedLines] = {
            i: AppendedLines(job.metrics, offset)
            for i, (job, offset) in enumerate(zip(jobs, offsets, strict=True))
        }
        sent: dict[int, str] = {}

        def news() -> list[str]:
            lines, rows = [], self.rows.rows
            for i, job in enumerate(jobs):
                row = rows.get(str(job.root))
                if row is not None and sent.get(i) != row.verdict:
                    sent[i] = row.verdict
                    lines.append(f"{i}! {row.verdict}")
                if i not in files:
                    continue
                appended = files[i].read()
                if appended is None:
                    del files[i]
                    lines.append(f"{i}~")
                else:
                    lines += [f"{i} {line}" for line in appended]
            return lines

        return news


class Listener(ThreadingHTTPServer):
    """The listening socket. Each connection has a thread."""

    request_queue_size = 64

    def __init__(self, site: Site, port: int) -> None:
        self.site = site
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(("127.0.0.1", port), Connection)

    def server_bind(self) -> None:
        """Bind the socket, without HTTPServer's search for a name, which may wait for DNS."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", self.socket.getsockname()[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, or close it if there are too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the limit of threads of this user
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an unexpected exception, which has ended a connection."""
        log.warning("a connection of the report server failed", exc_info=True)


class Connection(BaseHTTPRequestHandler):
    """A connection, on which one request is answered.

    Keeping connections open for further requests would gain nothing on one machine.
    """

    server: Listener
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # HTTP/0.9 would be answered without a status
    disable_nagle_algorithm = True

    def handle(self) -> None:
        """Answer the request; a client that goes away or is too slow ends the connection."""
        with suppress(ConnectionError, TimeoutError):
            head = self._read_head()
            self.rfile.close()
            self.rfile = io.BytesIO(head)
            self.raw_requestline = self.rfile.readline()
            if self.raw_requestline and self.parse_request():
                self._respond()

    def _read_head(self) -> bytes:
        """Return the request line and the headers; empty if they are incomplete or too long."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        head = b""
        while b"\r\n\r\n" not in head and b"\n\n" not in head:
            # The deadline covers the complete head: a client may send a byte every second.
            self.connection.settimeout(max(deadline - time.monotonic(), 0.001))
            piece = self.connection.recv(PIECE)
            head += piece
            if not piece or len(head) > LONGEST_REQUEST:
                head = b""
                break
        self.connection.settimeout(PATIENCE_SECONDS)
        return head

    def _respond(self) -> None:
        # Not self.path, in which parse_request merges slashes.
        path, _, query = self.requestline.split()[1].partition("?")
        parts = path.split("/", 2)
        hosts = self.headers.get_all("Host", [])
        token = self.server.site.token.encode()
        if (
            self.request_version != "HTTP/1.1"
            or len(hosts) != 1
            or HOST.fullmatch(hosts[0]) is None
            or len(parts) < 3
            or parts[0] != ""
            or not secrets.compare_digest(parts[1].encode(), token)
        ):
            self._send(HTTPStatus.FORBIDDEN)
        elif self.command not in ("GET", "HEAD"):
            self._send(HTTPStatus.METHOD_NOT_ALLOWED)
        elif parts[2] == "stream":
            self._answer_stream(query)
        else:
            self._answer_page(parts[2], query)

    def _answer_page(self, path: str, query: str) -> None:
        page = self._guarded(lambda: self.server.site.page(path, _parse(query)))
        if page is not None:
            self._send(HTTPStatus.OK, page, "text/html")

    def _answer_stream(self, query: str) -> None:
        site = self.server.site
        opened = self._guarded(lambda: site.open_stream(_parse(query)))
        if opened is None:
            return
        jobs, news = opened
        if self.command == "HEAD":
            self._send_headers(HTTPStatus.OK, "text/plain")
        elif site.rows.enter(jobs):
            try:
                self._send_headers(HTTPStatus.OK, "text/plain", {"Transfer-Encoding": "chunked"})
                self._send_news(news, site.rows.closing)
            finally:
                site.rows.leave(jobs)
        else:
            text = f"{MAX_STREAMS} pages are open already; close one of them"
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, text)

    def _guarded(self, action: Callable[[], T]) -> T | None:
        """Return `action()`; if it fails, send the reason and return None."""
        try:
            return action()
        except DttError as error:
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            if isinstance(error, BadRequest | InputError):
                known = isinstance(error, BadRequest)
                status = HTTPStatus.BAD_REQUEST if known else HTTPStatus.NOT_FOUND
            self._send(status, redacted(str(error)))
        except Exception:  # noqa: BLE001  a bug in one page must not end the others
            log.warning("a request to the report server failed", exc_info=True)
            text = "dtt cannot show this page: the log of dtt report --serve has the reason"
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, text)
        return None

    def _send_news(self, news: News, closing: threading.Event) -> None:
        """Send lines as they come, until the client goes away or the server closes."""
        poller = select.poll()  # unlike select, for any number of open files
        poller.register(self.connection, select.POLLIN)
        milliseconds, last = 0.0, time.monotonic()
        # A client has nothing more to send: its socket becomes readable when it goes away.
        while not poller.poll(milliseconds):
            if closing.is_set():
                self.wfile.write(b"0\r\n\r\n")
                return
            lines = news()
            milliseconds = 0.0 if lines else 1000 * LOOK_SECONDS
            if lines or time.monotonic() - last >= QUIET_SECONDS:
                content = ("\n".join(lines) + "\n").encode()
                self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))
                last = time.monotonic()

    def _send(self, status: HTTPStatus, text: str = "", kind: str = "text/plain") -> None:
        """Send a complete response."""
        content = text.encode(errors="replace")
        self._send_headers(status, kind, {"Content-Length": str(len(content))})
        if self.command != "HEAD":
            for start in range(0, len(content), PIECE):  # the timeout applies to each write
                self.wfile.write(content[start : start + PIECE])

    def _send_headers(
        self, status: HTTPStatus, kind: str, more: Mapping[str, str] | None = None
    ) -> None:
        self.send_response_only(status)
        headers = {"Date": self.date_time_string(), "Content-Type": f"{kind}; charset=utf-8"}
        for name, value in (headers | HEADERS | dict(more or {})).items():
            self.send_header(name, value)
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a malformed request like any other, without the explanation of http.server."""
        self._send(HTTPStatus.FORBIDDEN)

    def handle_expect_100(self) -> bool:
        """Send no interim response: it would tell a client without the token what listens here."""
        return True


def _parse(query: str) -> list[str]:
    """Return the values of `job` in the query of a URL, in order."""
    # A file name that is not UTF-8 is percent-encoded bytes here, and surrogates in Python.
    fields = parse_qsl(query, keep_blank_values=True, errors="surrogateescape")
    if other := [name for name, _ in fields if name != "job"]:
        raise BadRequest(f"unknown parameter {other[0]!r}", next="open a job from the list of jobs")
    return [value for _, value in fields]
