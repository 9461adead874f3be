"""`dtt eval compare`: paired differences between the results of two models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dtt.base.errors import ConfigError, InputError
from dtt.base.log import log
from dtt.checkpoint import store
from dtt.config.init import HF
from dtt.evaluate.models import folder_model, folder_results
from dtt.evaluate.states import weights_of
from dtt.evaluate.tasks.paired import PairedDifference, compare
from dtt.evaluate.tasks.result_files import SealedResult, of_weights, read, read_sealed
from dtt.hf.model_source import job_of

SAME = ("data_sha256", "task_sha256", "shots", "limit", "chat", "bos", "scoring")
"""Entries of a header that must be equal: they change what a model is asked, and how it is scored.
"""
PREFERRED = ("precision", "ema", "samples")
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
    _refuse_options(options, one, other)
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
    pairs = [_best_pair(ours[name], theirs[name]) for name in common]
    comparable = [pair for pair in pairs if not _differing(*pair, SAME)]
    for pair in pairs:
        if differing := _differing(*pair, SAME):
            error = _not_comparable(*pair, differing[0])
            if not comparable:
                raise error
            log.warning("left out: %s", error)
    for first, second in comparable:
        found = _compared(first, second)
        if as_json:
            print(json.dumps(_record(one, other, first, second, found)), flush=True)
            continue
        if first.header["weights"] == second.header["weights"] and one != other:
            log.warning("%s and %s have the same weights", one, other)
        name = first.header["task"]
        _show(_described(one, first), _described(other, second), name, found)


def _refuse_options(options: Mapping[str, Any], one: str, other: str) -> None:
    """Raise ConfigError for an option of an evaluation that is set."""
    for name, value in options.items():
        flag = f"--{name}" if name in ("step", "harness") else f"eval.{name}"
        if value not in (None, ()):
            raise ConfigError(
                f"dtt eval compare does not take {flag}",
                why="it reads recorded results, and evaluates nothing",
                next=f"dtt eval compare {one} {other}; the step is part of a name: JOB@STEP",
            )


def _recorded(source: str) -> Iterator[tuple[Path, str | None]]:
    """Yield the folders that may have the results of a model, and the hash of its weights.

    Of a job, the newest step comes first; the hash is "" if its checkpoint was deleted. It is None
    for a folder of results, and for a model whose files are not here.
    """
    folder, job = Path(source.removeprefix(HF)).expanduser(), job_of(source)
    if (folder / "config.json").is_file():
        yield folder_results(source), folder_model(source, folder).identity()
    elif job.exists:
        step = store.parse(source)[1]
        for one in reversed([one for one in store.steps(job.evals) if step in (None, one)]):
            weights = weights_of(store.folder_of(job.checkpoints, one))
            yield store.folder_of(job.evals, one), weights
    else:
        yield from ((folder, None), (folder_results(source), None))


def _names(tasks: Sequence[str]) -> set[str] | None:
    """Return the names of tasks and of the tasks of suites; None for all."""
    if not tasks:
        return None
    from dtt.evaluate.tasks.definition import load_tasks

    return {task.name for task in load_tasks(tasks)}


def _sealed(source: str, wanted: Wanted) -> dict[str, list[SealedResult]]:
    """Return the complete results of a model by task, of a job those of one step; InputError if
    there are none."""
    for folder, weights in _recorded(source):
        every = list(filter(None, map(read_sealed, sorted(folder.glob("*.jsonl")))))
        if weights is None:
            _refuse_several(source, folder, every)
        found: dict[str, list[SealedResult]] = {}
        for sealed in of_weights(every, weights or ""):
            if wanted(sealed.header):
                found.setdefault(sealed.header["task"], []).append(sealed)
        if found:
            return found
    raise InputError(
        f"{source} has no results to compare",
        why="it was not evaluated on these tasks with these options, or not completely",
        next=f"dtt eval {source} --tasks core",
    )


def _refuse_several(source: str, folder: Path, results: Sequence[SealedResult]) -> None:
    """Raise ConfigError if the results of a folder are those of several models."""
    if len({sealed.header["weights"] for sealed in results}) > 1:
        raise ConfigError(
            f"{source} does not say which model is meant",
            where=folder,
            why="it has the results of several weights",
            next="name the folder of the model, or JOB@STEP",
        )


def _best_pair(
    ours: Sequence[SealedResult], theirs: Sequence[SealedResult]
) -> tuple[SealedResult, SealedResult]:
    """Return the two results that agree best."""
    return max(((a, b) for a in ours for b in theirs), key=lambda pair: _preference(*pair))


def _not_comparable(a: SealedResult, b: SealedResult, name: str) -> ConfigError:
    return ConfigError(
        f"the two models were asked different questions of {a.header['task']}"
        if name != "scoring"
        else f"the answers to {a.header['task']} were scored by different versions of dtt",
        where=f"{a.path}, {b.path}",
        why=f"{name} differs: {a.header.get(name)}, {b.header.get(name)}",
        next="dtt eval MODEL evaluates again with the options that you give it",
    )


def _preference(a: SealedResult, b: SealedResult) -> tuple[float, ...]:
    """Return the sort key of a pair: the largest is compared.

    The two should agree; then weights that are not averages, all questions, and many of them are
    preferred; and at last the newest files.
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
    options += [f"eval.bos={header['bos']}"] if header["bos"] != "tokenizer" else []
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
