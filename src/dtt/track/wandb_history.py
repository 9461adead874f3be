"""Complete histories in Weights & Biases, of jobs and of runs: every row, in order, none twice.

The W&B client retries for days and reports success even if the server took nothing. So this module
bounds the retries, and compares the run on the server with the records before and after an upload.

A row that W&B has cannot be replaced: a client that restarts an existing run appends to its
history. So a history that no longer fits becomes a new run, `ID-2`, and the old run is deleted.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from dtt.base.errors import ConfigError, EnvironmentUnfit, InputError
from dtt.base.log import log
from dtt.track.wandb import answers, define_metrics, delete_slurm_secrets, wandb_client
from dtt.track.wandb_rows import (
    Row,
    RunPath,
    StoredRun,
    axes,
    contains,
    is_media,
    matches,
    numbers,
)

PAUSES = (0.0, 1.0, 3.0)
"""Seconds to wait before each comparison after an upload: a server may count rows with a delay."""
BOUNDS = {
    "x_file_stream_retry_max": 5,
    "x_file_stream_retry_wait_min_seconds": 1,
    "x_file_stream_retry_wait_max_seconds": 15,
    "x_file_stream_timeout_seconds": 60,
    "x_file_transfer_retry_max": 3,
    "x_graphql_retry_max": 3,
    "x_graphql_timeout_seconds": 20,
}
"""Settings of the client that bound its retries, which by default last for a week."""
PRIVATE = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}
"""Settings of the client that leave out this machine: the job ran elsewhere."""
JOB_TYPE = "upload"
"""Job type, in W&B, of the runs that were created here, so that only these are ever deleted."""
OVERRIDES = ("WANDB_RESUME", "WANDB_RUN_ID", "WANDB_RUN_GROUP", "WANDB_NAME", "WANDB_MODE")
"""Environment variables that would change the identity of the runs, or keep them offline."""


@dataclass(frozen=True)
class RunHeader:
    """Facts of a run besides its history."""

    name: str
    group: str | None
    config: dict[str, Any]
    tags: tuple[str, ...] = ()
    notes: str | None = None
    axes: tuple[dict[str, Any], ...] | None = None
    """Arguments of `define_metric` for each metric with an axis of its own; None: those of dtt."""
    summary: Row = field(default_factory=dict)
    """Values that replace the last ones of the metrics, as the server returns them."""


@dataclass(frozen=True)
class UploadedRun:
    """A run whose history on the server equals that of its source."""

    entity: str
    project: str
    id: str
    url: str
    rows: int
    sent: int
    """Number of rows that this upload sent."""
    replaced: bool
    """True if this upload replaced a run whose history was not the beginning of this one."""


class WandbHistory:
    """A connection to a W&B server that uploads the histories of jobs."""

    def __init__(self, folder: Path) -> None:
        """Connect; raise EnvironmentUnfit if that is impossible. `folder` is for local files."""
        self._wandb = wandb_client("dtt wandb uploads with the package wandb")
        self._folder = folder
        delete_slurm_secrets()
        for variable in OVERRIDES:
            os.environ.pop(variable, None)
        os.environ.update(WANDB_SILENT="true", WANDB_DIR=str(folder), WANDB_CACHE_DIR=str(folder))
        self._server = ""
        with self._reported():
            settings = self._wandb.Settings(**BOUNDS, **PRIVATE)
            self._server = self._wandb.setup(settings).settings.base_url
            known = self._wandb.login(prompt=False, verify=False)
        if not known:
            raise EnvironmentUnfit(
                "no API key for Weights & Biases",
                where=self._server,
                next="wandb login, or set the environment variable WANDB_API_KEY",
            )
        self.check_server()
        with self._reported():
            self._api = self._wandb.Api()
            self.entity: str = self._api.default_entity or ""
            """Team or user to which runs without an entity belong."""

    def check_server(self) -> None:
        """Raise EnvironmentUnfit if the server does not respond within 5 s."""
        if not answers(self._server):
            raise EnvironmentUnfit(
                "the W&B server did not respond within 5 s",
                where=self._server,
                next="run the same command again where the network reaches it; "
                "WANDB_BASE_URL selects another server",
            )

    def upload(
        self, path: RunPath, facts: RunHeader, rows: Callable[[], Iterator[Row]]
    ) -> UploadedRun:
        """Make the history of a run equal to `rows`, the records of a job; send only what is new.

        `rows()` starts a new iteration over all rows, of which there is at least one. A run whose
        history is not the beginning of them is replaced; ConfigError if a tracker created it.
        Raises EnvironmentUnfit if the history on the server differs afterwards.
        """
        self.check_server()
        runs = self._find(path)
        newest = runs[-1] if runs else None
        extends = newest is None or self._extends(newest, rows())
        if newest is not None:
            path = newest.path if extends else _successor(newest, path.id)
        uploaded = self._complete(path, facts, rows, newest if extends else None)
        for old in runs:
            if old.uploaded and old.path != path:
                self._delete(old.path)
        return uploaded if extends else replace(uploaded, replaced=True)

    def copy(self, source: RunPath, target: RunPath) -> UploadedRun:
        """Copy a run of the server to another project; send only what the copy lacks.

        Copies the complete history, the config, the summary, the name, the group, the tags, the
        notes and the axes of plots. Raises InputError if there is no such run, ConfigError if the
        history of `target` is not the beginning of that of `source`, and EnvironmentUnfit if the
        histories differ afterwards. Never deletes a run: in the project of the target, `ID-2` may
        be the copy of another run.
        """
        self.check_server()
        if source == target:
            raise ConfigError(f"{source} is the run to copy")
        facts, file = self._read(source)

        def rows() -> Iterator[Row]:
            with file.open(encoding="utf-8") as lines:
                yield from map(json.loads, lines)

        stored = self._stored(target)
        if stored is not None and not self._extends(stored, rows()):
            raise ConfigError(
                f"the history of {target} is not the beginning of that of {source}",
                where=stored.url,
                why=f"it is another run with the same id, or {source} has changed",
                next="copy to another project with --project, or delete that run",
            )
        return self._complete(target, facts, rows, stored)

    def _read(self, path: RunPath) -> tuple[RunHeader, Path]:
        """Return the facts of a run, and a file with its rows, one JSON object per line.

        A scan reads every row, unlike `Run.history`, which samples: each query asks for as many
        rows as its range has steps. The rows are kept because several passes over them follow, and
        a second scan of a running run returns others.
        """
        with self._reported(path):
            try:
                run = self._api.run(str(path))
            except self._errors as error:
                if not _is_missing(error):
                    raise
                raise InputError(
                    f"there is no run {path}",
                    where=self._server,
                    next="ENTITY/PROJECT/RUN as in the run's URL: RUN is its id, not its name",
                ) from None
            expected, number = run.historyLineCount or 0, 0
            file = self._folder / "history.jsonl"
            media: set[str] = set()
            with file.open("w", encoding="utf-8") as lines:
                for number, row in enumerate(run.scan_history(), 1):  # noqa: B007
                    media.update(name for name, value in row.items() if is_media(value))
                    lines.write(json.dumps(numbers(row)) + "\n")
        if number < expected:
            raise EnvironmentUnfit(
                f"W&B returned {number} of {expected} rows of {path}",
                where=run.url,
                next="run the same command again",
            )
        if media:
            log.warning(
                "%s: files are not copied, only their names: %s", path, ", ".join(sorted(media))
            )
        metrics = run.rawconfig.get("_wandb", {}).get("m", [])
        summary = {k: v for k, v in run.summary_metrics.items() if not k.startswith("_")}
        facts = RunHeader(
            run.name, run.group, run.config, tuple(run.tags), run.notes, axes(metrics), summary
        )
        return facts, file

    def _extends(self, run: StoredRun, rows: Iterator[Row]) -> bool:
        """Return True if the history of `run` is the beginning of `rows`."""
        if run.rows == 0:
            return True
        at_stored = next(islice(rows, run.rows - 1, None), None)
        return at_stored is not None and self._ends_with(run, at_stored)

    def _complete(
        self,
        path: RunPath,
        facts: RunHeader,
        rows: Callable[[], Iterator[Row]],
        stored: StoredRun | None,
    ) -> UploadedRun:
        """Send the rows that `stored`, the run at `path`, lacks; without one, create the run."""
        total = 0
        last: Row = {}
        for total, last in enumerate(rows(), 1):  # noqa: B007
            pass
        start = 0 if stored is None else stored.rows
        if stored is None or start < total:
            if stored is not None:
                # The client counts on from the step in the summary, which may be ahead of the
                # history after an upload that was cut off, and drops rows of earlier steps.
                step = next(islice(rows(), start, None)).get("_step", start)
                if stored.summary.get("_step", -1) >= step:
                    self._update_summary(path, {"_step": step - 1})
            self._send(path, facts, islice(rows(), start, None), resumes=stored is not None)
            stored = self._verify(path, total, last)
        if not contains(stored.summary, numbers(facts.summary)):
            self._update_summary(path, facts.summary)
        return UploadedRun(*path, stored.url, total, sent=total - start, replaced=False)

    def _update_summary(self, path: RunPath, values: Row) -> None:
        with self._reported(path):
            self._api.flush()
            self._api.run(str(path)).summary.update(values)

    def _find(self, path: RunPath) -> list[StoredRun]:
        """Return the runs of a job: `ID`, `ID-2`, …; there are several if an upload was cut off."""
        pattern = f"^{re.escape(path.id)}(-[0-9]+)?$"
        with self._reported(path):
            try:
                runs = self._api.runs(path.folder, filters={"name": {"$regex": pattern}})
                found = [run.id for run in runs]
            except self._errors as error:
                if not _is_missing(error):
                    raise
                found = []  # the project does not exist
        found.sort(key=lambda id: _number(id, path.id))
        stored = (self._stored(path._replace(id=id)) for id in found)
        return [run for run in stored if run is not None]

    def _stored(self, path: RunPath) -> StoredRun | None:
        """Return the state of a run on the server; None if there is no such run."""
        self._api.flush()  # else it returns the state of the last query
        with self._reported(path):
            try:
                run = self._api.run(str(path))
            except self._errors as error:
                if not _is_missing(error):
                    raise
                return None
        return StoredRun(
            path=path,
            rows=run.historyLineCount or 0,
            summary=numbers(run.summaryMetrics or {}),
            url=run.url,
            uploaded=run.jobType == JOB_TYPE,
        )

    def _ends_with(self, run: StoredRun, row: Row) -> bool:
        """Return True if `row` is the last row of a run.

        Then the rows before it are equal, too: metrics.jsonl changes only by new lines at its end,
        and by the removal of the lines after a step when a job resumes. The lines that follow such
        a removal have other times.
        """
        if matches(run, row, run.summary):
            return True
        # An upload that was cut off may have left a summary of rows that did not arrive, and the
        # summary of a copy may have other values than the last row.
        step = row.get("_step", run.rows - 1)
        with self._reported(run.path):
            scan = self._api.run(str(run.path)).scan_history(min_step=step, max_step=step + 1)
            return any(matches(run, row, numbers(found)) for found in scan)

    def _send(
        self,
        path: RunPath,
        facts: RunHeader,
        rows: Iterator[Row],
        *,
        resumes: bool,
    ) -> None:
        """Append rows to a run, or create it. A row may have a `_step`; by default, they count."""
        with self._reported(path):
            run = self._wandb.init(
                **path._asdict(),
                name=facts.name,
                group=facts.group,
                tags=facts.tags,
                notes=facts.notes,
                job_type=None if resumes else JOB_TYPE,
                config=facts.config,
                dir=self._folder,
                mode="online",
                resume="allow" if resumes else "never",
                settings=self._wandb.Settings(init_timeout=20),
            )
            if facts.axes is None:
                define_metrics(run)
            for axis in facts.axes or ():
                run.define_metric(**axis)
            for row in rows:
                step = row.pop("_step", None)
                run.log(row, step=step, commit=True)  # with a step, the default is to wait for more
            run.finish()

    def _verify(self, path: RunPath, total: int, last: Row) -> StoredRun:
        """Return the run on the server; EnvironmentUnfit unless it has all rows."""
        found = None
        for pause in PAUSES:
            time.sleep(pause)
            found = self._stored(path)
            if found is None or found.rows != total:
                continue
            if total == 0 or self._ends_with(found, last):
                return found
        raise EnvironmentUnfit(
            f"the upload is incomplete: W&B has {found.rows if found else 0} of {total} rows",
            where=found.url if found else self._server,
            why="the server refused rows, or the connection was lost",
            next="run the same command again: it sends what is missing",
        )

    def _delete(self, path: RunPath) -> None:
        """Delete a run that was replaced."""
        with self._reported(path):
            self._api.run(str(path)).delete()

    @contextmanager
    def _reported(self, path: RunPath | None = None) -> Iterator[None]:
        """Turn the client's errors into EnvironmentUnfit."""
        try:
            yield
        except self._errors as error:
            raise EnvironmentUnfit(
                f"W&B refused {'the connection' if path is None else path}",
                where=self._server,
                why=" ".join(str(error).split()),
                next="check the API key (wandb login), the entity and the project",
            ) from error

    @property
    def _errors(self) -> tuple[type[Exception], ...]:
        """The errors that the client raises, which include invalid settings in the environment."""
        return (self._wandb.Error, OSError, ValueError)


def _is_missing(error: Exception) -> bool:
    """Return True if there is no such run or project; the client has no class for this error."""
    return "could not find" in str(error).lower()


def _successor(run: StoredRun, first: str) -> RunPath:
    """Return the path of the run that replaces another one; `first` is the id of the first one.

    Raises ConfigError if a tracker created the run.
    """
    if not run.uploaded:
        raise ConfigError(
            f"the history of {run.path} is not the beginning of the job's metrics.jsonl",
            where=run.url,
            why="the job's tracker wrote it, and the job later repeated steps; W&B cannot replace "
            "rows, and this run is left as it is",
            next="upload to another project with --project",
        )
    return run.path._replace(id=f"{first}-{_number(run.path.id, first) + 1}")


def _number(id: str, first: str) -> int:
    """Return 1 for the id `first` itself, 2 for `first-2`, and so on."""
    return int(id[len(first) + 1 :] or 1)
