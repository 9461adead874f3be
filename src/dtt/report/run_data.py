"""The data that a report shows of one job, as JSON; the page draws it.

Every part is read from the files of the job, and a part whose files are missing or damaged is left
out: a report is most useful for a job that went wrong.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import DataManifest, ExportManifest
from dtt.base.errors import DttError, ExitCode
from dtt.base.reading import Kind, fits, is_kind, read_record, read_small, tolerant
from dtt.base.secrets import redacted
from dtt.config import explain
from dtt.config.load import load_job
from dtt.config.model import ModelConfig
from dtt.config.run import RunConfig
from dtt.data.samples.step_sizes import step_sizes_of
from dtt.jobs.clock import KEPT, goodput
from dtt.jobs.job_files import first_line
from dtt.jobs.job_state import FAILURES, State, Status
from dtt.model import count
from dtt.model.adapted_layers import adapter_weights
from dtt.model.scaling import scaled
from dtt.report import task_results
from dtt.report.metrics_history import MAX_BUCKETS, MetricsHistory

GOOD, BUSY, BAD, IDLE = "good", "busy", "bad", "idle"
MOODS = {
    State.DONE: GOOD,
    State.RUNNING: BUSY,
    State.STOPPING: BUSY,
    State.QUEUED: BUSY,
    State.PREEMPTED: BUSY,
    State.SUSPENDED: BUSY,
    State.DIVERGED: BAD,
    State.TIMED_OUT: BAD,
    **dict.fromkeys(FAILURES, BAD),
}
"""How a page shows a state; states that are not listed are idle."""
MAX_SAMPLES = 100
MAX_SAMPLE_TEXT = 3000
"""Characters of a sample that a page contains; a sample of training is usually far shorter."""
MAX_LISTED = 200
"""Number of skipped steps and of checkpoints that a page lists, the newest."""
MAX_ATTEMPTS = 2000
"""Number of attempts that a page lists, the newest."""
ENDINGS = {ExitCode.DONE: "done", ExitCode.PREEMPTED: "stopped", ExitCode.DIVERGED: "diverged"}
GUARD: Mapping[str, Kind] = {"why": str, "action": str, "bad_step": int}


def read_run(
    status: Status,
    cfg: RunConfig | None,
    *,
    most: int = MAX_BUCKETS,
    detailed: bool = True,
) -> dict[str, Any]:
    """Return everything that a page shows of a job, with at most `most` buckets per curve.

    `cfg` is the configuration of the job, None if it cannot be read. Unless it is `detailed`, as
    for the trials of a sweep, the page gets only what compares runs: no samples, checkpoints and
    complete configuration.
    """
    job = status.job
    history = MetricsHistory.read(job.metrics)
    progress = history.tokens.buckets(most)
    speeds = history.series.get("perf/tokens_per_second")
    run: dict[str, Any] = {
        "name": name_of(job, cfg),
        "path": str(job.root),
        "verdict": verdict(status),
        "step": history.last_step or status.files.step,
        "steps": status.files.steps or (cfg.train.steps if cfg is not None else None),
        "progress": {
            "width": progress["width"],
            "at": progress["at"],
            "tokens": history.tokens.last(most),
            "computed": _computed(cfg, progress, history.last_step),
            "time": history.times.last(most),
        },
        "curves": {name: one.buckets(most) for name, one in history.series.items()},
        "speed": median(speeds.values) if speeds is not None else None,
        "tasks": task_results.of_job(
            job, history.listed["task"], None if cfg is None else cfg.eval
        ),
        "clock": _clock(status),
        "guard": _guard(history),
    }
    if cfg is not None:
        run |= _of_configuration(job, cfg, history)
        if detailed:
            run["configuration"] = changed_keys(cfg)
    if detailed:
        text = tolerant(job.config, lambda path: read_small(path).decode())
        run["configuration_text"] = text or ""
        run["samples"] = _samples(history)
        run["checkpoints"] = _checkpoints(job, history)
        run |= _relatives(job)
    return run


def _computed(
    cfg: RunConfig | None, progress: Mapping[str, Any], last_step: int
) -> list[int] | None:
    """Return the tokens that were computed up to the end of each bucket, with or without a target.

    None if the configuration does not say how many.
    """
    try:
        sizes = None if cfg is None else step_sizes_of(cfg.train)
    except DttError:
        sizes = None
    ends = [min((bucket + 1) * progress["width"] - 1, last_step) for bucket in progress["at"]]
    return None if sizes is None else [sizes.tokens_before(step) for step in ends]


def verdict(status: Status) -> dict[str, Any]:
    """Return the state of a job, why it is in it, and the command to type next."""
    ending = status.files.ending
    lines = str(ending["reason"]).splitlines() if ending and not status.alive else []
    text = status.detail
    if status.state is State.DONE:
        text = lines[0] if lines and lines[0] != "done" else ""
    advice = [line.removeprefix("  next:").strip() for line in lines if line.startswith("  next:")]
    return {
        "state": status.state.value,
        "mood": MOODS.get(status.state, IDLE),
        "attempt": status.files.attempt,
        "text": text,
        "why": [line.strip() for line in lines[1:] if not line.startswith("  next:")],
        "next": advice[0] if advice else _next_command(status),
        "log": status.log_tail,
    }


def _next_command(status: Status) -> str:
    job = status.job
    if status.state is State.DONE:
        command = ["export", str(job.root)]
        try:
            cfg = load_job(job.root)
            folder = Path("exports") / cfg.name
            exported = ExportManifest.read(folder)
            if (exported.job, exported.step) == (cfg.name, status.files.step):
                does = ["chat"] if job.chat_template.is_file() else ["generate", "-p", "TEXT"]
                command = [*does, str(folder)]
        except DttError:
            pass  # there is no export, or the configuration cannot be read
    elif status.alive or status.queued:
        command = ["job", "status", str(job.root)]
    else:
        # It prints the command, or submits the job again.
        command = ["job", "resume", str(job.root)]
    return shlex.join(["dtt", *command])


def name_of(job: JobDir, cfg: RunConfig | None) -> str:
    """Return the name of a job: that of its configuration, else of its folder."""
    return cfg.name if cfg is not None else job.root.resolve().name


def configuration_of(job: JobDir) -> RunConfig | None:
    """Return the configuration of a job; None if it cannot be read."""
    try:
        return load_job(job.root)
    except DttError:
        return None


def _of_configuration(job: JobDir, cfg: RunConfig, history: MetricsHistory) -> dict[str, Any]:
    """Return what the configuration and the data of a job say together."""
    # A model of a user's own is counted by its code, which a report does not run.
    if not isinstance(cfg.model, ModelConfig):
        return {}
    try:
        data = DataManifest.read(job.root)
    except DttError:
        return {}
    arch = scaled(cfg, data.vocab_size).arch
    adapter = adapter_weights(cfg.adapter, arch)
    return {
        "parameters": count.parameters(arch),
        "flops_per_token": count.flops_per_token(arch, cfg.train.seq_len, adapter=adapter),
        "mixture": _mixture(data, history),
    }


def _mixture(data: DataManifest, history: MetricsHistory) -> list[dict[str, Any]]:
    """Return the epochs and the share of tokens of each source so far."""
    records = history.listed["data"]
    epochs = records[-1].get("epochs") if records else None
    if not isinstance(epochs, dict):
        return []
    rows = [
        {"name": s.name, "tokens": s.tokens, "epochs": epochs[s.name]}
        for s in data.sources
        if is_kind(epochs.get(s.name), float)
    ]
    used = [row["tokens"] * row["epochs"] if row["tokens"] else None for row in rows]
    known = [tokens for tokens in used if tokens is not None]
    if len(known) == len(rows) and sum(known) > 0:
        for row, tokens in zip(rows, known, strict=True):
            row["share"] = tokens / sum(known)
    return rows


def _samples(history: MetricsHistory) -> dict[str, Any]:
    """Return text samples, evenly spread over the run if there are many."""
    records = [r for r in history.listed["sample"] if isinstance(r.get("text"), str)]
    items = [
        {
            "step": r["step"],
            "temperature": _number(r, "temperature"),
            "text": redacted(r["text"])[:MAX_SAMPLE_TEXT],  # half a secret is not recognised,
        }
        for r in spread(records, MAX_SAMPLES)
    ]
    return {"total": len(records), "items": items}


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """Return up to `most` items, evenly spread, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _guard(history: MetricsHistory) -> dict[str, Any]:
    """Return the skipped steps."""
    skipped = [r for r in history.listed["guard"] if fits(r, GUARD)]
    items = [
        {"step": r["step"], "bad_step": r["bad_step"], "why": r["why"], "action": r["action"]}
        for r in skipped[-MAX_LISTED:]
    ]
    return {"total": len(skipped), "items": items}


def _checkpoints(job: JobDir, history: MetricsHistory) -> dict[str, Any]:
    """Return the checkpoints that exist, and the number of those that were deleted."""
    saves = {r["step"]: r for r in history.listed["save"]}
    kept = sorted(
        int(path.name.removeprefix("step-"))
        for path in job.checkpoints.glob("step-*")
        if re.fullmatch(r"step-\d{1,12}", path.name)
    )
    items = []
    for step in kept[-MAX_LISTED:]:
        record = saves.get(step, {})
        numbers = ("bytes", "blocked_seconds", "write_seconds", "time")
        items.append({"step": step} | {name: _number(record, name) for name in numbers})
    return {"items": items, "kept": len(kept), "deleted": len(saves.keys() - set(kept))}


def _number(record: Mapping[str, Any], name: str) -> float | None:
    return record[name] if fits(record, {name: float}) else None


def _relatives(job: JobDir) -> dict[str, Any]:
    """Return the parent run of a branch, and the branches of this job in the same folder."""
    record, own = job.parent_record(), job.root.resolve()
    parent = record and {
        "path": os.path.normpath(job.root / record["job"]),
        "step": record["step"],
    }
    branches = []
    for path in sorted(job.root.parent.glob("*/parent.json"))[:MAX_LISTED]:
        other = JobDir(path.parent).parent_record()
        if other is not None and (path.parent / Path(other["job"])).resolve() == own:
            branches.append({"path": str(path.parent), "step": other["step"]})
    return {"parent": parent, "branches": sorted(branches, key=lambda b: b["step"])}


def changed_keys(cfg: RunConfig) -> list[list[str]]:
    """Return key and value wherever the configuration differs from the defaults."""
    return [
        [".".join(key), explain.scalar(explain.plain(value))]
        for key, value in explain.changes(cfg, RunConfig()).items()
    ]


def _clock(status: Status) -> dict[str, Any]:
    """Return the goodput of a job, and its attempts in order."""
    job = status.job
    useful = goodput(job)
    return {
        "goodput": None if useful is None else useful.record() | {"useful": useful.useful},
        "attempts": [_attempt(status, number) for number in job.attempts()[-MAX_ATTEMPTS:]],
    }


def _attempt(status: Status, number: int) -> dict[str, Any]:
    """Return when an attempt ran, and how it ended."""
    clock = read_record(status.job.clock(number), KEPT) or {}
    ending = status.job.exit_record(number)
    running = status.alive and number == status.files.attempt
    found: dict[str, Any] = {
        "number": number,
        "began": clock.get("began"),
        "seconds": clock.get("seconds"),
        "how": "running" if running else "killed",
        "code": None,
        "reason": "",
        "node": None,
        "asked_by": "",
    }
    for name in ("first", "step"):
        found[name] = clock.get(name) if is_kind(clock.get(name), int) else None
    if ending is not None:
        found |= {name: ending[name] for name in ("code", "node")}
        found["how"] = ENDINGS.get(ending["code"], "failed")
        found["reason"] = first_line(ending["reason"])
        found["asked_by"] = ending.get("asked_by", "")
    return found
