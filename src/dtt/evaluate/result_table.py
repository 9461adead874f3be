"""The output of `dtt eval`: tables, lines of JSON, and the noise over the last checkpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dtt.artifacts.jobdir import JobDir
from dtt.checkpoint import store
from dtt.evaluate.models import EvaluatedModel
from dtt.evaluate.states import weights_of
from dtt.evaluate.tasks.metrics import Score, TaskResult
from dtt.evaluate.tasks.paired import noise
from dtt.evaluate.tasks.result_files import ResultFile, of_weights, read_sealed

CHECKPOINTS = 5
"""Number of newest checkpoints whose results determine the noise."""
OF_A_MODEL = ("weights",)
"""Entries of a header that differ between the checkpoints of a job."""


def show(
    model: EvaluatedModel,
    files: Sequence[ResultFile],
    results: Sequence[TaskResult],
    *,
    as_json: bool,
) -> None:
    """Print the results of a model: a table, or one JSON object per task and line."""
    noises = [noise_of(model, file) for file in files]
    if as_json:
        for file, result, noisy in zip(files, results, noises, strict=True):
            print(json.dumps(record(model, file, result, noisy)), flush=True)
        return
    print(f"{model.name}{' (averaged weights)' * model.ema}")
    width = max(len(result.task) for result in results)
    print(f"  {'task':<{width}}  {'n':>6}  {'metric':<16}{'value':>10}{'stderr':>10}{'noise':>9}")
    for result, noisy in zip(results, noises, strict=True):
        lead = f"{result.task:<{width}}  {result.n:>6}"
        for name, score in result.scores.items():
            print(f"  {lead}  {name:<16}{_numbers(score)}{_percent(noisy.get(name)):>9}")
            lead = " " * len(lead)
        for count, what in (
            (result.truncated, "lost the beginning of a context that is too long"),
            (result.separate, "had a continuation encoded without its context"),
            (result.ties, "had several best options, of which the first counts"),
            (result.unfinished, "ended within the reasoning: max_tokens is too small"),
        ):
            if count:
                print(f"  {'':<{width}}  {count:>6}  of these {what}")
    print(flush=True)


def record(
    model: EvaluatedModel, file: ResultFile, result: TaskResult, noises: dict[str, float]
) -> dict[str, Any]:
    """Return the JSON object of a result."""
    asked = ("shots", "limit", "bos", "chat", "ema", "precision", "revision", "data_sha256")
    return {
        "model": model.name,
        "step": model.step,
        **result.dump(),
        "noise": noises,
        **{name: file.header[name] for name in asked},
        "file": str(file.path),
    }


def noise_of(model: EvaluatedModel, file: ResultFile) -> dict[str, float]:
    """Return the noise of each metric over the newest evaluated checkpoints, up to this one.

    Counts results with the same task, data and options. Empty with fewer than two.
    """
    if model.step is None:
        return {}
    wanted = _settings(file.header)
    folder, values = model.results.parent, list[TaskResult]()
    steps = [step for step in store.steps(folder) if step <= model.step]
    for step in reversed(steps):
        if len(values) == CHECKPOINTS:
            break
        paths = store.folder_of(folder, step).glob(f"{file.header['task']}-*.jsonl")
        sealed = filter(None, map(read_sealed, sorted(paths)))
        alike = [one for one in sealed if _settings(one.header) == wanted]
        weights = file.header["weights"] if step == model.step else _weights(model, step)
        values += [one.result for one in of_weights(alike, weights)[:1]]
    found = {
        name: noise([value.scores[name].value for value in values if name in value.scores])
        for name in (values[0].scores if values else ())
    }
    return {name: value for name, value in found.items() if value is not None}


def _weights(model: EvaluatedModel, step: int) -> str:
    """Return the hash of the weights of another checkpoint of a job; "" if it was deleted."""
    return weights_of(store.folder_of(JobDir(model.results.parent.parent).checkpoints, step))


def _settings(header: Any) -> dict[str, Any]:
    return {name: value for name, value in header.items() if name not in OF_A_MODEL}


def _numbers(score: Score) -> str:
    stderr = "" if score.stderr is None else f"{score.stderr:.4g}"
    return f"{score.value:>10.5g}{stderr:>10}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2g} %"
