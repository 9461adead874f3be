"""`dtt eval compare`: paired differences between the results of two models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from dtt.base.errors import ConfigError, InputError
from dtt.base.log import log
from dtt.checkpoint import store
from dtt.config.init import HF
from dtt.evaluate.models import folder_model, folder_results
from dtt.evaluate.tasks.metrics import compare
from dtt.evaluate.tasks.result_files import SealedResult, of_weights, read, read_sealed, weights_of
from dtt.hf.model_source import job_of

SAME = ("data_sha256", "task_sha256", "shots", "limit", "chat", "bos", "scoring")
"""Entries of a header that must be equal: they change what a model is asked, and how it is scored.
"""
PREFERRED = ("precision", "ema", "samples")
"""Entries that may differ. Among several results, those that agree in most of them are compared."""


Wanted = Callable[[Mapping[str, Any]], bool]
"""Function that returns True for the header of a result to compare."""
Pair = tuple[SealedResult, SealedResult]


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
    Face folder, or a folder of result files. Only questions that both have answered count. `tasks`
    and the options up to `bos` select results that were computed with them. Raises InputError
    without results of a common task, and ConfigError if the two were asked different questions, or
    for any of the other `options`.
    """
    for name, value in options.items():
        flag = "--step" if name == "step" else f"eval.{name}"
        if value not in (None, ()):
            raise ConfigError(
                f"dtt eval compare does not take {flag}",
                why="it reads recorded results, and evaluates nothing",
                next=f"dtt eval compare {one} {other}; the step is part of a name: JOB@STEP",
            )
    names: set[str] | None = None
    if tasks:
        from dtt.evaluate.tasks.definition import load_tasks

        names = {task.name for task in load_tasks(tasks)}
    equal = {"ema": ema or None, "shots": shots, "limit": limit, "bos": bos}

    def wanted(header: Mapping[str, Any]) -> bool:
        return (
            (names is None or header["task"] in names)
            and not (chat and header["chat"] is None)
            and all(header[name] == value for name, value in equal.items() if value is not None)
        )

    ours, theirs = (_sealed(source, wanted) for source in (one, other))
    common = [name for name in ours if name in theirs]
    if not common:
        raise InputError(
            f"{one} and {other} have no results of the same task",
            why=f"{one}: {', '.join(ours)}; {other}: {', '.join(theirs)}",
            next=f"dtt eval {other} --tasks {next(iter(ours))}",
        )
    pairs = [max(product(ours[name], theirs[name]), key=_preference) for name in common]
    for pair in pairs:
        if differing := _differing(pair, SAME):
            error = _not_comparable(pair, differing[0])
            if all(_differing(each, SAME) for each in pairs):
                raise error
            log.warning("left out: %s", error)
        else:
            _show(one, other, pair, as_json=as_json)


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


def _sealed(source: str, wanted: Wanted) -> dict[str, list[SealedResult]]:
    """Return the complete results of a model by task, of a job those of one step; InputError if
    there are none."""
    for folder, weights in _recorded(source):
        every = list(filter(None, map(read_sealed, sorted(folder.glob("*.jsonl")))))
        if weights is None and len({sealed.header["weights"] for sealed in every}) > 1:
            raise ConfigError(
                f"{source} does not say which model is meant",
                where=folder,
                why="it has the results of several weights",
                next="name the folder of the model, or JOB@STEP",
            )
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


def _not_comparable(pair: Pair, name: str) -> ConfigError:
    a, b = pair
    return ConfigError(
        f"the two models were asked different questions of {a.header['task']}"
        if name != "scoring"
        else f"the answers to {a.header['task']} were scored by different versions of dtt",
        where=f"{a.path}, {b.path}",
        why=f"{name} differs: {a.header.get(name)}, {b.header.get(name)}",
        next="dtt eval MODEL evaluates again with the options that you give it",
    )


def _preference(pair: Pair) -> tuple[float, ...]:
    """Return the sort key of a pair: the largest is compared.

    The two should agree; then weights that are not averages, all questions, and many of them are
    preferred; and at last the newest files.
    """
    return (
        -len(_differing(pair, SAME)),
        -len(_differing(pair, PREFERRED)),
        -sum(one.header["ema"] for one in pair),
        sum(one.header["limit"] is None for one in pair),
        sum(one.result.n for one in pair),
        sum(one.path.stat().st_mtime for one in pair),
    )


def _differing(pair: Pair, names: Sequence[str]) -> list[str]:
    a, b = pair
    return [name for name in names if a.header.get(name) != b.header.get(name)]


def _show(one: str, other: str, pair: Pair, *, as_json: bool) -> None:
    """Print the difference of each metric; InputError if no question was asked to both."""
    first, second = pair
    task, kind, chance = (first.header[name] for name in ("task", "type", "chance"))
    found = compare(kind, chance, read(first.path).records, read(second.path).records)
    if not found:
        raise InputError(
            f"no question of {task} was asked to both models",
            where=f"{first.path}, {second.path}",
        )
    if as_json:
        metrics = {name: asdict(each) | {"interval": each.interval} for name, each in found.items()}
        record = {"first": one, "second": other, "task": task}
        record |= {"files": [str(sealed.path) for sealed in pair], "metrics": metrics}
        print(json.dumps(record), flush=True)
        return
    if first.header["weights"] == second.header["weights"] and one != other:
        log.warning("%s and %s have the same weights", one, other)
    named = []
    for source, header in ((one, first.header), (other, second.header)):
        options = [f"--{name}" for name in ("ema", "chat") if header[name]]
        options += [f"eval.{name}={header[name]}" for name in ("shots", "limit") if header[name]]
        options += [f"eval.bos={header['bos']}"] if header["bos"] != "tokenizer" else []
        named.append(f"{source} ({' '.join(options)})" if options else source)
    n = next(iter(found.values())).n
    print(f"{task}: {named[1]} minus {named[0]}, {n} questions")
    print(
        f"  {'metric':<16}{'first':>11}{'second':>11}{'difference':>12}{'stderr':>10}"
        "  95 % interval"
    )
    for name, each in found.items():
        low, high = each.interval or (None, None)
        interval = "" if low is None else f"[{low:+.4g}, {high:+.4g}]"
        stderr = "" if each.stderr is None else f"{each.stderr:.4g}"
        print(
            f"  {name:<16}{each.first:>11.5g}{each.second:>11.5g}{each.difference:>+12.4g}"
            f"{stderr:>10}  {interval}".rstrip()
        )
    print()
