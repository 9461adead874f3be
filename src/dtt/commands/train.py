"""`dtt train`: the whole wiring of a training run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from dtt.artifacts import TokensManifest
from dtt.config import explain
from dtt.config.load import Resolved, changes_on_resume, load_job, resolve
from dtt.config.run import RunConfig
from dtt.config.train import TensorBoardConfig, WandbConfig
from dtt.errors import ConfigError, DttError, ExitCode, InputError, Preempted
from dtt.runtime.files import exclusive, write_atomically
from dtt.runtime.jobdir import JobDir
from dtt.runtime.log import log
from dtt.runtime.ranks import Ranks
from dtt.train.stop import Requests

if TYPE_CHECKING:
    from dtt.checkpoint.store import Checkpoint
    from dtt.data.loader import Share
    from dtt.data.windows import Windows
    from dtt.runtime.dist import World
    from dtt.track.base import Tracker
    from dtt.train.evaluate import Evaluator, Sampler
    from dtt.train.plan import Plan
    from dtt.train.trainer import Trainer


def run(config: str | None, arguments: Sequence[str], allow_change: Sequence[str]) -> None:
    """Train the job that `config` names, or the job directory among `arguments`, to its end."""
    ranks = Ranks.detect()
    resolved, job = find_job(config, arguments, allow_change)
    tokens_dir = resolved.config.tokens_dir
    if not TokensManifest.exists(tokens_dir):
        raise InputError(
            f"no token files in {tokens_dir}",
            next="make them with `dtt tokenize`, or name others with data.tokens=FOLDER",
        )
    if ranks.first:
        check_shards(tokens_dir)
    requests = Requests(job)  # from here on signals are heard; what follows is slow to import
    from dtt.runtime import dist

    holding = exclusive(job.root, "dtt train", patience=10) if ranks.first else nullcontext()
    try:
        with holding, attempt(job, ranks), dist.lost_peers_told():
            train(resolved, job, dist.start(ranks, resolved.config.train.device), requests)
    finally:
        dist.stop()  # after exit.json was written: the others now see that this process has ended


def check_shards(folder: Path) -> None:
    """Look at every shard now, not when training comes to it; DamagedError, InputError."""
    from dtt.data.windows import open_shard

    for shard in TokensManifest.read(folder).shards:
        open_shard(folder, shard)


def find_job(
    config: str | None, arguments: Sequence[str], allow_change: Sequence[str]
) -> tuple[Resolved, JobDir]:
    """The checked configuration and the job it belongs to.

    An existing job's own config lies below the file and the arguments; ConfigError if they would
    change what is being trained and `allow_change` does not name the key.
    """
    folders = [argument for argument in arguments if "=" not in argument]
    overrides = [argument for argument in arguments if "=" in argument]
    named = len(folders) + (config is not None)
    if named > 1 or not (named or overrides):
        raise ConfigError(
            "train takes either a config (-c FILE) or one job directory to resume",
            why=f"got {' and '.join([*folders, *(f'-c {c}' for c in [config] if c)]) or 'neither'}",
            next="dtt train -c quickstart, or dtt train jobs/quickstart",
        )
    if folders:
        job = JobDir(Path(folders[0]))
        load_job(job.root)  # InputError if it is none
    else:
        job = JobDir(resolve(config, overrides).config.job_dir)
    for key in allow_change:
        close = explain.nearest(key)
        if close != key:
            raise ConfigError(f"--allow-change {key}: no such key", next=f"--allow-change {close}")
    if not job.config.exists():
        return resolve(config, overrides), job
    resolved = resolve(config, overrides, job_config=job.config)
    changed = changes_on_resume(load_job(job.root), resolved.config)
    refused = [key for key in changed if key not in allow_change]
    if refused:
        raise ConfigError(
            f"{job.root} was started with other values of: {', '.join(refused)}",
            where=", ".join(resolved.origin(key) for key in refused),
            why="resuming with these would change what is being trained",
            next="name=ANOTHER starts a new job; "
            + " ".join(f"--allow-change {key}" for key in refused)
            + " insists",
        )
    return resolved, job


@contextmanager
def attempt(job: JobDir, ranks: Ranks) -> Iterator[None]:
    """One start of the job; however it ends, `exit.json` says how."""
    if ranks.first:
        job.begin_attempt()
    code, reason = ExitCode.BUG, "a bug"
    try:
        yield
        code, reason = ExitCode.DONE, "done"
    except DttError as error:
        code, reason = error.exit_code, str(error)
        raise
    except OSError as error:
        code, reason = ExitCode.IO, str(error)
        raise
    except KeyboardInterrupt:
        code, reason = ExitCode.INTERRUPTED, "interrupted"
        raise
    finally:
        job.end_attempt(code, reason, ranks.rank)


def train(resolved: Resolved, job: JobDir, world: World, requests: Requests) -> None:
    """Make every part, put them together, run; Preempted when asked to stop before the end."""
    from dtt.data.windows import Windows
    from dtt.train.plan import make_plan

    cfg = resolved.config
    tokens = TokensManifest.read(cfg.tokens_dir)
    source = Windows(cfg.tokens_dir, tokens, "train", cfg.train.seq_len)
    plan = make_plan(cfg, tokens, len(source), world)
    resume = find_checkpoint(job, tokens, world)
    if world.first:
        write_atomically(job.config, explain.show(resolved.config, resolved.layer))
    if resume is not None and resume.step >= plan.steps:
        log.info("%s is done: %s holds step %d", job.root, resume.path, resume.step)
        return
    if world.first:
        log.info("%s", plan.describe(world))
        write_provenance(job)
    trainer = build(cfg, plan, job, world, tokens, source, requests, resume)
    with ExitStack() as stack:
        for tracker in trainer.trackers:
            stack.callback(tracker.close)
        finished = trainer.run(resume)
    if not finished:
        raise Preempted(
            f"stopped at step {trainer.position.step} of {plan.steps}, everything is saved",
            why=requests.reason or "another rank was asked to stop",
            next=f"dtt train {job.root}",
        )


def find_checkpoint(job: JobDir, tokens: TokensManifest, world: World) -> Checkpoint | None:
    """What to resume from, the same on every rank; the first one verifies it for all."""
    from dtt.checkpoint import retain, store

    if world.first and job.checkpoints.exists():
        retain.sweep_staging(job.checkpoints)
    resume = world.from_first(store.newest(job.checkpoints) if world.first else None)
    if resume is not None and resume.manifest.data_key != tokens.key:
        raise ConfigError(
            f"{job.root} was trained on other token files than those that are there now",
            why="their corpus, tokenizer or options differ from those of the checkpoint",
            next="name the old ones with data.tokens=FOLDER, or start a new job with name=ANOTHER",
        )
    return resume


def write_provenance(job: JobDir) -> None:
    """Keep what this attempt was started with, and where."""
    job.write_environment()
    with (job.root / "overrides.txt").open("a", encoding="utf-8") as file:
        file.write(shlex.join(sys.argv[1:]) + "\n")


def build(
    cfg: RunConfig,
    plan: Plan,
    job: JobDir,
    world: World,
    tokens: TokensManifest,
    source: Windows,
    requests: Requests,
    resume: Checkpoint | None,
) -> Trainer:
    """Model, optimizers, data, trackers: each made here and nowhere else."""
    import torch

    from dtt.data.loader import Share, training_batches
    from dtt.data.order import Order
    from dtt.model.decoder import Decoder, roles
    from dtt.model.init import initialize
    from dtt.optim import groups
    from dtt.parallel.apply import apply
    from dtt.train.meter import Meter
    from dtt.train.trainer import Trainer

    with world.device:
        model = Decoder(plan.arch)
    initialize(model, cfg.seed)
    ns_dtype = torch.bfloat16 if plan.precision == "bf16" else torch.float32
    share = Share(world.rank, world.size, cfg.train.micro_batch, world.device)
    order = Order(cfg.seed, len(source))
    return Trainer(
        cfg=cfg,
        plan=plan,
        world=world,
        job=job,
        model=model,
        module=apply(model, world, plan.compile),
        optimizers=groups.build(cfg.optim, dict(model.named_parameters()), roles(model), ns_dtype),
        order=order,
        batches_from=partial(training_batches, source, order, share, plan.sequences),
        evaluator=make_evaluator(cfg, plan, world, tokens, share),
        sampler=make_sampler(cfg, tokens),
        trackers=make_trackers(cfg, plan, job, resume) if world.first else [],
        requests=requests,
        meter=Meter(world.device, world.size, plan.flops_per_token, plan.precision),
        data_key=tokens.key,
    )


def make_evaluator(
    cfg: RunConfig, plan: Plan, world: World, tokens: TokensManifest, share: Share
) -> Evaluator | None:
    """Validation on the held-out split; None, said aloud, when it has no whole sequence."""
    from dtt.data.windows import Windows
    from dtt.train.evaluate import Evaluator

    windows = Windows(cfg.tokens_dir, tokens, "validation", cfg.train.seq_len)
    count = min(len(windows), max(1, cfg.train.eval_tokens // cfg.train.seq_len))
    if count == 0:
        log.warning("no validation: the held-out split is shorter than one sequence")
        return None
    counts = tokens.counts("validation")
    return Evaluator(windows, count, counts.bytes / counts.tokens, share, plan.precision, world)


def make_sampler(cfg: RunConfig, tokens: TokensManifest) -> Sampler | None:
    """None when no samples are wanted."""
    from dtt.train.evaluate import Sampler

    if cfg.train.sample_tokens == 0:
        return None
    path = cfg.tokens_dir / "tokenizer.json"
    return Sampler(cfg.train, path, tokens.end_of_document, cfg.seed)


def make_trackers(
    cfg: RunConfig, plan: Plan, job: JobDir, resume: Checkpoint | None
) -> list[Tracker]:
    """The job's own record first, then what a person watches, then what the config asks for."""
    from dtt.track.console import ConsoleTracker
    from dtt.track.jsonl import JsonlTracker
    from dtt.track.tensorboard import TensorBoardTracker
    from dtt.track.wandb import WandbTracker

    step = None if resume is None else resume.step
    trackers: list[Tracker] = [JsonlTracker(job.metrics, step), ConsoleTracker(plan.steps)]
    for tracker in cfg.track:
        match tracker:
            case WandbConfig():
                settings = cfg.model_dump(mode="json")
                trackers.append(WandbTracker(tracker, cfg.name, job.run_id(), job.root, settings))
            case TensorBoardConfig():
                trackers.append(TensorBoardTracker(job.tensorboard, step))
            case _:
                assert_never(tracker)
    return trackers
