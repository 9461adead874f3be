"""dtt as a library: what `import dtt` offers besides the base classes of own variants.

Each function does what the command of its name does, in this process, and raises a `DttError` with
the text that the command would print. Nothing here ends the process.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import InputError, Preempted
from dtt.base.interrupts import STOP_SIGNALS
from dtt.base.log import log, setup_logging
from dtt.base.ranks import Ranks
from dtt.config.load import load_job, resolve
from dtt.config.merging import Resolved
from dtt.config.run import RunConfig

if TYPE_CHECKING:
    import pyarrow as pa
    import torch
    from tokenizers import Tokenizer
    from torch import nn

    from dtt.train.trainer import Trainer


@dataclass(frozen=True)
class Job:
    """A job in its folder, as the last command has left it; it may be running."""

    path: Path

    @property
    def config(self) -> RunConfig:
        """Its configuration. The classes of a user's own in it are not imported."""
        return load_job(self.path)

    @property
    def state(self) -> str:
        """Its state, as `dtt job status` prints it, such as `done`."""
        from dtt.jobs import job_state

        [status] = job_state.examine([JobDir(self.path)])
        return str(status.state)

    @property
    def checkpoints(self) -> list[int]:
        """Steps of its checkpoints, in order."""
        from dtt.checkpoint import store

        return list(store.steps(JobDir(self.path).checkpoints))

    @property
    def metrics(self) -> pa.Table:
        """Its records, a row each, with the columns `kind` and `step` and those of all kinds.

        A mapping becomes a column for each of its names, `NAME/INNER`.
        """
        import pyarrow as pa

        from dtt.track import jsonl

        rows = [_flat(record) for record in jsonl.read(JobDir(self.path).metrics, timed=True)]
        names = dict.fromkeys(name for row in rows for name in row)
        return pa.table({name: _column([row.get(name) for row in rows]) for name in names})

    def best(self, metric: str = "eval.loss") -> int:
        """Return the step with the lowest value of KIND.NAME; raise InputError without one."""
        from dtt.track import jsonl

        kind, _, name = metric.partition(".")
        found = [
            (value, record["step"])
            for record in jsonl.read(JobDir(self.path).metrics, kind)
            if isinstance(value := _flat(record).get(name), int | float)
        ]
        if not found:
            raise InputError(
                f"no record of {metric}",
                where=JobDir(self.path).metrics,
                next="name a field of a kind of record, such as eval.loss",
            )
        return int(min(found)[1])


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{inner}": number for inner, number in value.items()}
        else:
            found[name] = value
    return found


def _column(values: Sequence[Any]) -> pa.Array:
    """Return a column of numbers, of truth values or of text; anything else is text, as JSON."""
    import pyarrow as pa

    kinds = {type(value) for value in values} - {type(None)}
    if kinds <= {bool} or kinds <= {str} or kinds <= {int}:
        return pa.array(values)
    if kinds <= {int, float}:
        return pa.array(values, pa.float64())
    return pa.array([value if value is None else json.dumps(value) for value in values])


def load(
    config: str | Path | Mapping[str, Any] | None = None, *overrides: str, **values: Any
) -> Resolved:
    """Return a checked configuration, with the origin of each value: `.config` and `.origin(key)`.

    `config` is a file, the name of a shipped configuration, or nested keys. `overrides` are
    `KEY=VALUE`, as on the command line; `values` are keys at the top level, which may be mappings.
    Raises ConfigError, which lists every mistake.
    """
    _log()
    from dtt.train.find_job import model_of

    given = dict(_dotted(values))
    if isinstance(config, Mapping):
        given = dict(_dotted(config)) | given
        config = None
    return resolve(config, list(overrides), given, model_of=model_of)


def _dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def train(
    config: Resolved | str | Path,
    *overrides: str,
    on_log: Callable[[Mapping[str, Any]], None] | None = None,
) -> Job:
    """Train a job to its end, or resume it, in this process, and return it.

    `config` is what `load` returned, or what it takes, or the folder of a job. `on_log` is called
    with each record of metrics.jsonl. Ctrl-C saves and returns, a second one raises
    KeyboardInterrupt; in a thread other than the main one, `control/stop` in the folder of the job
    does the same. Started by torchrun, all ranks call this.
    """
    _log()
    from dtt.jobs.stop import Requests
    from dtt.train import run

    here = Path.cwd()
    arguments = list(overrides)
    if isinstance(config, Resolved):
        job = config.config.job_dir
        layer = {key: leaf for key, leaf in config.layer.items() if leaf.origin != "default"}
        described: Any = layer
    elif JobDir(Path(config)).exists:
        job, described = Path(config), None
        arguments.insert(0, str(config))
    else:
        job, described = load(config, *overrides).config.job_dir, str(config)
    root = job.absolute()

    def with_callback(trainer: Trainer) -> Trainer:
        trackers = [*trainer.trackers, _Callback(on_log)] if on_log else []
        return replace(trainer, trackers=trackers or trainer.trackers)

    with _signals_restored():
        try:
            run.run(
                described, arguments, (), None,
                instrument=with_callback, requests=Requests(ends_process=False),
            )  # fmt: skip
        except Preempted as stop:
            log.info("%s", stop)
        finally:
            os.chdir(here)  # a job is resumed from its own folder
    return Job(root)


class _Callback:
    """A tracker that gives each record to a function."""

    def __init__(self, call: Callable[[Mapping[str, Any]], None]) -> None:
        self.log = call

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@contextmanager
def _signals_restored() -> Iterator[None]:
    """Give a notebook its own Ctrl-C back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _log() -> None:
    if not log.handlers:
        setup_logging(Ranks.detect())


def open_job(path: str | Path) -> Job:
    """Return the job in a folder; raise InputError if there is none."""
    load_job(Path(path))
    return Job(Path(path).absolute())


def load_model(
    source: str | Path, *, device: str = "auto", dtype: torch.dtype | None = None
) -> tuple[nn.Module, Tokenizer]:
    """Return a model, called with token ids [B, T] for logits [B, T, V], and its tokenizer.

    `source` is a job, JOB@STEP, an export, hf:FOLDER or hf:ORG/NAME. On the GPU if there is one,
    unless `device` says otherwise; in the dtype of the weights, unless `dtype` says another one.
    """
    import torch

    from dtt.hf.model_source import load_model as read
    from dtt.hf.model_source import on_device

    _log()
    trained = read(str(source), ema=False)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = on_device(trained, torch.device(device))
    return (model if dtype is None else model.to(dtype)).eval(), trained.open_tokenizer()


def generate(
    source: str | Path,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 128,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
) -> list[str]:
    """Return the continuation of each prompt; the arguments are those of `dtt generate`."""
    from dtt.generate import run

    _log()
    name = str(source)
    sampling = run.choose_sampling(name, max_new_tokens, temperature, top_k, top_p, seed)
    return run.continuations(name, prompts, sampling)


def evaluate(source: str | Path, tasks: Sequence[str], **options: Any) -> pa.Table:
    """Return a row for each metric of each task: `task`, `metric`, `value`, `stderr`, `n`.

    `options` are keys of the section `eval`. Results that exist are not computed again.
    """
    import pyarrow as pa

    from dtt.evaluate import evaluation

    _log()
    cfg = evaluation.configured(str(source), {"tasks": tuple(tasks), **options})
    opened = evaluation.open_evaluation(cfg)
    [model, *_] = evaluation.choose_models(str(source), None, None)
    rows = [
        {"task": found.task, "metric": name, **vars(score), "n": found.n}
        for found in opened.run(model, None, lambda: False)
        for name, score in found.scores.items()
    ]
    return pa.Table.from_pylist(rows)


def export(source: Job | str | Path, out: str | Path | None = None, *overrides: str) -> Path:
    """Export a checkpoint as a Hugging Face folder, compare logits with those of transformers, and
    return the folder.

    `source` is a job, or JOB@STEP; `overrides` are keys of the section `export`.
    """
    from dtt.hf import export as body

    _log()
    name = str(source.path if isinstance(source, Job) else source)
    folder = None if out is None else Path(out)
    return body.export(name, overrides, out=folder)[0]
