"""Objects behind URLs: S3, Google Cloud Storage, Azure, HTTP and the Hub, through fsspec.

Credentials come from the environment, as each library reads them; none is written anywhere.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import unquote, urlsplit

from dtt.base.errors import DamagedError, EnvironmentUnfit, InputError, StorageError
from dtt.base.log import log
from dtt.base.secrets import redacted

EXTRAS = {
    "s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "abfs": "azure", "abfss": "azure",
    "az": "azure", "https": None, "http": None, "hf": None,
}  # fmt: skip
"""Supported schemes, each with the extra of dtt that installs its library."""
KEYS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; for a public bucket "
    "FSSPEC_S3_ANON=true",
    "gcs": "GOOGLE_APPLICATION_CREDENTIALS; for a public bucket FSSPEC_GS_TOKEN=anon",
    "azure": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or _SAS_TOKEN",
}
"""Variables of the environment that hold the credentials, by extra."""
RANGE_BYTES = 8 * 2**20
"""Size of a request. A reset loses this much at most, and each thread holds one in memory."""
DELAYS = (1, 2, 4, 8, 16, 30)
"""Seconds between attempts, after those that the library itself makes within a second or two."""
PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
PERMANENT_NAMES = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")
LIBRARIES = {
    "aiohttp": "ClientError", "botocore.exceptions": "BotoCoreError", "gcsfs.retry": "HttpError",
    "azure.core.exceptions": "AzureError", "google.auth.exceptions": "GoogleAuthError",
    "huggingface_hub.errors": "HTTPError",
}  # fmt: skip
"""Base classes of the errors that are no OSError, by module. botocore's `ClientError` is not
among them: s3fs translates it."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object in the state in which it was listed."""

    path: str
    """Its name for fsspec."""
    name: str
    """Its name below the URL that was listed."""
    bytes: int
    version: str
    """ETag, generation or blob id, or else the time of its last change."""


class ShortRead(OSError):
    """A response that ended before the bytes that were requested."""


class NoRanges(Exception):
    """A server that answers a request for a range with the complete file, or not at all."""


def urls_of(text: str) -> tuple[str, ...]:
    """Return the URLs that a text names, separated by white space; none if it is no URL.

    Raises InputError for a scheme that dtt does not read.
    """
    urls = tuple(re.split(r"\s+(?=[A-Za-z][A-Za-z0-9+.-]*://)", text.strip()))
    schemes = [match[1] for url in urls if (match := re.match(r"([A-Za-z][\w+.-]*)://", url))]
    if len(schemes) < len(urls):
        return ()
    for scheme in schemes:
        if scheme not in EXTRAS:
            raise InputError(
                f"dtt does not read {scheme}:// URLs",
                why=f"it reads {', '.join(f'{one}://' for one in EXTRAS)}",
                next="copy the files, and name the folder" if scheme != "file" else "name the path",
            )
    return urls


class ObjectStore:
    """The objects below a URL."""

    def __init__(self, url: str) -> None:
        """Prepare access; nothing is requested yet.

        Raises EnvironmentUnfit if the library for this kind of URL is not installed.
        """
        from fsspec.core import url_to_fs

        self.url = url.rstrip("/")
        scheme = url.partition("://")[0]
        self._extra = EXTRAS.get(scheme)
        self._is_web = scheme in ("http", "https")
        options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
        if self._is_web:
            # Otherwise a server may send the bytes compressed, and their number is another.
            options |= {"headers": {"Accept-Encoding": "identity"}}
            options |= {"client_kwargs": {"trust_env": True}}
        try:
            self.fs, self.root = url_to_fs(url if self._is_web else self.url, **options)
        except ImportError as error:
            raise EnvironmentUnfit(
                f"{scheme}:// needs a library that is not installed",
                why=str(error).splitlines()[0],
                next=f"pip install 'dtt-lm[{self._extra}]'",
            ) from None
        except ValueError as error:  # of adlfs without the name of an account
            raise self.refused(error) from None
        if self._extra == "s3":
            _repeat_more()
        self._said = False

    def objects(self) -> Iterator[StoredObject]:
        """Yield the object that the URL names, or all below it, in the order of the store.

        Those of S3 arrive page by page: a listing of any length takes the memory of one page.
        """
        info = self.patiently(self.url, lambda: self.fs.info(self.root))
        if self._is_web or info["type"] == "file":
            name = unquote(urlsplit(self.root).path) if self._is_web else self.root
            name = name.rpartition("/")[2]
            if not name:
                raise InputError(f"{self.url} is not a file", next="name the files themselves")
            yield self._stored(self.root, name, info)
            return
        start = len(self.root) + 1
        for path, info in self._infos():
            if path[start:] and not path.endswith("/"):  # markers of folders
                yield self._stored(path, path[start:], info)

    def _infos(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (path, facts) of all objects below the root."""
        if self._extra != "s3":
            yield from self.patiently(
                self.url, lambda: self.fs.find(self.root, detail=True)
            ).items()
            return
        # `find` of s3fs holds several dicts for each object until the end, 1.5 kB together.
        bucket, prefix, _ = self.fs.split_path(self.root)
        asked = {"Bucket": bucket, "Prefix": prefix and f"{prefix}/"}
        while True:
            page = self.patiently(self.url, lambda: self.fs.call_s3("list_objects_v2", **asked))
            for info in page.get("Contents", ()):
                yield f"{bucket}/{info['Key']}", info | {"size": info["Size"]}
            if not page.get("IsTruncated"):
                return
            asked["ContinuationToken"] = page["NextContinuationToken"]

    def _stored(self, path: str, name: str, info: dict[str, Any]) -> StoredObject:
        if info.get("size") is None:
            raise InputError(
                "the server does not say how large a file is", where=self.shown(path),
                why="without it, a truncated answer is not detected", next="download it yourself",
            )  # fmt: skip
        return StoredObject(path, name, int(info["size"]), version_of(info))

    def shown(self, path: str) -> str:
        """Return the URL of an object for a message."""
        return redacted(path if self._is_web else f"{self.url.partition('://')[0]}://{path}")

    def read(self, one: StoredObject, start: int) -> bytes:
        """Return up to RANGE_BYTES of an object from `start`.

        Raises DamagedError if it is not in its listed state, and NoRanges.
        """
        stop = min(start + RANGE_BYTES, one.bytes)

        def request() -> bytes:
            # A HEAD request; s3fs then asks for this ETag only (If-Match).
            with self.fs.open(one.path, "rb", block_size=RANGE_BYTES, cache_type="none") as stream:
                # The details of a web server's file lack its ETag, and a local file has none.
                details = None if self._is_web else getattr(stream, "details", None)
                self._check(one, details or self.fs.info(one.path))
                try:
                    stream.seek(start)
                    data = bytes(stream.read(stop - start))
                except ValueError:
                    raise NoRanges from None
            if len(data) != stop - start:
                raise ShortRead(f"{len(data)} of {stop - start} bytes arrived")
            return data

        return self.patiently(self.shown(one.path), request)

    def read_complete(self, one: StoredObject, sink: BinaryIO) -> None:
        """Write an object to `sink` from its start, for servers that know no ranges."""

        def request() -> None:
            sink.seek(0)
            sink.truncate()
            with self.fs.open(one.path, "rb", block_size=0) as stream:
                while data := stream.read(RANGE_BYTES):
                    try:
                        sink.write(data)
                    except OSError as error:
                        raise StorageError("cannot write a download", why=str(error)) from None
            if sink.tell() != one.bytes:
                raise ShortRead(f"{sink.tell()} of {one.bytes} bytes arrived")

        self.patiently(self.shown(one.path), request)

    def download(self, one: StoredObject, part: Path) -> Iterator[int]:
        """Complete the incomplete file `part` of an object; yield the number of bytes of each read.

        Raises DamagedError if the object is not in its listed state at the end.
        """
        with part.open("ab") as sink:
            if sink.tell() > one.bytes:
                sink.truncate(0)
            while (start := sink.tell()) < one.bytes:
                try:
                    data = self.read(one, start)
                except NoRanges:
                    self.read_complete(one, sink)
                    yield one.bytes - start
                else:
                    sink.write(data)
                    yield len(data)
        self.check_unchanged(one)

    def check_unchanged(self, one: StoredObject) -> None:
        """Raise DamagedError if an object is no longer in its listed state."""
        shown = self.shown(one.path)
        self._check(one, self.patiently(shown, lambda: self.fs.info(one.path)))

    def _check(self, one: StoredObject, info: dict[str, Any]) -> None:
        now = info.get("size"), version_of(info)
        if now != (one.bytes, one.version):
            raise DamagedError(
                "an object changed while it was downloaded",
                where=self.shown(one.path),
                why=f"{one.bytes} bytes, version {one.version or 'unknown'} when it was listed; "
                f"{now[0]} bytes, version {now[1] or 'unknown'} now",
                next="run the same command again once nothing writes there",
            )

    def patiently(self, shown: str, request: Callable[[], T]) -> T:
        """Return the answer to a request; repeat it with longer waits while the store is busy."""
        for delay in (*DELAYS, None):
            try:
                return request()
            except tuple(store_errors()) as error:
                if is_permanent(error):
                    raise self.refused(error, shown) from None
                if delay is None:
                    raise EnvironmentUnfit(
                        f"cannot read {shown}: tried {len(DELAYS) + 1} times",
                        why=reason(error),
                        next="try again later; what has been fetched is kept",
                    ) from None
                if not self._said:
                    self._said = True
                    log.warning(
                        "%s: %s; such requests are repeated, with longer waits", shown,
                        reason(error),
                    )  # fmt: skip
                time.sleep(delay)
        raise AssertionError

    def refused(self, error: Exception, shown: str | None = None) -> InputError | EnvironmentUnfit:
        """Return the error for a request that would fail again."""
        shown = shown or self.url
        keys = KEYS.get(self._extra or "")
        if isinstance(error, PERMANENT) and not isinstance(error, PermissionError):
            return InputError(
                f"there is nothing at {shown}",
                why=reason(error),
                next="check the name; patterns go into download.include",
            )
        return EnvironmentUnfit(
            f"access to {shown} is refused",
            why=reason(error),
            next=None if keys is None else f"set {keys}",
        )


def version_of(info: dict[str, Any]) -> str:
    """Return what identifies the content of an object, or an empty string."""
    for key in ("generation", "blob_id", "ETag", "etag", "Last-Modified", "last_modified", "mtime"):
        if info.get(key):
            return str(info[key]).strip('"')
    return ""


@functools.cache
def _repeat_more() -> None:
    """Let s3fs repeat requests after a reset and after any answer of 5xx, as it does after others.

    aiobotocore calls a reset EndpointConnectionError, which s3fs takes for permanent, and a HEAD
    that is throttled has no text in which s3fs could find SlowDown. Without this, one of a
    checkpoint's thousand requests fails, and the copy starts again with the first.
    """
    from botocore.exceptions import ClientError, ConnectionError
    from s3fs.core import set_custom_error_handler

    def passes(error: Exception) -> bool:
        if isinstance(error, ClientError):
            status: int = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return status >= 500 or status == 429
        return isinstance(error, ConnectionError)

    set_custom_error_handler(passes)


def store_errors() -> Iterator[type[Exception]]:
    """Yield the classes of errors that the loaded libraries raise for a failed request."""
    yield OSError
    for module, name in LIBRARIES.items():
        if module in sys.modules:
            with suppress(AttributeError):
                yield getattr(importlib.import_module(module), name)


def is_permanent(error: Exception) -> bool:
    """Return True if the same request would fail again."""
    status = getattr(error, "status", getattr(error, "code", None))
    if isinstance(status, int) and 400 <= status < 500 and status not in (408, 429):
        return True
    return isinstance(error, PERMANENT) or type(error).__name__ in PERMANENT_NAMES


def reason(error: Exception) -> str:
    """Return the first line of an error, without secrets."""
    text = str(error).strip() or type(error).__name__
    return redacted(text.splitlines()[0])
