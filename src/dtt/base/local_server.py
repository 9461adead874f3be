"""An HTTP server for one user: pages and an API on 127.0.0.1, behind a secret token.

All users of a login node can reach 127.0.0.1, and so can the scripts of any web site that one of
them opens. So each request must carry the token, in its path or in the header Authorization, and a
request without it learns nothing.
"""

from __future__ import annotations

import re
import secrets
import select
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, Protocol

from dtt.base.errors import EnvironmentUnfit
from dtt.base.log import log

LONGEST_LINE = 2**16
"""Bytes of the request line; http.server limits the headers."""
PIECE = 2**16
HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.ASCII | re.IGNORECASE)
"""Hosts by which a browser may address the server, also through `ssh -L`. Any other host is a web
site whose name resolves to 127.0.0.1 (DNS rebinding)."""
# No header of CORS: a page from elsewhere may neither read a response nor send Authorization.
HEADERS = {
    "Cache-Control": "no-store",
    "Connection": "close",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Site(Protocol):
    """A responder to the requests that a server accepted."""

    def answer(self, connection: Connection, path: str, query: str) -> None:
        """Answer a request that had the token; `path` starts after it, or after the first slash."""
        ...


class LocalServer(ThreadingHTTPServer):
    """A server on 127.0.0.1. Each connection has a thread."""

    request_queue_size = 64

    def __init__(self, site: Site, port: int) -> None:
        """Listen on `port` (0: any free port); raise EnvironmentUnfit if it is in use."""
        self.site, self.token = site, secrets.token_urlsafe(24)
        try:
            super().__init__(("127.0.0.1", port), Connection)
        except (OSError, OverflowError) as error:
            raise EnvironmentUnfit(
                f"cannot listen on port {port} of 127.0.0.1",
                why=getattr(error, "strerror", None) or str(error),
                next="choose another port, or 0 for any free port",
            ) from error
        self.url = f"http://127.0.0.1:{self.server_port}/{self.token}/"

    def server_bind(self) -> None:
        """Bind the socket, without HTTPServer's search for a name, which may wait for DNS."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", self.socket.getsockname()[1]

    def serve(self) -> None:
        """Print the address, and answer requests until the user interrupts the server."""
        port = self.server_port
        with self, suppress(KeyboardInterrupt):
            log.info("from another machine: ssh -L %d:127.0.0.1:%d HOST", port, port)
            print(self.url, flush=True)
            self.serve_forever()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an unexpected exception, which has ended a connection."""
        log.warning("a connection of the server failed", exc_info=True)


class Connection(BaseHTTPRequestHandler):
    """A connection, on which one request is answered.

    Keeping connections open for further requests would gain nothing on one machine.
    """

    server: LocalServer
    timeout = 30.0  # seconds of each read and write: a client that went away holds no thread
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # HTTP/0.9 would be answered without a status
    disable_nagle_algorithm = True

    def handle(self) -> None:
        """Answer the request; a client that goes away or is too slow ends the connection."""
        with suppress(ConnectionError, TimeoutError):
            self.raw_requestline = self.rfile.readline(LONGEST_LINE)
            if self.raw_requestline.endswith(b"\n") and self.parse_request():
                self._respond()

    def read_body(self, most: int) -> bytes | None:
        """Return the body of the request; None if it has no length or more than `most` bytes."""
        length = self.headers.get("Content-Length", "")
        if re.fullmatch(r"\d{1,12}", length, re.ASCII) is None or int(length) > most:
            return None
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise ConnectionError
        return body

    def _respond(self) -> None:
        # Not self.path, in which parse_request merges slashes.
        path, _, query = self.requestline.split()[1].partition("?")
        first, *rest = path.split("/", 2)
        hosts = self.headers.get_all("Host", [])
        if (
            self.request_version != "HTTP/1.1"
            or len(hosts) != 1
            or HOST.fullmatch(hosts[0]) is None
            or first != ""
        ):
            self.send(HTTPStatus.FORBIDDEN)
        elif len(rest) == 2 and self._is_token(rest[0]):
            self.server.site.answer(self, rest[1], query)
        elif self._is_token(self.headers.get("Authorization", "").removeprefix("Bearer ")):
            self.server.site.answer(self, path[1:], query)
        else:
            self.send(HTTPStatus.FORBIDDEN)

    def _is_token(self, text: str) -> bool:
        return secrets.compare_digest(text.encode(), self.server.token.encode())

    def gone(self) -> bool:
        """Return True if the client has gone away."""
        # A client has nothing more to send: its socket becomes readable when it goes away.
        poller = select.poll()  # unlike select, for any number of open files
        poller.register(self.connection, select.POLLIN)
        return bool(poller.poll(0))

    def send(self, status: HTTPStatus, text: str = "", kind: str = "text/plain") -> None:
        """Send a complete response."""
        content = text.encode(errors="replace")
        self.send_headers(status, kind, {"Content-Length": str(len(content))})
        if self.command != "HEAD":
            for start in range(0, len(content), PIECE):  # the timeout applies to each write
                self.wfile.write(content[start : start + PIECE])

    def send_headers(
        self, status: HTTPStatus, kind: str, more: Mapping[str, str] | None = None
    ) -> None:
        """Send the status and the headers of a response."""
        self.send_response_only(status)
        headers = {"Date": self.date_time_string(), "Content-Type": f"{kind}; charset=utf-8"}
        for name, value in (headers | HEADERS | dict(more or {})).items():
            self.send_header(name, value)
        self.end_headers()

    def start_stream(self, kind: str) -> None:
        """Send the headers of a response whose chunks follow."""
        self.send_headers(HTTPStatus.OK, kind, {"Transfer-Encoding": "chunked"})

    def send_chunk(self, text: str) -> None:
        """Send a chunk; an empty one ends the response."""
        content = text.encode(errors="replace")
        self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a malformed request like any other, without the explanation of http.server."""
        self.send(HTTPStatus.FORBIDDEN)

    def handle_expect_100(self) -> bool:
        """Send no interim response: it would tell a client without the token what listens here."""
        return True
