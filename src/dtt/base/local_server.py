"""An HTTP server for one user: pages and an API on 127.0.0.1, behind a secret token.

All users of a login node can reach 127.0.0.1, and so can the scripts of any web site that one of
them opens. So each request must carry the token, in its path or in the header Authorization, and a
request without it learns nothing.
"""

from __future__ import annotations

import io
import re
import secrets
import select
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, Protocol

from dtt.base.errors import EnvironmentUnfit
from dtt.base.log import log

MAX_CONNECTIONS = 192
"""Maximum number of connections, with and without the token. Each one has a thread."""
PATIENCE_SECONDS = 30.0
"""Time in which a client must send its request, and take each piece of the response."""
LONGEST_HEAD = 2**16
"""Bytes of the request line and the headers."""
PIECE = 2**16
CLOSE_SECONDS = 0.1
"""Time between two looks of the listener at whether it is to close."""
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
    """What a server offers."""

    def answer(self, connection: Connection, path: str, query: str) -> None:
        """Answer a request that had the token; `path` starts after it, or after the first slash."""
        ...


class LocalServer:
    """A server on 127.0.0.1."""

    def __init__(self, site: Site, port: int) -> None:
        """Listen on `port` (0: any free port); raise EnvironmentUnfit if it is in use."""
        self.token = secrets.token_urlsafe(24)
        try:
            self._listener = Listener(site, self.token, port)
        except (OSError, OverflowError) as error:
            raise EnvironmentUnfit(
                f"cannot listen on port {port} of 127.0.0.1",
                why=getattr(error, "strerror", None) or str(error),
                next="choose another port, or 0 for any free port",
            ) from error
        self.port: int = self._listener.server_port
        self.url = f"http://127.0.0.1:{self.port}/{self.token}/"
        self._lock = threading.Lock()
        self._serving = self._closed = False

    def serve(self) -> None:
        """Print the address, and answer requests until the user interrupts the server."""
        try:
            log.info("from another machine: ssh -L %d:127.0.0.1:%d HOST", self.port, self.port)
            print(self.url, flush=True)
            self.serve_forever()
        except KeyboardInterrupt:
            pass
        finally:
            self.close()

    def serve_forever(self) -> None:
        """Answer requests until `close` is called or an exception such as KeyboardInterrupt."""
        with self._lock:
            if self._closed:
                return
            self._serving = True
        self._listener.serve_forever(poll_interval=CLOSE_SECONDS)

    def close(self) -> None:
        """Stop listening. Call it from another thread than `serve_forever`, or after that has
        returned. Connections end by themselves."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._serving:  # else it would wait forever
                self._listener.shutdown()
        self._listener.server_close()


class Listener(ThreadingHTTPServer):
    """The listening socket. Each connection has a thread."""

    request_queue_size = 64

    def __init__(self, site: Site, token: str, port: int) -> None:
        self.site, self.token = site, token
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
        log.warning("a connection of the server failed", exc_info=True)


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
            head, self._body = self._read_head()
            self.rfile.close()
            self.rfile = io.BytesIO(head)
            self.raw_requestline = self.rfile.readline()
            if self.raw_requestline and self.parse_request():
                self._respond()

    def _read_head(self) -> tuple[bytes, bytes]:
        """Return the request line with the headers, and what has arrived of the body.

        The head is empty if it is incomplete or too long.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        received = b""
        while (end := re.search(rb"\r?\n\r?\n", received)) is None:
            piece = self._receive(deadline)
            received += piece
            if not piece or len(received) > LONGEST_HEAD:
                return b"", b""
        self.connection.settimeout(PATIENCE_SECONDS)
        return received[: end.end()], received[end.end() :]

    def _receive(self, deadline: float) -> bytes:
        """Return some bytes; TimeoutError after the deadline."""
        # The deadline covers the complete request: a client may send a byte every second.
        self.connection.settimeout(max(deadline - time.monotonic(), 0.001))
        received: bytes = self.connection.recv(PIECE)
        return received

    def read_body(self, most: int) -> bytes | None:
        """Return the body of the request; None if it has no length or more than `most` bytes."""
        length = self.headers.get("Content-Length", "")
        if re.fullmatch(r"\d{1,12}", length, re.ASCII) is None or int(length) > most:
            return None
        deadline = time.monotonic() + PATIENCE_SECONDS
        pieces, missing = [self._body], int(length) - len(self._body)
        while missing > 0:
            piece = self._receive(deadline)
            if not piece:
                raise ConnectionError
            pieces.append(piece)
            missing -= len(piece)
        self.connection.settimeout(PATIENCE_SECONDS)
        return b"".join(pieces)[: int(length)]

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
