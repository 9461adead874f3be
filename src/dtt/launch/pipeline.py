"""`dtt pipeline`: run every step in order, each as the command that a user would type.

The steps are download, clean (with a section `clean`), tokenize, train and export. A configuration
with stages of training has several steps of each kind but the last.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, assert_never

from dtt.artifacts.corpus import CorpusManifest
from dtt.artifacts.jobdir import JobDir
from dtt.artifacts.manifests import ExportManifest, TokensManifest
from dtt.artifacts.selection_manifest import SelectionManifest
from dtt.artifacts.token_folders import token_sources
from dtt.base import local
from dtt.base.errors import ConfigError, ExitCode
from dtt.base.log import log
from dtt.config.clean import CleanConfig
from dtt.config.layers import Layer, is_key
from dtt.config.merging import Resolved
from dtt.config.run import RunConfig
from dtt.config.train import SAMPLE_TEMPERATURE
from dtt.data.corpus.described import check_tokens, read_corpus
from dtt.data.corpus.selection import selection_folder
from dtt.jobs.stages import FinalCheckpoint, done, report_shadowed
from dtt.launch.checks import caught
from dtt.report import run as report
from dtt.track.jsonl import RunSummary, summarize
from dtt.train.find_job import find_job, find_stages

MAX_TOKENIZE_PROCESSES = 8
Command = Literal["download", "clean", "tokenize", "train", "export"]


@dataclass(frozen=True)
class PipelineRun:
    """A training run of the pipeline: the only one, or a stage of training."""

    resolved: Resolved
    job: JobDir
    stage: str | None
    options: tuple[str, ...]
    """Arguments that select its configuration."""

    @property
    def cfg(self) -> RunConfig:
        """The validated configuration."""
        return self.resolved.config


@dataclass(frozen=True)
class PipelineStep:
    """A command of the pipeline, for one of its runs."""

    command: Command
    run: PipelineRun

    @property
    def title(self) -> str:
        """The name of the step in messages."""
        named = self.run.stage is not None and self.command != "export"
        return f"{self.command} {self.run.stage}" if named else self.command

    def has_output(self) -> bool:
        """Return True if its files are complete, and those that its configuration describes."""
        cfg = self.run.cfg
        match self.command:
            case "download":
                found = (
                    error for one in cfg.corpora for error in caught(partial(read_corpus, one))
                )
                return next(found, None) is None
            case "clean":
                return all(map(_is_cleaned, cfg.corpora))
            case "tokenize":
                found = (e for one in cfg.corpora for e in caught(partial(_check_tokenized, one)))
                return next(found, None) is None
            case "train":
                final = FinalCheckpoint.of(self.run.job)
                return final is not None and final.step >= cfg.train.steps > 0
            case "export":
                final, folder = FinalCheckpoint.of(self.run.job), Path("exports") / cfg.name
                exported = ExportManifest.exists(folder) and ExportManifest.read(folder)
                return bool(exported and final and exported.checkpoint_sha256 == final.sha256)
            case _:
                assert_never(self.command)

    def argv(self) -> list[str]:
        """Return its command line. Call it when the step is next: it checks the disk.

        `clean` and `tokenize` run under mpirun if that is available and there is work for several
        processes, `train` under torchrun for more than one process.
        """
        cfg, arguments = self.run.cfg, [self.command, *self.run.options]
        alone = local.dtt_argv(*arguments)
        match self.command:
            case "download":
                return alone
            case "clean" | "tokenize":
                most = min(local.cores(), MAX_TOKENIZE_PROCESSES)
                processes = cfg.pipeline.tokenize_processes or most
                if processes == 1 or self.has_output():
                    return alone
                return local.mpi_argv(processes, alone) or alone
            case "train":
                processes = train_processes(cfg)
                return alone if processes == 1 else local.torchrun_argv(processes, arguments)
            case "export":
                return local.dtt_argv("export", str(cfg.job_dir))
            case _:
                assert_never(self.command)


def run(
    config: str | None,
    overrides: Sequence[str],
    dataset: str | None,
    *,
    as_json: bool = False,
) -> None:
    """Run download, clean, tokenize, train and export, and print a summary.

    Each step skips work that is done already; stages of training that are done are skipped without
    starting a process.
    With `as_json`, only the summary goes to stdout. If a step fails, exits with its exit code.
    """
    arguments = [f"download.dataset={dataset}"] if dataset else []
    arguments += overrides
    if config is None and not arguments:
        raise _no_dataset()
    options = ((*("-c", config),) if config else ()) + tuple(arguments)
    runs, waiting = find_runs(config, arguments, options)
    for one in waiting:
        missing = not one.cfg.download.is_named and one.cfg.reads_corpus
        if missing and not CorpusManifest.exists(one.cfg.corpus_dir):
            raise _no_dataset(one.stage)
    start = time.monotonic()
    run_steps([*steps(runs, waiting)], as_json=as_json)
    seconds = time.monotonic() - start
    last = runs[-1].job
    folder = last.root if runs[-1].stage is None else last.root.parent
    page = report.write_at_end([one.job for one in runs], folder)
    found = summarize(last.metrics)
    if as_json:
        cfg = runs[-1].cfg
        facts: dict[str, Any] = {
            "name": cfg.name,
            "seconds": round(seconds, 3),
            "corpus": ", ".join(str(one.corpus_dir) for one in cfg.corpora),
            "tokens_folders": [str(source.path) for source in token_sources(cfg)],
            "job": str(cfg.job_dir),
            "report": page and str(page),
            "model": str(Path("exports") / cfg.name),
        }
        if stages := [{"name": one.stage, "job": str(one.job.root)} for one in runs if one.stage]:
            facts["stages"] = stages
        print(json.dumps(facts | found.facts()))
    else:
        print(closing_summary(runs, found, seconds, config, page))


def _no_dataset(stage: str | None = None) -> ConfigError:
    return ConfigError(
        "no dataset is named" + (f" for stage {stage}" if stage else ""),
        next="use -d python-stdlib, -d FOLDER, -d org/name or -c quickstart"
        if stage is None
        else f"set stages.{stage}.download.dataset, or data.tokens=FOLDER",
    )


def find_runs(
    config: str | Layer | None,
    arguments: Sequence[str],
    options: tuple[str, ...],
) -> tuple[list[PipelineRun], list[PipelineRun]]:
    """Return the runs of a configuration in order, and those of them that are not done.

    A configuration without stages has one run; the command `train` itself detects that it is done.
    """
    stages = find_stages(config, arguments)
    if not stages:
        resolved, job = find_job(config, arguments, ())
        only = PipelineRun(resolved, job, None, options)
        return [only], [only]
    report_shadowed(stages, arguments)
    runs = [PipelineRun(s.resolved, s.job, s.name, (*options, "--stage", s.name)) for s in stages]
    finals = done(stages)
    for one, final in zip(runs, finals, strict=True):
        if final is not None:
            log.info("stage %s is done: %s", one.stage, final.reference)
    return runs, [one for one, final in zip(runs, finals, strict=True) if final is None]


def steps(runs: Sequence[PipelineRun], waiting: Sequence[PipelineRun]) -> Iterator[PipelineStep]:
    """Yield the steps that the runs `waiting` need, and the export of the last of all `runs`.

    The data of all of them comes first, then the training of each. So an error in the data of a
    late stage is reported before hours of training. Runs share corpora and token files.
    """
    seen: set[Path] = set()
    cleaned: list[tuple[Path, CleanConfig]] = []
    for one in waiting:
        cfg = one.cfg
        if not cfg.reads_corpus:
            continue
        if cfg.download.is_named and cfg.corpus_dir not in seen:
            yield PipelineStep("download", one)
        if cfg.clean is not None and (cfg.corpus_dir, cfg.clean) not in cleaned:
            cleaned.append((cfg.corpus_dir, cfg.clean))
            yield PipelineStep("clean", one)
        if cfg.data.reads_token_files and cfg.tokenize_dir not in seen:
            yield PipelineStep("tokenize", one)
        seen |= {cfg.corpus_dir, cfg.tokenize_dir}
    yield from (PipelineStep("train", one) for one in waiting)
    yield PipelineStep("export", runs[-1])


def run_steps(todo: Sequence[PipelineStep], *, as_json: bool) -> None:
    """Run each step as a process; exit with the code of the first that fails, and say so."""
    quiet = not log.isEnabledFor(logging.INFO)
    stdout = None if not as_json else subprocess.DEVNULL if quiet else sys.stderr
    for number, step in enumerate(todo, start=1):
        job = step.run.job
        before, argv, env = job.attempt(), step.argv(), None
        if not quiet:
            line = f"\n[{number}/{len(todo)}] {step.title}: {local.shell_command(argv)}"
            print(line, file=sys.stderr, flush=True)
        if step.command in ("clean", "tokenize"):
            env = local.without_slurm()
        if step.command == "export" and step.run.stage is not None:
            # The job has all keys; those in the environment set the common part, not this stage.
            env = {k: v for k, v in os.environ.items() if not is_key(k)}
        code = local.run(argv, env, stdout=stdout)
        if code == ExitCode.DONE:
            continue
        code, reason = reported_code(code, job, started=job.attempt() > before)
        reason = reason and f"\n{reason}"
        print(f"\nthe pipeline stopped in {step.title}, exit code {code}{reason}", file=sys.stderr)
        resume = "run the same command to resume"
        if code == ExitCode.DIVERGED:
            resume = "the same command would diverge again, so change its settings"
        print(f"finished work is kept; {resume}", file=sys.stderr)
        sys.exit(code)


def _check_tokenized(cfg: RunConfig) -> None:
    check_tokens(cfg, cfg.tokenize_dir, TokensManifest.read(cfg.tokenize_dir))


def _is_cleaned(cfg: RunConfig) -> bool:
    """Return True if the corpus has the selection that the section `clean` describes."""
    if cfg.clean is None or not CorpusManifest.exists(cfg.corpus_dir):
        return cfg.clean is None
    folder = selection_folder(cfg.clean, CorpusManifest.read(cfg.corpus_dir), cfg.corpus_dir)
    return SelectionManifest.exists(folder)


def train_processes(cfg: RunConfig) -> int:
    """Return the number of processes that train on this machine.

    `pipeline.train_processes=0` means one process per visible GPU, at most `launch.gpus_per_node`
    if that is set, or one on a CPU.
    """
    if cfg.pipeline.train_processes or cfg.train.device == "cpu":
        return cfg.pipeline.train_processes or 1
    import torch

    visible = torch.cuda.device_count()
    return max(1, min(visible, cfg.launch.gpus or visible))


def reported_code(code: int, job: JobDir, *, started: bool) -> tuple[int, str]:
    """Return the exit code of a training, and its reason or an empty string.

    torchrun exits with 1 for every failure, after many log lines. If an attempt has `started`, both
    are read from its `attempt.json`.
    """
    record = job.exit_record(job.attempt())
    if started and code == ExitCode.BUG and record is not None:
        return record["code"], record["reason"]
    return code, ""


def closing_summary(
    runs: Sequence[PipelineRun],
    summary: RunSummary,
    seconds: float,
    config: str | None,
    page: Path | None,
) -> str:
    """Return the closing summary: results, paths of the artifacts, and commands to try next.

    `summary` is that of the last run, and `page` the report of all runs, if it could be written.
    """
    cfg = runs[-1].cfg
    export = Path("exports") / cfg.name
    lines = ["", f"{cfg.name}: done in {seconds:.0f} s", ""]
    lines += [f"  stage            {one.stage}: {one.job.root}" for one in runs if one.stage]
    if summary.first_eval and summary.last_eval:
        first, last = summary.first_eval, summary.last_eval
        lines.append(f"  validation loss  {first['loss']:.3f} -> {last['loss']:.3f}")
        if first["bits_per_byte"] is not None:
            bits = f"{first['bits_per_byte']:.3f} -> {last['bits_per_byte']:.3f}"
            lines.append(f"  bits per byte    {bits}")
        if "answer_stop_rate" in last:
            rates = f"{first['answer_stop_rate']:.0%} -> {last['answer_stop_rate']:.0%}"
            lines.append(f"  answers stop     {rates} (greedy)")
    lines.append(f"  trained          {summary.steps} steps, {summary.tokens / 1e6:.2f}M tokens")
    if summary.tokens_per_second is not None:
        lines.append(f"  speed            {summary.tokens_per_second:,.0f} tokens/s")
    for title, text in (("before", summary.first_sample), ("after", summary.last_sample)):
        if text:
            lines += ["", f"  a sample at temperature {SAMPLE_TEMPERATURE} {title} training:"]
            for line in text.splitlines():
                lines += [f"    | {part}" for part in textwrap.wrap(line, 90) or [""]]
    prompt = shlex.quote(cfg.train.sample_prompt or summary.sample_prompt or "Once")
    text_only = f"dtt generate {export} -p {prompt}"
    own_text = f"dtt pipeline -c {config or 'quickstart'} -d FOLDER name=mine           # your text"
    lines += [
        "",
        *(f"  corpus       {one.corpus_dir}" for one in cfg.corpora),
        *(f"  tokens       {source.path}" for source in token_sources(cfg)),
        f"  job          {cfg.job_dir}  (metrics.jsonl, checkpoints, config.yaml)",
        *([f"  report       {page}  (open it in a browser)"] if page is not None else []),
        f"  model        {export}  (Hugging Face format, verified with transformers)",
        "",
        "Next steps",
        f"  {f'dtt chat {export}' if JobDir(cfg.job_dir).chat_template.is_file() else text_only}",
        f"  dtt train {cfg.job_dir} train.steps={2 * summary.steps} --allow-change train.steps",
        *([] if runs[-1].stage else [f"  {own_text}"]),
        "  torchrun --standalone --nproc_per_node 8 -m dtt.main train -c CONFIG   # eight GPUs",
        "  source env.sh                            # in a cluster's job script, before torchrun",
    ]
    return "\n".join(lines)
