"""Complete histories in Weights & Biases, of jobs and of runs: every row, in order, none twice.

The server's last row shows which rows it lacks, so an upload that was cut off is completed by the
next one. What arrived is not read back: the next upload finds it out, and sends the rest.

A row that W&B has cannot be replaced: a client that restarts an existing run appends to its
history. So a history that no longer fits becomes a new run, `ID-2`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from dtt.base.errors import ConfigError, EnvironmentUnfit, InputError
from dtt.base.log import log
from dtt.track.wandb import answers, define_metrics, delete_slurm_secrets, wandb_client

Row = dict[str, Any]
RowsFrom = Callable[[int], Iterator[Row]]
"""Function that returns the rows of a history whose `_step` is at least the given one."""

LIVE_SECONDS = 1.0
"""Maximum difference in seconds between the time of a record in metrics.jsonl and that of its row
in a run that `WandbTracker` wrote while the job ran. A step that a resumed job repeats comes later
than this: the attempt first imports torch."""
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
OVERRIDES = ("WANDB_RESUME", "WANDB_RUN_ID", "WANDB_RUN_GROUP", "WANDB_NAME", "WANDB_MODE")
"""Environment variables that would change the identity of the runs, or keep them offline."""


class RunPath(NamedTuple):
    """The place of a run on a W&B server."""

    entity: str
    project: str
    id: str

    def __str__(self) -> str:
        """Return `entity/project/id`."""
        return "/".join(self)


@dataclass(frozen=True)
class UploadedRun:
    """A run to which the missing rows of its source were sent."""

    entity: str
    project: str
    id: str
    url: str
    rows: int
    sent: int
    """Number of rows that this upload sent."""


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
        if not answers(self._server):
            raise EnvironmentUnfit(
                "the W&B server did not respond within 5 s",
                where=self._server,
                next="run the same command again where the network reaches it; "
                "WANDB_BASE_URL selects another server",
            )
        with self._reported():
            self._api = self._wandb.Api()
            self.entity: str = self._api.default_entity or ""
            """Team or user to which runs without an entity belong."""

    def upload(self, path: RunPath, facts: dict[str, Any], rows: RowsFrom) -> UploadedRun:
        """Send the rows of a job that its run lacks. `facts` are arguments of `wandb.init`.

        If its history is not the beginning of the rows, they go to a run of their own, `ID-2`.
        """
        with self._reported(path):
            target, number = path, 1
            run = self._run(target)
            while (left := self._missing(run, rows)) is None:
                number += 1
                target = path._replace(id=f"{path.id}-{number}")
                run = self._run(target)
            sent = self._send(target, run, left, facts, define_metrics)
            return self._uploaded(target, run, sent)

    def copy(self, source: RunPath, target: RunPath) -> UploadedRun:
        """Copy a run of the server to another project; send only what the copy lacks.

        Copies the complete history, the config, the summary, the name, the group, the tags, the
        notes and the axes of plots. Raises InputError if there is no such run, and ConfigError if
        the history of `target` is not the beginning of that of `source`: in the project of the
        target, `ID-2` may be the copy of another run.
        """
        if source == target:
            raise ConfigError(f"{source} is the run to copy")
        with self._reported(source):
            run = self._run(source)
        if run is None:
            raise InputError(
                f"there is no run {source}",
                where=self._server,
                next="ENTITY/PROJECT/RUN as in the run's URL: RUN is its id, not its name",
            )
        media: set[str] = set()

        def rows(first: int) -> Iterator[Row]:
            # A scan reads every row, unlike `Run.history`, which samples.
            for row in run.scan_history(min_step=first):
                media.update(name for name, value in row.items() if _is_media(value))
                yield _numbers(row)

        def define_axes(copied: Any) -> None:
            for axis in _axes(run.rawconfig.get("_wandb", {}).get("m", [])):
                copied.define_metric(**axis)

        facts = {name: getattr(run, name) for name in ("name", "group", "config", "tags", "notes")}
        with self._reported(target):
            stored = self._run(target)
            left = self._missing(stored, rows)
            if left is None:
                raise ConfigError(
                    f"the history of {target} is not the beginning of that of {source}",
                    where=None if stored is None else stored.url,
                    why=f"it is another run with the same id, or {source} has changed",
                    next="copy to another project with --project, or delete that run",
                )
            sent = self._send(target, stored, left, facts, define_axes)
            # A summary may have values that are not those of the last row.
            summary = {k: v for k, v in run.summary_metrics.items() if not k.startswith("_")}
            if summary:
                self._fresh(target).summary.update(summary)
        if media:
            log.warning(
                "%s: files are not copied, only their names: %s", source, ", ".join(sorted(media))
            )
        return self._uploaded(target, stored, sent)

    def _missing(self, run: Any | None, rows: RowsFrom) -> Iterator[Row] | None:
        """Return the rows after the last one of `run`; None if that one is not among `rows`.

        If it is, the rows before it are equal, too: metrics.jsonl changes only by new lines at its
        end, and by the removal of the lines after a step when a job resumes. The lines that follow
        such a removal have other times.
        """
        last = -1 if run is None else run.lastHistoryStep
        if run is None or last < 0:
            return rows(0)
        left = rows(last)
        row: Row = next(left, {})
        stored: Row = next(iter(run.scan_history(min_step=last)), {})
        if row.get("_step") != last or row.get("step") != stored.get("step"):
            return None
        # Without a time in metrics.jsonl, that on the server is the time of the upload.
        time = row.get("_timestamp")
        if time is not None and abs(time - stored.get("_timestamp", -math.inf)) > LIVE_SECONDS:
            return None
        return left

    def _send(
        self,
        path: RunPath,
        run: Any | None,
        rows: Iterator[Row],
        facts: dict[str, Any],
        define: Callable[[Any], None],
    ) -> int:
        """Append rows to `run`, or create it; return the number of rows."""
        first = next(rows, None)
        if first is None and run is not None:
            return 0
        if run is not None and first is not None:
            # The client counts on from the step in the summary, which may be ahead of the history
            # after an upload that was cut off, and drops rows of earlier steps.
            step = (run.summaryMetrics or {}).get("_step", -1)
            if step >= first["_step"]:
                run.summary.update({"_step": first["_step"] - 1})
        writer = self._wandb.init(
            **path._asdict(),
            **facts,
            dir=self._folder,
            mode="online",
            resume="never" if run is None else "allow",
            settings=self._wandb.Settings(init_timeout=20),
        )
        define(writer)
        sent = 0
        for sent, row in enumerate(chain([first] if first else [], rows), 1):  # noqa: B007
            step = row.pop("_step")
            writer.log(row, step=step, commit=True)  # with a step, the default is to wait for more
        writer.finish()
        return sent

    def _uploaded(self, path: RunPath, run: Any | None, sent: int) -> UploadedRun:
        before = 0 if run is None else run.historyLineCount or 0
        url = self._fresh(path).url if run is None else run.url
        return UploadedRun(*path, url, before + sent, sent)

    def _run(self, path: RunPath) -> Any | None:
        """Return a run on the server; None if there is no such run."""
        try:
            return self._fresh(path)
        except self._errors as error:
            if not _is_missing(error):
                raise
            return None

    def _fresh(self, path: RunPath) -> Any:
        self._api.flush()  # else it returns the state of the last query
        return self._api.run(str(path))

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


def _numbers(row: Row) -> Row:
    """Return the row with numbers for the strings by which servers return NaN and infinity."""
    values = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
    return {k: values.get(v, v) if isinstance(v, str) else v for k, v in row.items()}


def _is_media(value: Any) -> bool:
    """Return True if a value of a row names files of the run, such as images or tables."""
    return (
        isinstance(value, dict) and "_type" in value and ("path" in value or "filenames" in value)
    )


def _axes(metrics: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the arguments of `define_metric` that made the client write these definitions.

    The client numbers the fields of its message MetricRecord: 1 is the name, 2 the name with a *,
    5 the position of the axis in the list, from 1 on, and 6 has 2 for a hidden metric.
    """
    for metric in metrics:
        yield {
            "name": metric.get("1") or metric["2"],
            "step_metric": metrics[metric["5"] - 1].get("1") if "5" in metric else None,
            "hidden": 2 in metric.get("6", []),
        }
