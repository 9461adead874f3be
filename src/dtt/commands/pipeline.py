"""`dtt pipeline`: run every stage in order, each as the command that a user would type."""

from __future__ import annotations

import json
import logging
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, assert_never

from dtt.artifacts import CorpusManifest, TokensManifest
from dtt.commands.train import find_job
from dtt.config.data import TextDataConfig
from dtt.config.run import RunConfig
from dtt.errors import ConfigError, ExitCode
from dtt.launch import local
from dtt.runtime.jobdir import JobDir
from dtt.runtime.log import log
from dtt.track.summary import Summary, summarize

MOST_TOKENIZE_PROCESSES = 8
Stage = Literal["download", "tokenize", "train", "export"]


def run(
    config: str | None, overrides: Sequence[str], dataset: str | None, *, as_json: bool = False
) -> None:
    """Run download, tokenize, train and export, and print a summary.

    Each stage skips work that is done already. With `as_json`, only the summary goes to stdout. If
    a stage fails, exits with its exit code.
    """
    arguments = [f"download.dataset={dataset}"] if dataset else []
    arguments += overrides
    no_dataset = ConfigError(
        "no dataset is named", next="-d python-stdlib, -d FOLDER or -d org/name; or -c quickstart"
    )
    if config is None and not arguments:
        raise no_dataset
    resolved, job = find_job(config, arguments, ())
    cfg = resolved.config
    if cfg.download.dataset is None and not CorpusManifest.exists(cfg.corpus_dir):
        raise no_dataset
    options = (["-c", config] if config else []) + arguments
    start = time.monotonic()
    names = stages(cfg)
    quiet = not log.isEnabledFor(logging.INFO)
    stdout = None if not as_json else subprocess.DEVNULL if quiet else sys.stderr
    for number, stage in enumerate(names, start=1):
        argv = stage_argv(stage, cfg, options)
        typed = as_typed(argv)
        if not quiet:
            print(f"\n[{number}/{len(names)}] {stage}: {typed}", file=sys.stderr, flush=True)
        before = job.attempt()
        env = local.without_slurm() if stage == "tokenize" else None
        code = local.run(argv, env, stdout=stdout)
        if code != ExitCode.DONE:
            sys.exit(report_stop(stage, code, job, began=job.attempt() > before))
    seconds = time.monotonic() - start
    if as_json:
        print(json.dumps(facts(cfg, seconds) | summarize(job.metrics).facts()))
    else:
        print(closing(cfg, summarize(job.metrics), seconds, config))


def facts(cfg: RunConfig, seconds: float) -> dict[str, Any]:
    """Return the paths of all artifacts and the duration, for `--json`."""
    return {
        "name": cfg.name,
        "seconds": round(seconds, 3),
        "corpus": str(cfg.corpus_dir),
        "tokens_folders": [str(source.path) for source in cfg.token_sources],
        "job": str(cfg.job_dir),
        "model": str(_export_folder(cfg)),
    }


def _export_folder(cfg: RunConfig) -> Path:
    return cfg.export.out or Path("exports") / cfg.name


def stages(cfg: RunConfig) -> list[Stage]:
    """Return the stages that this configuration needs."""
    download: list[Stage] = [] if cfg.download.dataset is None else ["download"]
    tokenize: list[Stage] = [] if isinstance(cfg.data, TextDataConfig) else ["tokenize"]
    return [*download, *tokenize, "train", "export"]


def stage_argv(stage: Stage, cfg: RunConfig, options: Sequence[str]) -> list[str]:
    """Return the command line of a stage. Call it when the stage is next: it checks the disk."""
    match stage:
        case "download":
            return local.dtt_argv("download", *options)
        case "tokenize":
            return tokenize_argv(cfg, options)
        case "train":
            return train_argv(cfg, options)
        case "export":
            return local.dtt_argv("export", str(cfg.job_dir))
        case _:
            assert_never(stage)


def tokenize_argv(cfg: RunConfig, options: Sequence[str]) -> list[str]:
    """Return the command line of `tokenize`.

    It starts mpirun if that is available, more than one process is wanted, and there is work to do.
    """
    argv = local.dtt_argv("tokenize", *options)
    processes = cfg.pipeline.tokenize_processes or min(local.cores(), MOST_TOKENIZE_PROCESSES)
    if processes == 1 or TokensManifest.exists(cfg.tokenize_dir):
        return argv
    return local.mpi_argv(processes, argv) or argv


def train_argv(cfg: RunConfig, options: Sequence[str]) -> list[str]:
    """Return the command line of `train`, under torchrun for more than one process.

    `pipeline.train_processes=0` means one process per GPU, or one on a CPU.
    """
    processes = cfg.pipeline.train_processes
    if processes == 0:
        import torch

        processes = max(1, torch.cuda.device_count()) if cfg.train.device != "cpu" else 1
    arguments = ["train", *options]
    if processes == 1:
        return local.dtt_argv(*arguments)
    return local.torchrun_argv(processes, arguments)


def as_typed(argv: Sequence[str]) -> str:
    """Return a command line as a user would type it."""
    python = shlex.quote(sys.executable)
    text = shlex.join(argv).replace(f"{python} -m torch.distributed.run", "torchrun")
    text = text.replace(f"{python} -m dtt.main", "dtt")
    return text.replace(f"{Path(sys.executable).parent}/", "")


def report_stop(stage: str, code: int, job: JobDir, *, began: bool) -> int:
    """Print where the pipeline stopped; return the exit code of the stage.

    torchrun exits with 1 for every failure, after many log lines of its own. If the stage started
    an attempt, the exit code and the reason are read from the `exit.json` of that attempt.
    """
    reason = ""
    record = job.exit_record(job.attempt())
    if began and code == ExitCode.BUG and record is not None:
        code, reason = record["code"], f"\n{record['reason']}"
    print(f"\nthe pipeline stopped in {stage}, exit code {code}{reason}", file=sys.stderr)
    print("what is finished is kept; the same command goes on from there", file=sys.stderr)
    return code


def closing(cfg: RunConfig, summary: Summary, seconds: float, config: str | None) -> str:
    """Return the closing summary: results, paths of the artifacts, and commands to try next."""
    export = _export_folder(cfg)
    lines = ["", f"{cfg.name}: done in {seconds:.0f} s", ""]
    if summary.first_eval and summary.last_eval:
        first, last = summary.first_eval, summary.last_eval
        lines.append(f"  validation loss  {first['loss']:.3f} -> {last['loss']:.3f}")
        if first["bits_per_byte"] is not None:
            bits = f"{first['bits_per_byte']:.3f} -> {last['bits_per_byte']:.3f}"
            lines.append(f"  bits per byte    {bits}")
    lines.append(f"  trained          {summary.steps} steps, {summary.tokens / 1e6:.2f}M tokens")
    if summary.tokens_per_second is not None:
        lines.append(f"  speed            {summary.tokens_per_second:,.0f} tokens/s")
    for title, text in (("before", summary.first_sample), ("after", summary.last_sample)):
        if text:
            lines += ["", f"  a sample {title} training:"]
            for line in text.splitlines():
                lines += [f"    | {part}" for part in textwrap.wrap(line, 90) or [""]]
    lines += [
        "",
        f"  corpus       {cfg.corpus_dir}",
        *(f"  tokens       {source.path}" for source in cfg.token_sources),
        f"  job          {cfg.job_dir}  (metrics.jsonl, checkpoints, config.yaml)",
        f"  model        {export}  (Hugging Face format, verified with transformers)",
        "",
        "Go on with",
        f"  dtt generate {export} -p {shlex.quote(cfg.train.sample_prompt or 'Once')}",
        f"  dtt train {cfg.job_dir} train.steps={2 * summary.steps} --allow-change train.steps",
        f"  dtt pipeline -c {config or 'quickstart'} -d FOLDER name=mine           # your own text",
        "  torchrun --standalone --nproc_per_node 8 -m dtt.main train -c CONFIG   # eight GPUs",
        "  source env.sh                            # in a cluster's job script, before torchrun",
    ]
    return "\n".join(lines)
