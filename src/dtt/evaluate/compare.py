"""`dtt eval compare`: paired differences between the results of two models."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dtt.base.errors import ConfigError, InputError
from dtt.checkpoint import store
from dtt.evaluate.models import folder_results
from dtt.evaluate.tasks.paired import PairedDifference, compare
from dtt.evaluate.tasks.result_files import SealedResult, read, read_sealed
from dtt.hf.model_source import job_of

SAME = ("data_sha256", "task_sha256", "shots", "chat", "bos")
"""Entries of a header that must be equal, because they change what a model is asked."""
PREFERRED = ("limit", "precision", "ema", "samples")
"""Entries that may differ. Among several results, those that agree in most of them are compared."""


Wanted = Callable[[Mapping[str, Any]], bool]
"""Function that returns True for the header of a result to compare."""


def run(
    one: str,
    other: str,
    *,
    tasks: Sequence[str] = (),
    ema: bool = False,
    chat: bool = False,
    shots: int | None = None,
    limit: int | None = None,
    bos: str | None = None,
    as_json: bool = False,
    **options: Any,
) -> None:
    """Print the difference of each metric between two models that `dtt eval` has evaluated.

    `one` and `other` are `JOB`, `JOB@STEP` (by default the newest step with results), a Hugging
    Face folder, or a folder of result files. Only questions that both have answered count; no model
    is loaded. `tasks` and the options up to `bos` select results that were computed with them.
    Raises InputError if there are no results of a common task, and ConfigError if the two were
    asked different questions or for any of the other `options`.
    """
    for name, value in options.items():
        flag = f"--{name}" if name in ("step", "harness") else f"eval.{name}"
        if value not in (None, ()):
            raise ConfigError(
                f"dtt eval compare does not take {flag}",
                why="it reads recorded results, and evaluates nothing",
                next=f"dtt eval compare {one} {other}; the step is part of a name: JOB@STEP",
            )
    names = _names(tasks)
    equal = {"ema": ema or None, "shots": shots, "limit": limit, "bos": bos}
    equal = {name: value for name, value in equal.items() if value is not None}

    def wanted(header: Mapping[str, Any]) -> bool:
        return (
            (names is None or header["task"] in names)
            and not (chat and header["chat"] is None)
            and all(header[name] == value for name, value in equal.items())
        )

    ours, theirs = (_sealed(source, wanted) for source in (one, other))
    common = [name for name in ours if name in theirs]
    if not common:
        raise InputError(
            f"{one} and {other} have no results of the same task",
            why=f"{one}: {', '.join(ours)}; {other}: {', '.join(theirs)}",
            next=f"dtt eval {other} --tasks {next(iter(ours))}",
        )
    for name in common:
        first, second = _comparable(ours[name], theirs[name])
        found = _compared(first, second)
        if as_json:
            print(json.dumps(_record(one, other, first, second, found)), flush=True)
        else:
            _show(_described(one, first), _described(other, second), name, found)


def _folders(source: str) -> list[Path]:
    """Return the folders that may have the results of a model; of a job, the newest step first."""
    folder, job = Path(source), job_of(source)
    if job.exists:
        step = store.parse(source)[1]
        steps = [one for one in store.steps(job.evals) if step in (None, one)]
        return [store.folder_of(job.evals, one) for one in reversed(steps)]
    return [folder, folder_results(source)]


def _names(tasks: Sequence[str]) -> set[str] | None:
    """Return the names of tasks and of the tasks of suites; None for all."""
    if not tasks:
        return None
    from dtt.evaluate.tasks.definition import load_tasks

    return {task.name for task in load_tasks(tasks)}


def _sealed(source: str, wanted: Wanted) -> dict[str, list[SealedResult]]:
    """Return the complete results of a model by task, of a job those of one step; InputError if
    there are none."""
    for folder in _folders(source):
        found: dict[str, list[SealedResult]] = {}
        for path in sorted(folder.glob("*.jsonl")):
            sealed = read_sealed(path)
            if sealed is not None and wanted(sealed.header):
                found.setdefault(sealed.header["task"], []).append(sealed)
        if found:
            return found
    raise InputError(
        f"{source} has no results to compare",
        why="it was not evaluated on these tasks with these options, or not completely",
        next=f"dtt eval {source} --tasks core",
    )


def _comparable(
    ours: Sequence[SealedResult], theirs: Sequence[SealedResult]
) -> tuple[SealedResult, SealedResult]:
    """Return the two results that agree best; ConfigError if none were asked the same."""
    a, b = max(((a, b) for a in ours for b in theirs), key=lambda pair: _preference(*pair))
    differing = _differing(a, b, SAME)
    if not differing:
        return a, b
    name = differing[0]
    raise ConfigError(
        f"the two models were asked different questions of {a.header['task']}",
        where=f"{a.path}, {b.path}",
        why=f"{name} differs: {a.header.get(name)}, {b.header.get(name)}",
    )


def _preference(a: SealedResult, b: SealedResult) -> tuple[float, ...]:
    """Return the sort key of a pair: the largest is compared.

    The two should agree; then weights that are not averages, all questions, and many of them are
    preferred; and at last the newest files, such as those of the weights that replaced others.
    """
    headers = a.header, b.header
    return (
        -len(_differing(a, b, SAME)),
        -len(_differing(a, b, PREFERRED)),
        -sum(header["ema"] for header in headers),
        sum(header["limit"] is None for header in headers),
        a.result.n + b.result.n,
        a.path.stat().st_mtime + b.path.stat().st_mtime,
    )


def _described(source: str, sealed: SealedResult) -> str:
    """Return the name of a model, with the options of its result."""
    header = sealed.header
    options = [f"--{name}" for name in ("ema", "chat") if header[name]]
    options += [f"eval.{name}={header[name]}" for name in ("shots", "limit") if header[name]]
    return f"{source} ({' '.join(options)})" if options else source


def _differing(a: SealedResult, b: SealedResult, names: Sequence[str]) -> list[str]:
    return [name for name in names if a.header.get(name) != b.header.get(name)]


def _compared(first: SealedResult, second: SealedResult) -> Mapping[str, PairedDifference]:
    """Return the difference of each metric; InputError if no question was asked to both."""
    header = first.header
    found = compare(
        header["type"], header["chance"], read(first.path).records, read(second.path).records
    )
    if not found:
        raise InputError(
            f"no question of {header['task']} was asked to both models",
            where=f"{first.path}, {second.path}",
        )
    return found


def _record(
    one: str,
    other: str,
    first: SealedResult,
    second: SealedResult,
    found: Mapping[str, PairedDifference],
) -> dict[str, Any]:
    metrics = {name: asdict(each) | {"interval": each.interval} for name, each in found.items()}
    return {
        "first": one,
        "second": other,
        "task": first.header["task"],
        "files": [str(first.path), str(second.path)],
        "metrics": metrics,
    }


def _show(one: str, other: str, task: str, found: Mapping[str, PairedDifference]) -> None:
    n = next(iter(found.values())).n
    print(f"{task}: {other} minus {one}, {n} questions")
    print(
        f"  {'metric':<16}{'first':>11}{'second':>11}{'difference':>12}{'stderr':>10}"
        f"  {'95 % interval':<24}{'only first':>11}{'only second':>12}{'McNemar p':>11}"
    )
    for name, each in found.items():
        low, high = each.interval or (None, None)
        interval = "" if low is None else f"[{low:+.4g}, {high:+.4g}]"
        stderr = "" if each.stderr is None else f"{each.stderr:.4g}"
        test = each.mcnemar
        counts = (
            ""
            if test is None
            else f"{test.only_first:>11}{test.only_second:>12}{test.p_value:>11.4g}"
        )
        print(
            f"  {name:<16}{each.first:>11.5g}{each.second:>11.5g}{each.difference:>+12.4g}"
            f"{stderr:>10}  {interval:<24}{counts}".rstrip()
        )
    print()
