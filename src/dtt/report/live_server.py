"""The server of `dtt report --serve`: pages of jobs, and streams of what changes in them."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TypeVar
from urllib.parse import parse_qsl

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import DttError, InputError
from dtt.base.local_server import Connection, LocalServer
from dtt.base.log import log
from dtt.base.secrets import redacted
from dtt.jobs.job_state import Status, examine
from dtt.report.appended_lines import AppendedLines
from dtt.report.live_rows import MAX_STREAMS, Find, LiveRow, Row, RowRefresher

LOOK_SECONDS = 0.5
"""Time between two looks at the files that a stream follows."""
QUIET_SECONDS = 15.0
"""Time without news after which a stream sends an empty line, so that tunnels keep it open."""
OFFSET = re.compile(r"\d{1,18}", re.ASCII)

T = TypeVar("T")
Page = Callable[[Sequence[Status]], str]
News = Callable[[], list[str]]
"""Returns the lines that a stream has not sent yet."""


class BadRequest(DttError):
    """A request that names no jobs, or an invalid offset."""


class LiveServer(LocalServer):
    """A server of the list of jobs, of report pages, and of the news of both."""

    def __init__(
        self, find: Find, list_page: Page, report_page: Page, row: Row, *, port: int = 0
    ) -> None:
        """Listen on `port` of 127.0.0.1 (0: any free port); raise EnvironmentUnfit if it is in use.

        `find` returns the jobs that may be opened, again for each request. `list_page` and
        `report_page` return HTML pages of jobs. `row` returns the JSON object that describes a job.
        """
        self._rows = RowRefresher(find, row)
        super().__init__(Pages(find, list_page, report_page, self._rows), port)

    def close(self) -> None:
        """Stop listening, and end all streams; see LocalServer."""
        super().close()
        self._rows.close()


@dataclass(frozen=True)
class Pages:
    """The content of the server."""

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

    def answer(self, connection: Connection, path: str, query: str) -> None:
        """Answer a request for a page or a stream."""
        if connection.command not in ("GET", "HEAD"):
            connection.send(HTTPStatus.METHOD_NOT_ALLOWED)
        elif path == "stream":
            self._answer_stream(connection, query)
        else:
            page = _guarded(connection, lambda: self.page(path, _parse(query)))
            if page is not None:
                connection.send(HTTPStatus.OK, page, "text/html")

    def _answer_stream(self, connection: Connection, query: str) -> None:
        opened = _guarded(connection, lambda: self.open_stream(_parse(query)))
        if opened is None:
            return
        jobs, news = opened
        if connection.command == "HEAD":
            connection.send_headers(HTTPStatus.OK, "text/plain")
        elif self.rows.enter(jobs):
            try:
                connection.start_stream("text/plain")
                _send_news(connection, news, self.rows.closing)
            finally:
                self.rows.leave(jobs)
        else:
            text = f"{MAX_STREAMS} pages are open already; close one of them"
            connection.send(HTTPStatus.SERVICE_UNAVAILABLE, text)


def _guarded(connection: Connection, action: Callable[[], T]) -> T | None:
    """Return `action()`; if it fails, send the reason and return None."""
    try:
        return action()
    except DttError as error:
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        if isinstance(error, BadRequest | InputError):
            known = isinstance(error, BadRequest)
            status = HTTPStatus.BAD_REQUEST if known else HTTPStatus.NOT_FOUND
        connection.send(status, redacted(str(error)))
    except Exception:  # noqa: BLE001  a bug in one page must not end the others
        log.warning("a request to the report server failed", exc_info=True)
        text = "dtt cannot show this page: the log of dtt report --serve has the reason"
        connection.send(HTTPStatus.INTERNAL_SERVER_ERROR, text)
    return None


def _send_news(connection: Connection, news: News, closing: threading.Event) -> None:
    """Send lines as they come, until the client goes away or the server closes."""
    milliseconds, last = 0.0, time.monotonic()
    while not connection.gone(milliseconds):
        if closing.is_set():
            connection.send_chunk("")
            return
        lines = news()
        milliseconds = 0.0 if lines else 1000 * LOOK_SECONDS
        if lines or time.monotonic() - last >= QUIET_SECONDS:
            connection.send_chunk("\n".join(lines) + "\n")
            last = time.monotonic()


def _parse(query: str) -> list[str]:
    """Return the values of `job` in the query of a URL, in order."""
    # A file name that is not UTF-8 is percent-encoded bytes here, and surrogates in Python.
    fields = parse_qsl(query, keep_blank_values=True, errors="surrogateescape")
    if other := [name for name, _ in fields if name != "job"]:
        raise BadRequest(f"unknown parameter {other[0]!r}", next="open a job from the list of jobs")
    return [value for _, value in fields]
