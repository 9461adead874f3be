"""`dtt wandb`: send the history of jobs, or of runs, to Weights & Biases: every row, none twice.

The server's last row shows which rows it lacks, so an upload that was cut off is completed by the
next one. A row that W&B has cannot be replaced: a client that restarts an existing run appends to
its history. So a history of a job that no longer fits becomes a new run, `ID-2`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ConfigError, DttError, EnvironmentUnfit, InputError, StorageError
from dtt.base.log import log
from dtt.config.load import load_job
from dtt.config.train import WandbConfig
from dtt.jobs import job_state
from dtt.track import jsonl
from dtt.track.wandb import (
    answers,
    define_metrics,
    delete_slurm_secrets,
    history_row,
    wandb_client,
)

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


def upload(
    sources: Sequence[str],
    copied: Sequence[str] = (),
    *,
    project: str | None,
    entity: str | None,
    as_json: bool,
) -> None:
    """Send the history of each job to its run, and print or log the URLs of the runs.

    `sources` are job directories; the folder of several stages stands for its stages. `project` and
    `entity` are by default those of the job's tracker. With `copied`, these and the sources are
    runs of the server, `ENTITY/PROJECT/RUN`, which are copied; the defaults are the run's project
    and the user. A source that fails does not stop the others; at the end, the first error is
    raised.
    """
    if not sources and not copied:
        raise ConfigError(
            "no job and no --from", next="dtt wandb JOB, or --from ENTITY/PROJECT/RUN"
        )
    names = [*copied, *sources]
    if not copied:
        found = (job_state.stages(Path(path)) or [JobDir(Path(path))] for path in sources)
        names = [str(job.root) for jobs in found for job in jobs]
    results: list[dict[str, Any]] = []
    errors: list[DttError] = []
    with TemporaryDirectory(prefix="dtt-wandb-", ignore_cleanup_errors=True) as folder:
        server = _Server(Path(folder))
        for name in names:
            source = {"from" if copied else "job": name}
            try:
                send = server.copy if copied else server.upload
                result = send(JobDir(Path(name)), project, entity)
            except DttError as error:
                errors.append(error)
                results.append(source | {"error": str(error)})
                if len(errors) > 1:  # the first one is reported last
                    log.error("%s", error)
                continue
            results.append(source | result)
            rows, sent, url = result["rows"], result["sent"], result["url"]
            if sent:
                all = f" of {rows}" if sent < rows else ""
                log.info("sent %d%s records of %s: %s", sent, all, name, url)
            else:
                log.info("%s is up to date, %d records: %s", name, rows, url)
    if as_json:
        print(json.dumps(results))
    if errors:
        raise errors[0]


class _Server:
    """A connection to a W&B server."""

    def __init__(self, folder: Path) -> None:
        """Connect; raise EnvironmentUnfit if that is impossible. `folder` is for local files."""
        self._wandb = wandb_client("dtt wandb uploads with the package wandb")
        # What the client raises, which includes invalid settings in the environment.
        self._errors = (self._wandb.Error, OSError, ValueError)
        self._folder = folder
        delete_slurm_secrets()
        for variable in OVERRIDES:
            os.environ.pop(variable, None)
        os.environ.update(WANDB_SILENT="true", WANDB_DIR=str(folder), WANDB_CACHE_DIR=str(folder))
        self._url = ""
        with self._reported("the connection"):
            settings = self._wandb.Settings(**BOUNDS, **PRIVATE)
            self._url = self._wandb.setup(settings).settings.base_url
            known = self._wandb.login(prompt=False, verify=False)
        if not known:
            raise EnvironmentUnfit(
                "no API key for Weights & Biases",
                where=self._url,
                next="wandb login, or set the environment variable WANDB_API_KEY",
            )
        if not answers(self._url):
            raise EnvironmentUnfit(
                "the W&B server did not respond within 5 s",
                where=self._url,
                next="run the same command again where the network reaches it; "
                "WANDB_BASE_URL selects another server",
            )
        with self._reported("the connection"):
            self._api = self._wandb.Api()
            self._entity: str = self._api.default_entity or ""  # of runs without one

    def upload(self, job: JobDir, project: str | None, entity: str | None) -> dict[str, Any]:
        """Send the records of a job that its run lacks.

        If its history is not the beginning of the records, they go to a run of their own, `ID-2`.
        Raises DttError if the job has no metrics, or is running and sends them itself.
        """
        cfg = load_job(job.root)
        first = next(jsonl.read(job.metrics, timed=True), None)
        if first is None:
            raise InputError(
                f"{job.root} has no metrics",
                where=job.metrics,
                next=f"dtt job status {job.root} shows whether it has started",
            )
        trackers = [one for one in cfg.track if isinstance(one, WandbConfig)]
        default = trackers[0] if trackers else WandbConfig()
        path = RunPath(
            entity or default.entity or self._entity,
            project or default.project,
            _run_id(job, cfg.name, first),
        )
        tracked = [(one.entity or self._entity, one.project) for one in trackers]
        if path[:2] in tracked and _is_online(job, path.id):
            raise ConfigError(
                f"{job.root} is running and sends its metrics to {path.entity}/{path.project}",
                why="two writers would mix up the history of its run",
                next="wait until it has ended, or upload to another project with --project",
            )

        def rows(first: int) -> Iterator[Row]:
            records = islice(enumerate(jsonl.read(job.metrics, timed=True)), first, None)
            return ({**history_row(record), "_step": step} for step, record in records)

        facts = {"name": cfg.name, "group": cfg.name, "config": cfg.model_dump(mode="json")}
        with self._reported(path):
            target, number = path, 1
            while (left := self._missing(run := self._run(target), rows)) is None:
                number += 1
                target = path._replace(id=f"{path.id}-{number}")
            return self._send(target, run, left, facts, define_metrics)

    def copy(self, named: JobDir, project: str | None, entity: str | None) -> dict[str, Any]:
        """Copy the run `named` to another project; send only what the copy lacks.

        Copies the complete history, the config, the summary, the name, the group, the tags, the
        notes and the axes of plots. Raises ConfigError if the history of the target is not the
        beginning of the run's: in its project, `ID-2` may be the copy of another run.
        """
        if named.exists:
            raise ConfigError(f"{named.root} is a job, and --from copies runs of the W&B server")
        parts = named.root.parts
        if len(parts) != len(RunPath._fields):
            raise ConfigError(f"{named.root} is not a W&B run", next="--from ENTITY/PROJECT/RUN")
        source = RunPath(*parts)
        target = RunPath(entity or self._entity, project or source.project, source.id)
        if source == target:
            raise ConfigError(f"{source} is the run to copy")
        with self._reported(source):
            run = self._run(source)
        if run is None:
            raise InputError(
                f"there is no run {source}",
                where=self._url,
                next="ENTITY/PROJECT/RUN as in the run's URL: RUN is its id, not its name",
            )
        # Servers return NaN and infinity as strings.
        numbers = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

        def rows(first: int) -> Iterator[Row]:
            # A scan reads every row, unlike `Run.history`, which samples.
            for row in run.scan_history(min_step=first):
                yield {k: numbers.get(v, v) if isinstance(v, str) else v for k, v in row.items()}

        def define_axes(copied: Any) -> None:
            # The client numbers the fields of its message MetricRecord: 1 is the name, 2 the name
            # with a *, 5 the position of the axis in the list, from 1, and 6 has 2 if it is hidden.
            metrics = run.rawconfig.get("_wandb", {}).get("m", [])
            for metric in metrics:
                copied.define_metric(
                    metric.get("1") or metric["2"],
                    step_metric=metrics[metric["5"] - 1].get("1") if "5" in metric else None,
                    hidden=2 in metric.get("6", []),
                )

        facts = {name: getattr(run, name) for name in ("name", "group", "config", "tags", "notes")}
        with self._reported(target):
            stored = self._run(target)
            left = self._missing(stored, rows)
            if left is None:
                raise ConfigError(
                    f"the history of {target} is not the beginning of that of {source}",
                    why=f"it is another run with the same id, or {source} has changed",
                    next="copy to another project with --project, or delete that run",
                )
            result = self._send(target, stored, left, facts, define_axes)
            # A summary may have values that are not those of the last row.
            summary = {k: v for k, v in run.summary_metrics.items() if not k.startswith("_")}
            if summary and (copied := self._run(target)) is not None:
                copied.summary.update(summary)
        return result

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
    ) -> dict[str, Any]:
        """Append rows to `run`, or create it from `facts`; return its place and number of rows."""
        first, sent = next(rows, None), 0
        if run is None or first is not None:
            # The client counts on from the step in the summary, which may be ahead of the history
            # after an upload that was cut off, and drops rows of earlier steps.
            if run is not None and first is not None:
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
            for row in chain([first] if first else [], rows):
                # With a step, the client would wait for more without `commit`.
                writer.log(row, step=row.pop("_step"), commit=True)
                sent += 1
            writer.finish()
        before = 0 if run is None else run.historyLineCount or 0
        url = (run or self._run(path)).url
        return {**path._asdict(), "url": url, "rows": before + sent, "sent": sent}

    def _run(self, path: RunPath) -> Any:
        """Return a run on the server; None if there is no such run or project."""
        self._api.flush()  # else it returns the state of the last query
        try:
            return self._api.run(str(path))
        except self._errors as error:
            if "could not find" not in str(error).lower():  # the client has no class for this
                raise
            return None

    @contextmanager
    def _reported(self, what: object) -> Iterator[None]:
        """Turn the client's errors into EnvironmentUnfit."""
        try:
            yield
        except self._errors as error:
            raise EnvironmentUnfit(
                f"W&B refused {what}",
                where=self._url,
                why=" ".join(str(error).split()),
                next="check the API key (wandb login), the entity and the project",
            ) from error


def _run_id(job: JobDir, name: str, first: dict[str, Any]) -> str:
    """Return the run id of a job, which its tracker uses, too.

    If the job has none, the id is derived from its name and first record, so that it is the same
    for a job that was moved or that cannot be written.
    """
    content = json.dumps([name, first], sort_keys=True)
    derived = hashlib.sha256(content.encode()).hexdigest()[:16]
    try:
        return job.run_id(derived)
    except (OSError, StorageError):
        return derived


def _is_online(job: JobDir, run_id: str) -> bool:
    """Return True if the job is running and its tracker is not offline.

    The client's local folder of each attempt is `run-TIME-ID`, or `offline-run-TIME-ID`.
    """
    folders = {path.name.removeprefix("offline-"): path for path in job.root.glob("wandb/*run-*")}
    own = [name for name in sorted(folders) if name.endswith(f"-{run_id}")]
    if not own or folders[own[-1]].name.startswith("offline-"):
        return False
    [status] = job_state.examine([job])
    return status.alive
