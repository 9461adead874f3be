"""The pages of `dtt report --serve`: the list of jobs, reports, and the same data as JSON.

An open page asks for its data again and again. The server keeps nothing between two requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import DttError, InputError
from dtt.base.local_server import Connection
from dtt.base.log import log
from dtt.base.secrets import redacted
from dtt.jobs.job_state import Status, examine
from dtt.report.page import embedded, render, without_secrets

Data = Callable[[Sequence[Status]], Mapping[str, Any]]


@dataclass(frozen=True)
class Pages:
    """The content of the server."""

    find: Callable[[], Sequence[JobDir]]
    """Returns the jobs that may be opened, again for each request."""
    jobs: Data
    """Returns the data of the list of jobs."""
    report: Data
    """Returns the data of a report."""
    one_at_a_time: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, connection: Connection, path: str, query: str) -> None:
        """Answer a request for a page, or for the data of a page."""
        if connection.command not in ("GET", "HEAD"):
            connection.send(HTTPStatus.METHOD_NOT_ALLOWED)
            return
        try:
            if path in ("", "jobs.json"):
                data = self.jobs(examine(self.find()))
            elif path in ("report", "report.json"):
                with self.one_at_a_time:  # each may take a core and a gigabyte for a minute
                    data = self.report(examine(self._open(_parse(query))))
            else:
                raise InputError("there is no such page", next="open the list of jobs")
        except InputError as error:
            connection.send(HTTPStatus.NOT_FOUND, redacted(str(error)))
        except DttError as error:
            connection.send(HTTPStatus.INTERNAL_SERVER_ERROR, redacted(str(error)))
        except Exception:  # noqa: BLE001  a bug in one page must not end the others
            log.warning("a request to the report server failed", exc_info=True)
            text = "dtt cannot show this page: the log of dtt report --serve has the reason"
            connection.send(HTTPStatus.INTERNAL_SERVER_ERROR, text)
        else:
            if path.endswith(".json"):
                text = embedded(without_secrets(data))
                connection.send(HTTPStatus.OK, text, "application/json")
            else:
                connection.send(HTTPStatus.OK, render(data), "text/html")

    def _open(self, names: Sequence[str]) -> list[JobDir]:
        if not names:
            raise InputError("the address names no job", next="open a job from the list of jobs")
        # Names are looked up, so that no path of a request is ever opened.
        known = {str(job.root): job for job in self.find()}
        if unknown := [name for name in names if name not in known]:
            raise InputError(f"no job {unknown[0]!r}", next="open a job from the list of jobs")
        return [known[name] for name in names]


def _parse(query: str) -> list[str]:
    """Return the values of `job` in the query of a URL, in order."""
    # A file name that is not UTF-8 is percent-encoded bytes here, and surrogates in Python.
    fields = parse_qsl(query, keep_blank_values=True, errors="surrogateescape")
    if other := [name for name, _ in fields if name != "job"]:
        raise InputError(f"unknown parameter {other[0]!r}", next="open a job from the list of jobs")
    return [value for _, value in fields]
