"""`dtt wandb`: upload the metrics of jobs to Weights & Biases."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ConfigError, DttError, InputError, StorageError
from dtt.base.log import log
from dtt.config.load import load_job
from dtt.config.train import WandbConfig
from dtt.jobs import job_state
from dtt.track import jsonl
from dtt.track.wandb import history_row
from dtt.track.wandb_history import Row, RunPath, UploadedRun, WandbHistory


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
    if copied:
        names = [*copied, *sources]
    else:
        found = (job_state.stages(Path(path)) or [JobDir(Path(path))] for path in sources)
        names = [str(job.root) for jobs in found for job in jobs]
    results: list[dict[str, Any]] = []
    errors: list[DttError] = []
    with TemporaryDirectory(prefix="dtt-wandb-", ignore_cleanup_errors=True) as folder:
        history = WandbHistory(Path(folder))
        for name in names:
            source = {"from" if copied else "job": name}
            try:
                if copied:
                    result = _copy(name, history, project, entity)
                else:
                    result = _upload(JobDir(Path(name)), history, project, entity)
            except DttError as error:
                errors.append(error)
                results.append(source | {"error": str(error)})
                if len(errors) > 1:  # the first one is reported last
                    log.error("%s", error)
            else:
                results.append(source | asdict(result))
                log.info("%s", _describe(name, result))
    if as_json:
        print(json.dumps(results))
    if errors:
        raise errors[0]


def _copy(name: str, history: WandbHistory, project: str | None, entity: str | None) -> UploadedRun:
    """Copy a run of the server to `project` of `entity`."""
    if JobDir(Path(name)).exists:
        raise ConfigError(f"{name} is a job, and --from copies runs of the W&B server")
    parts = name.split("/")
    if len(parts) != len(RunPath._fields) or not all(parts):
        raise ConfigError(f"{name} is not a W&B run", next="--from ENTITY/PROJECT/RUN")
    source = RunPath(*parts)
    target = RunPath(entity or history.entity, project or source.project, source.id)
    return history.copy(source, target)


def _describe(name: str, run: UploadedRun) -> str:
    if run.sent == 0:
        return f"{name} is up to date, {run.rows} records: {run.url}"
    all = f" of {run.rows}" if run.sent < run.rows else ""
    return f"sent {run.sent}{all} records of {name}: {run.url}"


def _upload(
    job: JobDir, history: WandbHistory, project: str | None, entity: str | None
) -> UploadedRun:
    """Upload the records of a job; DttError if it has no metrics, or sends them itself."""
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
        entity or default.entity or history.entity,
        project or default.project,
        _run_id(job, cfg.name, first),
    )
    tracked = [(one.entity or history.entity, one.project) for one in trackers]
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
    return history.upload(path, facts, rows)


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
