"""The pages of `dtt report`: a report of jobs and, of `--serve`, the list of jobs, and their data.

An open page asks for its data again and again. The server keeps nothing between two requests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

from dtt import __version__
from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import DttError, InputError
from dtt.base.local_server import Connection
from dtt.base.log import log
from dtt.base.secrets import redacted
from dtt.config import explain
from dtt.config.run import RunConfig
from dtt.jobs import sweeps as results
from dtt.jobs.job_state import Status, examine
from dtt.jobs.sweeps import Sweep
from dtt.report.metrics_history import MAX_BUCKETS
from dtt.report.page import embedded, render, without_secrets
from dtt.report.run_data import configuration_of, read_run, verdict
from dtt.track.plot import spread

MAX_DETAILED = 12
"""Number of runs up to which a page shows everything of each."""
FEWEST_BUCKETS = 100

NOT_COMPARED = ("name", "extends")
"""Keys that differ between any two runs."""


def report_data(
    statuses: Sequence[Status], *, sweep: Sweep | None = None, live: bool = False
) -> dict[str, Any]:
    """Return the data of the report of some jobs, for `render`.

    A page with more than ten jobs shows as many points in total as a page with ten, and only a few
    jobs are shown with samples, checkpoints and complete configurations: the page stays small
    enough to open at once.
    """
    configs = [configuration_of(status.job) for status in statuses]
    detailed = len(statuses) <= MAX_DETAILED and sweep is None
    most = max(FEWEST_BUCKETS, min(MAX_BUCKETS, 10 * MAX_BUCKETS // max(1, len(statuses))))
    runs = [
        read_run(status, cfg, most=most, detailed=detailed)
        for status, cfg in zip(statuses, configs, strict=True)
    ]
    for run, label in zip(runs, _labels(runs, sweep), strict=True):
        run["label"] = label
    return _common(_title(runs, sweep), "report", live=live) | {
        "runs": runs,
        "sweep": None if sweep is None else of_sweep(sweep),
        "differences": differences(configs) if len(runs) > 1 and sweep is None else [],
    }


def jobs_data(statuses: Sequence[Status]) -> dict[str, Any]:
    """Return the data of the list of all jobs of a live server, for `render`."""
    rows = [_job_row(status) for status in statuses]
    return _common("Jobs", "jobs", live=True) | {"jobs": rows}


def _job_row(status: Status) -> dict[str, Any]:
    measured = status.files.measured()
    return {
        "job": str(status.job.root),
        "verdict": verdict(status),
        "step": status.files.step,
        "steps": status.files.steps,
        "loss": measured["loss"],
        "tokens": measured["tokens"],
        "tokens_per_second": measured["tokens_per_second"],
        "seconds_left": status.seconds_left,
    }


def _common(title: str, view: str, *, live: bool) -> dict[str, Any]:
    return {
        "title": title,
        "view": view,
        "live": live,
        "version": __version__,
        "generated": time.time(),
    }


def _labels(runs: Sequence[dict[str, Any]], sweep: Sweep | None) -> list[str]:
    """Return a short name for each run: of a trial, what it varies; else what names differ in."""
    if sweep is not None:
        keys = {key: key.rpartition(".")[2] for key in sweep.manifest.keys}
        if len(set(keys.values())) < len(keys):
            keys = {key: key for key in keys}
        return [
            ", ".join(
                f"{keys.get(key, key)}={_short(value)}" for key, value in trial.values.items()
            )
            for trial in sweep.manifest.trials.values()
        ]
    names = [str(run["name"]) for run in runs]
    if len(set(names)) < len(names):  # copies of a job
        names = [str(run["path"]) for run in runs]
    folder = _common_folder(names)
    return names if folder is None else [name.rpartition("/")[2] for name in names]


def _common_folder(names: Sequence[str]) -> str | None:
    """Return the part before the slash if it is the same in all names; empty if they have none."""
    folders = {name.rpartition("/")[0] for name in names}
    return folders.pop() if len(folders) == 1 else None


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else explain.scalar(value)


def _title(runs: Sequence[dict[str, Any]], sweep: Sweep | None) -> str:
    if sweep is not None:
        return f"Sweep {sweep.manifest.name}"
    names = [str(run["name"]) for run in runs]
    if len(names) == 1:
        return names[0]
    return _common_folder(names) or f"{len(names)} runs"  # the stages of a configuration, or jobs


def differences(configs: Sequence[RunConfig | None]) -> list[dict[str, Any]]:
    """Return the keys whose values differ between runs, with the value of each run."""
    flat = [
        None
        if cfg is None
        else {".".join(k): explain.scalar(explain.plain(v)) for k, v, _ in explain.values(cfg)}
        for cfg in configs
    ]
    known = [values for values in flat if values is not None]
    return [
        {"key": key, "values": [None if v is None else v.get(key) for v in flat]}
        for key in dict.fromkeys(key for values in known for key in values)
        if key not in NOT_COMPARED and len({v.get(key) for v in known}) > 1
    ]


def of_sweep(sweep: Sweep) -> dict[str, Any]:
    """Return the table of a sweep, best row first, and a plot for each key that varies."""
    manifest, keys = sweep.manifest, results.varied(sweep)
    rows = results.table(sweep)
    plots = []
    for key in keys if any(row.mean is not None for row in rows) else ():
        curves = results.against(sweep, rows, key)
        log_x = spread([curve.x for curve in curves])
        plots.append({"key": key, "log_x": log_x, "curves": [asdict(curve) for curve in curves]})
    return {
        "metric": manifest.metric,
        "goal": manifest.goal,
        "keys": keys,
        "rows": [
            asdict(row) | {"values": results.cells(row.values, keys), "done": len(row.done)}
            for row in rows
        ],
        "plots": plots,
    }


# ---- dtt report --serve --------------------------------------------------------------------------


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
