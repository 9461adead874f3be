"""The output of `dtt eval`: tables, lines of JSON, and the noise over the last checkpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence

from dtt.artifacts.jobdir import JobDir
from dtt.checkpoint import store
from dtt.evaluate.models import EvaluatedModel
from dtt.evaluate.tasks.metrics import TaskResult, noise
from dtt.evaluate.tasks.result_files import ResultFile, of_weights, read_sealed, weights_of

CHECKPOINTS = 5
"""Number of newest checkpoints whose results determine the noise."""


def show(
    model: EvaluatedModel,
    files: Sequence[ResultFile],
    results: Sequence[TaskResult],
    *,
    as_json: bool,
) -> None:
    """Print the results of a model: a table, or one JSON object per task and line."""
    noises = [_noise_of(model, file) for file in files]
    if as_json:
        asked = ("shots", "limit", "bos", "chat", "ema", "precision", "revision", "data_sha256")
        for file, result, noisy in zip(files, results, noises, strict=True):
            record = {"model": model.name, "step": model.step, **result.dump(), "noise": noisy}
            record |= {name: file.header[name] for name in asked} | {"file": str(file.path)}
            print(json.dumps(record), flush=True)
        return
    print(f"{model.name}{' (averaged weights)' * model.ema}")
    width = max(len(result.task) for result in results)
    print(f"  {'task':<{width}}  {'n':>6}  {'metric':<16}{'value':>10}{'stderr':>10}{'noise':>9}")
    for result, noisy in zip(results, noises, strict=True):
        lead = f"{result.task:<{width}}  {result.n:>6}"
        for name, score in result.scores.items():
            stderr = "" if score.stderr is None else f"{score.stderr:.4g}"
            share = f"{100 * noisy[name]:.2g} %" if name in noisy else ""
            print(f"  {lead}  {name:<16}{score.value:>10.5g}{stderr:>10}{share:>9}")
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


def _noise_of(model: EvaluatedModel, file: ResultFile) -> dict[str, float]:
    """Return the noise of each metric over the newest evaluated checkpoints, up to this one.

    Counts results with the same task, data and options. Empty with fewer than two.
    """
    if model.step is None:
        return {}
    folder, values = model.results.parent, list[TaskResult]()
    checkpoints = JobDir(folder.parent).checkpoints
    steps = [step for step in store.steps(folder) if step <= model.step]
    for step in reversed(steps):
        if len(values) == CHECKPOINTS:
            break
        paths = store.folder_of(folder, step).glob(f"{file.header['task']}-*.jsonl")
        sealed = filter(None, map(read_sealed, sorted(paths)))
        # The header of another checkpoint differs in the weights only.
        alike = [
            one for one in sealed if one.header == {**file.header, "weights": one.header["weights"]}
        ]
        weights = file.header["weights"]
        if step != model.step:
            weights = weights_of(store.folder_of(checkpoints, step))
        values += [one.result for one in of_weights(alike, weights)[:1]]
    found = {
        name: noise([value.scores[name].value for value in values if name in value.scores])
        for name in (values[0].scores if values else ())
    }
    return {name: value for name, value in found.items() if value is not None}
