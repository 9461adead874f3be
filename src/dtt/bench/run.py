"""`dtt bench`: train a recipe several times, score the runs, and record the result."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dtt
from dtt.artifacts.corpus import CorpusManifest
from dtt.artifacts.jobdir import JobDir, git_state
from dtt.artifacts.manifest import FileRecord, fingerprint
from dtt.artifacts.manifests import DataManifest
from dtt.base.errors import ConfigError, ExitCode
from dtt.base.files import exclusive, write_atomically
from dtt.base.log import log
from dtt.base.reading import read_record
from dtt.bench import published_tokens, score_table, target_watch
from dtt.bench import recipe as recipes
from dtt.bench.bench_result import (
    BenchResult,
    DataFacts,
    Spread,
    remarks,
    target_test,
)
from dtt.bench.machine import MachineFacts, this_machine
from dtt.bench.published_tokens import PublishedManifest
from dtt.bench.recipe import RecipeFile
from dtt.bench.run_score import first_reached, score
from dtt.bench.target_watch import TargetWatch
from dtt.config.explain import describe_all
from dtt.config.load import resolve
from dtt.config.run import RunConfig
from dtt.evaluate.tasks.definition import load_tasks
from dtt.launch import pipeline
from dtt.launch.pipeline import PipelineRun, PipelineStep
from dtt.launch.sweep.run import columns

FOLDER = Path("jobs/bench")
START = "start.json"
"""File that records, before the first run, what an interrupted bench must share to be continued."""
NOT_COMPARED = {"name", "seed"}
"""Keys that differ between the runs of a recipe."""


@dataclass(frozen=True)
class Bench:
    """A recipe with its settings on this machine."""

    file: RecipeFile
    overrides: tuple[str, ...]
    runs: int
    config: RunConfig
    """Configuration of its runs, without name and seed."""
    changed: dict[str, Any]
    """Keys whose values differ from those of the recipe."""
    code: dict[str, str] | None
    """Commit of dtt, and hash of its uncommitted changes; None outside a clone."""
    machine: MachineFacts

    @property
    def tasks(self) -> list[str]:
        """Names of the benchmark tasks of its runs."""
        return [task.name for task in load_tasks(self.config.eval.tasks)]

    def identity(self) -> dict[str, Any]:
        """Return what an interrupted bench must share to be continued."""
        return {
            "recipe_key": self.file.key,
            "overrides": list(self.overrides),
            "config_sha256": self.config_sha256,
            "version": dtt.__version__,
            "code": self.code,
            "machine": f"{self.machine.summary}, torch {self.machine.torch}",
        }

    @property
    def config_sha256(self) -> str:
        """Hash of the configuration of its runs."""
        content = self.config.model_dump(mode="json", exclude=NOT_COMPARED)
        return fingerprint(content)


def run(name: str | None, overrides: Sequence[str], *, runs: int | None) -> None:
    """Run the recipe `name` and print its result; without a name, list recipes.

    `runs` replaces the recipe's number of runs. Continues an interrupted bench of the same recipe,
    settings, code and machine. If a run fails or is stopped, exits with its code.
    """
    if name is None:
        if runs is not None:
            raise ConfigError("--runs needs a recipe", next="dtt bench laptop")
        files = recipes.shipped()
        rows = [("recipe", "runs", "what", "needs")]
        rows += [(f.name, str(f.recipe.runs), f.recipe.description, f.recipe.needs) for f in files]
        print("\n".join(columns(rows)), end="\n\n")
        print("\n".join(columns(score_table.table(files))))
        return
    bench = _prepare(recipes.find(name), overrides, runs)
    with exclusive(FOLDER, "dtt bench"):  # two at once would slow each other down
        if bench.file.recipe.tokens is not None:
            published_tokens.fetch(bench.file.recipe.tokens)
        folder = _folder(bench)
        _train(bench, folder)
        result = _result(bench, folder)
        write_atomically(folder / BenchResult.filename, result.dump())
    print(f"\n{bench.file.name}: {folder / BenchResult.filename}\n")
    print("\n".join(columns(list(score_table.summary(result)))), end="\n\n")
    print("\n".join(columns(score_table.table([bench.file], result))))


def _prepare(file: RecipeFile, overrides: Sequence[str], runs: int | None) -> Bench:
    """Resolve the configuration of a recipe with `overrides` and the environment."""
    for argument in overrides:
        key = argument.partition("=")[0]
        if key in NOT_COMPARED:
            raise ConfigError(
                f"{key} cannot be set: each run has its own",
                next="leave it out; --runs N sets the number of seeds",
            )
    recipe, arguments = file.recipe, file.arguments()
    config = resolve(recipe.config, [*arguments, *overrides]).config
    plain = resolve(recipe.config, arguments, env={}).config
    known = {".".join(key): entry.value for key, entry in describe_all(plain)}
    changed = {
        ".".join(key): entry.value
        for key, entry in describe_all(config)
        if ".".join(key) not in NOT_COMPARED
        and (".".join(key) not in known or entry.value != known[".".join(key)])
    }
    state = git_state(Path(dtt.__file__).parent)
    code = None
    if state is not None:
        changes = hashlib.sha256(state["diff"].encode()).hexdigest() if state["diff"] else ""
        code = {"commit": state["commit"], "changes": changes}
    settings = json.loads(json.dumps(changed, default=str))
    machine = this_machine(config.train.device, config.pipeline.train_processes)
    bench = Bench(file, tuple(overrides), runs or recipe.runs, config, settings, code, machine)
    for metric in (recipe.score.metric, *recipe.score.beside):
        kind, task, *_ = metric.split(".")
        if kind == "task" and not (bench.tasks if task == "*" else task in bench.tasks):
            raise ConfigError(
                f"the runs do not measure {metric}, the score of {file.name}",
                where="eval.tasks",
                why=f"it is {bench.tasks}",
                next=f"leave eval.tasks as it is in {file.path}",
            )
    return bench


def _folder(bench: Bench) -> Path:
    """Return the folder of an interrupted bench that can be continued, or of a new one."""
    root, identity = FOLDER / bench.file.name, bench.identity()
    for folder in sorted(root.glob("*"), reverse=True):
        started = read_record(folder / START, {"recipe_key": str})
        if started is None or (folder / BenchResult.filename).exists():
            continue
        if started == identity:
            done = sum(_finished(bench, _job(folder, seed)) for seed in range(bench.runs))
            log.info("continuing %s: %d of %d runs are done", folder, done, bench.runs)
            return folder
        different = [key for key, value in identity.items() if started.get(key) != value]
        log.info("%s is not continued: it has another %s", folder, ", ".join(different))
    folder = root / f"{datetime.now(UTC).astimezone():%Y%m%d-%H%M%S}"
    folder.mkdir(parents=True)
    write_atomically(folder / START, json.dumps(identity, indent=1) + "\n")
    return folder


def _job(folder: Path, seed: int) -> JobDir:
    return JobDir(folder / f"seed-{seed}")


def _finished(bench: Bench, job: JobDir) -> bool:
    """Return True if a run has reached its target or ended with its schedule."""
    if first_reached(job, bench.file.recipe.score, bench.tasks) is not None:
        return True
    ending = job.exit_record(job.attempt())
    return ending is not None and ending["code"] == ExitCode.DONE


def _train(bench: Bench, folder: Path) -> None:
    """Download and tokenize the data, and train the runs that are not finished, one by one."""
    config, arguments = bench.file.recipe.config, [*bench.file.arguments(), *bench.overrides]
    runs: list[PipelineRun] = []
    for seed in range(bench.runs):
        job = _job(folder, seed)
        if _finished(bench, job):
            continue
        own = [*arguments, f"name={job.root.relative_to('jobs')}", f"seed={seed}"]
        runs += pipeline.find_runs(config, own, ("-c", config, *own), None)[1]
    todo = list(pipeline.steps(runs))
    for number, step in enumerate(todo, start=1):
        _run_step(bench, step, f"{number}/{len(todo)}")


def _run_step(bench: Bench, step: PipelineStep, place: str) -> None:
    """Run a step as a process, and stop it at the target; exit with its exit code if it fails."""
    job = step.run.job
    before = job.attempt()
    if step.command != "train":
        code = pipeline.run_step(step, place)
        done = code == ExitCode.DONE
    else:
        with TargetWatch(job, bench.file.recipe.score, bench.tasks):
            code = pipeline.run_step(step, place)
        ending = job.exit_record(job.attempt()) or {}
        done = code == ExitCode.DONE or str(ending.get("asked_by")).startswith(target_watch.BY)
        if done and code != ExitCode.DONE:
            log.info("%s was stopped, because it has reached its target", job.root)
    if not done:
        started = job.attempt() > before
        title = f"{step.title} of {job.root}"
        sys.exit(pipeline.report_stop(title, code, job, started=started, of="bench"))


def _result(bench: Bench, folder: Path) -> BenchResult:
    """Score the runs and return the result."""
    file, rule, tasks = bench.file, bench.file.recipe.score, bench.tasks
    jobs = [_job(folder, seed) for seed in range(bench.runs)]
    runs = tuple(score(job, rule, tasks, seed) for seed, job in enumerate(jobs))
    against = remarks(file, bench.machine, runs, bench.changed)
    values, seconds = [run.value for run in runs], [run.seconds for run in runs]
    beside = {name: [run.beside[name] for run in runs] for name in rule.beside}
    start = datetime.strptime(folder.name, "%Y%m%d-%H%M%S").astimezone()
    return BenchResult(
        recipe=file.name,
        recipe_key=file.key,
        started=start.isoformat(),
        overrides=bench.overrides,
        changed=bench.changed,
        config_sha256=bench.config_sha256,
        version=dtt.__version__,
        code=bench.code,
        machine=bench.machine,
        data=_data(bench, jobs[0]),
        score=rule,
        runs=runs,
        value=Spread.of(values),
        seconds=_spread(seconds),
        steps=Spread.of([run.step for run in runs]),
        tokens=Spread.of([run.tokens for run in runs]),
        beside={name: _spread(column) for name, column in beside.items()},
        target_test=target_test(rule, values),
        resumed=any(run.attempts > 1 for run in runs),
        official=not against,
        remarks=against,
    )


def _spread(values: Sequence[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return Spread.of(known) if known else None


def _data(bench: Bench, job: JobDir) -> DataFacts:
    """Return the data that the runs have read, from its manifests."""
    tokens = bench.file.recipe.tokens
    read = DataManifest.read(job.root)
    revision, files = None, tuple[FileRecord, ...]()
    if tokens is not None:
        published = PublishedManifest.read(tokens.folder)
        origin, revision, files = published.repo, published.revision, published.files
    elif bench.config.reads_corpus and CorpusManifest.exists(bench.config.corpus_dir):
        corpus = CorpusManifest.read(bench.config.corpus_dir)
        origin, revision, files = corpus.source.id, corpus.source.revision, corpus.files
    else:
        origin = ", ".join(source.path for source in read.sources)
    records = tuple(FileRecord(path=f.path, bytes=f.bytes, sha256=f.sha256) for f in files)
    key = fingerprint([read.key, read.tokenizer_sha256, [file.sha256 for file in records]])
    return DataFacts(source=origin, revision=revision, key=key, files=records)
