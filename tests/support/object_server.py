"""A real S3 protocol server (moto) on the loopback interface, behind a proxy with faults."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from xml.sax.saxutils import escape

import pytest

Fault = Literal["reset", "throttled", "truncated", "cut"] | None
"""`truncated`: the answer ends too early; `cut`: half of what was sent arrives, and counts."""
KEY = "planted-secret-of-the-environment"
LISTED = "bucket-of-"
"""The proxy itself lists `bucket-of-N`: moto sorts all keys for each page of many objects."""
PAGE = 1000
SIGNED = "a/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
"""By this, moto knows that a request is for S3; it checks no signature."""


class ObjectServer:
    """The server and its proxy. `endpoint` is the value of AWS_ENDPOINT_URL."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        self._moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._moto.start()
        self.moto = self._moto.get_host_and_port()
        self.requests: list[tuple[str, str]] = []
        self.fault: Callable[[str, str], Fault] = lambda method, path: None
        """Returns what goes wrong with a request; it may also change an object."""
        self._proxy = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._proxy.serve_forever, daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self._proxy.server_address[1]}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "planted-id-of-the-environment",
            "AWS_SECRET_ACCESS_KEY": KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }
        """Variables with which dtt finds the server."""

    def prepared(self, monkeypatch: pytest.MonkeyPatch) -> ObjectServer:
        """Forget requests and faults of the test before, and let dtt find the server."""
        self.requests.clear()
        self.fault = lambda method, path: None
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("s3fs.S3FileSystem.retries", 3)  # of 5, with growing waits
        return self

    def close(self) -> None:
        self._proxy.shutdown()
        self._proxy.server_close()
        self._moto.stop()

    def call(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Any:
        """Send a request to moto itself; return its status, headers and body."""
        connection = http.client.HTTPConnection(*self.moto)
        given = {"Authorization": f"AWS4-HMAC-SHA256 Credential={SIGNED}"} | headers
        connection.request(method, path, body, given)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, answer.getheaders(), content

    def bucket(self, name: str, files: dict[str, bytes]) -> str:
        """Make a bucket with these objects; return its URL."""
        assert self.call("PUT", f"/{name}")[0] == 200
        for key, content in files.items():
            assert self.call("PUT", f"/{name}/{key}", content)[0] == 200
        return f"s3://{name}"

    def object(self, bucket: str, key: str) -> bytes:
        content: bytes = self.call("GET", f"/{bucket}/{key}")[2]
        return content

    def _handler(server) -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Proxy(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                server.requests.append((self.command, self.path))
                fault = server.fault(self.command, self.path)
                if fault == "reset":
                    linger = struct.pack("ii", 1, 0)  # close() sends RST
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    self.close_connection = True
                    self.connection.close()
                    return
                if fault == "cut":
                    body = body[: len(body) // 2]
                if fault == "throttled":
                    text = b"<Error><Code>SlowDown</Code><Message>slow down</Message></Error>"
                    status, headers, content = 503, [("Content-Type", "application/xml")], text
                elif self.path.startswith(f"/{LISTED}") and "?" in self.path:
                    status, headers, content = 200, [], listing(self.path)
                elif self.path.startswith(f"/{LISTED}"):
                    status, headers, content = 404, [], b""
                else:
                    given = {k: v for k, v in self.headers.items() if k != "Content-Length"}
                    status, headers, content = server.call(self.command, self.path, body, **given)
                self.send_response(status)
                for name, value in headers:
                    if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                        self.send_header(name, value)
                sizes = [value for name, value in headers if name.lower() == "content-length"]
                size = sizes[0] if self.command == "HEAD" and sizes else str(len(content))
                self.send_header("Content-Length", size)
                self.send_header("Connection", "close")  # so that no thread waits for more
                self.end_headers()
                if self.command == "HEAD":
                    return
                if fault == "truncated":
                    self.wfile.write(content[: len(content) // 2])
                else:
                    self.wfile.write(content)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

        return Proxy


def listing(path: str) -> bytes:
    """Return a page of the bucket `bucket-of-N`, in the form of ListObjectsV2."""
    bucket = path[1:].partition("?")[0]
    token = path.partition("continuation-token=")[2].partition("&")[0]
    start = int(token or 0)
    keys = [f"data/{number % 7}/part-{number:06}.jsonl" for number in range(start, start + PAGE)]
    objects = "".join(
        f'<Contents><Key>{escape(key)}</Key><ETag>"{number:032x}"</ETag><Size>10</Size>'
        "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        for number, key in enumerate(keys, start)
    )
    more = start + PAGE < int(bucket.removeprefix(LISTED))
    after = f"<NextContinuationToken>{start + PAGE}</NextContinuationToken>" if more else ""
    return (
        f"<ListBucketResult><Name>{bucket}</Name><KeyCount>{PAGE}</KeyCount>"
        f"<IsTruncated>{str(more).lower()}</IsTruncated>{after}{objects}</ListBucketResult>"
    ).encode()


@contextmanager
def object_server() -> Iterator[ObjectServer]:
    """Serve inside the context."""
    server = ObjectServer()
    try:
        yield server
    finally:
        server.close()
