"""Check that the anomaly guard skips no normal step and handles anomalous ones by its policy.

    python benchmarks/anomaly_guard.py [RUNS] [--text FILE.parquet]

First, RUNS clean runs on novels with `guard.spike=skip`, each with a different model, optimizer,
learning rate and batch size: every skipped step is a false positive. Their gradient norms are also
judged by two other rules: OLMo's (more than 6 standard deviations above the mean of 128 steps) and
ZClip's (arXiv 2504.02507: 2.5 standard deviations above an exponential moving average; it clips
where dtt would skip).

Then RUNS runs with one corrupted batch, half of them on two ranks, each resumed from one of a few
parent runs of 128 steps: a NaN loss, or a gradient that is infinite or 1,000 times too large, on
one rank or on all. Expected: `stop` names the step and the batch and saves nothing after it; after
`skip` and `rewind`, weights, optimizer state and weight average equal bit for bit those of a run
without these batches; all ranks end in the same state.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import argparse
import hashlib
import itertools
import math
import multiprocessing
import random
import shutil
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch._dynamo  # optimizers import it on first use
from jobs import SHARED_DATA, free_port, make_novel_tokens, rank_environment
from measurement import Table
from torch import Tensor, nn

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import Diverged
from dtt.base.log import log
from dtt.base.ranks import Ranks
from dtt.checkpoint import store
from dtt.checkpoint.store import Checkpoint
from dtt.config.guard import GuardConfig
from dtt.config.load import resolve
from dtt.data.samples.dataset import open_dataset
from dtt.data.samples.loader import Batches
from dtt.jobs.attempt import Attempt
from dtt.jobs.stop import Requests
from dtt.mesh.dist import World, start, stop
from dtt.track import jsonl
from dtt.train.anomaly_guard import LEAST_FACTOR, SPIKE_WINDOW
from dtt.train.build import build as wire
from dtt.train.run_plan import make_plan
from dtt.train.state import optimizer_tensors
from dtt.train.supervise.watchdog import Watchdog
from dtt.train.trainer import Trainer

NOVELS = SHARED_DATA / "novels/val-00000-of-00001.parquet"
CLEAN_STEPS = 200
PARENTS, PARENT_STEPS = 8, 128
STEPS, SAVE_EVERY, AROUND = 150, 16, 3
KINDS = {"nan": "loss NaN", "inf": "gradient infinite", "spike": "gradient x 1,000"}
ALONE = World(Ranks(), torch.device("cpu"), None)
FORK = multiprocessing.get_context("fork")
POLICIES = ("stop", "skip", "rewind")
SIZES = [
    "train.seq_len=64", "train.eval_every=0", "train.eval_tokens=64", "train.sample_tokens=0",
    "train.hang_seconds=0", "train.log_every=10", "train.precision=fp32",
]  # fmt: skip


def build(world: World, settings: Sequence[str], resume: Checkpoint | None = None) -> Trainer:
    """Build a trainer in the same way as `dtt train`."""
    cfg = resolve(None, [*SIZES, *settings]).config
    job = JobDir(cfg.job_dir)
    number = world.from_first(job.begin_attempt() if world.first else 0)
    dataset = open_dataset(cfg)
    plan = make_plan(cfg, dataset, world)
    watchdog = Watchdog(job, world.ranks, plan.steps, attempt=number)
    attempt = Attempt(job, Requests(), number)
    return wire(cfg, plan, attempt, world, dataset, watchdog, resume, cfg.init.source)


def run(trainer: Trainer, resume: Checkpoint | None = None) -> str:
    """Run a trainer to its end; return the message if it diverged, else an empty string."""
    try:
        trainer.run(resume)
    except Diverged as diverged:
        return str(diverged)
    finally:
        trainer.control.saver.close()
        for tracker in trainer.observers.trackers:
            tracker.close()
    return ""


def model_settings(rng: random.Random) -> list[str]:
    """Return random but plausible settings of model, optimizer, learning rate and batch."""
    family = rng.choice(["gpt2", "llama", "qwen3", "mistral"])
    dim, optimizer = rng.choice([32, 48]), rng.choice(["adamw", "muon"])
    low, high = (3e-4, 1e-2) if optimizer == "adamw" else (1e-3, 3e-2)
    return [
        f"seed={rng.randrange(1000)}", f"model.family={family}", f"model.dim={dim}",
        f"model.n_layers={rng.choice([1, 2])}", "model.n_heads=2", f"optim.type={optimizer}",
        f"optim.lr={math.exp(rng.uniform(math.log(low), math.log(high))):.6f}",
        f"train.clip_norm={rng.choice(['1.0', 'null'])}",
        f"train.global_batch_tokens={rng.choice([256, 512])}", "train.micro_batch=16",
    ]  # fmt: skip


# ---- clean runs ----------------------------------------------------------------------------------


def clean(number: int) -> list[float]:
    """Train a clean run and return its gradient norms; NaN where a step was skipped."""
    rng = random.Random(10_000 + number)
    schedule = rng.choice(["wsd", "cosine", "linear", "constant"])
    settings = [
        f"name=clean{number}", f"train.steps={CLEAN_STEPS}", f"schedule.type={schedule}",
        f"schedule.warmup={rng.choice([0, 20, 100])}", "checkpoint.every=100000",
        f"model.dropout={rng.choice(['0.0', '0.1'])}", "guard.non_finite=skip", "guard.spike=skip",
    ]  # fmt: skip
    trainer = build(ALONE, [*model_settings(rng), *settings])
    error = run(trainer)
    assert not error, error
    train = jsonl.read(trainer.job.metrics, "train")
    return [math.nan if "skipped" in r else r["grad_norm"] for r in train]


def dtt_rule(norms: Sequence[float]) -> list[float]:
    """Return each judged norm's distance from the mean, in units of dtt's spike threshold.

    A value above 1 is a spike.
    """
    config, logs = GuardConfig(), [math.log(norm) for norm in norms if norm > 0]
    distances = []
    for step in range(SPIKE_WINDOW, len(logs)):
        window = logs[step - SPIKE_WINDOW : step]
        margin = max(config.spike_sigmas * statistics.stdev(window), math.log(LEAST_FACTOR))
        distances.append((logs[step] - statistics.fmean(window)) / margin)
    return distances


def olmo(norms: Sequence[float]) -> list[float]:
    """Return the distances by the rule of OLMo's SkipStepOptimizer, on gradient norms."""
    distances = []
    for step in range(64, len(norms)):
        window = norms[max(0, step - 127) : step]
        distances.append((norms[step] - statistics.fmean(window)) / (6 * statistics.stdev(window)))
    return distances


def zclip(norms: Sequence[float]) -> list[float]:
    """Return the distances by the rule of ZClip."""
    first = norms[:25]
    mean, variance, distances = statistics.fmean(first), statistics.pvariance(first), []
    for norm in norms[25:]:
        z = (norm - mean) / (math.sqrt(variance) + 1e-6)
        distances.append(z / 2.5)
        used = norm if z <= 2.5 else mean + 2.5**2 / z * math.sqrt(variance)
        mean = 0.97 * mean + 0.03 * used
        variance = 0.97 * variance + 0.03 * (used - mean) ** 2
    return distances


RULES = {
    "dtt, ln of the norm, 6 deviations": dtt_rule,
    "OLMo, 6 deviations": olmo,
    "ZClip, 2.5 deviations": zclip,
}


def report_clean(runs: Sequence[Sequence[float]]) -> None:
    """Print the number of steps that each rule flags."""
    skipped = sum(math.isnan(norm) for norms in runs for norm in norms)
    print(f"{len(runs)} clean runs of {CLEAN_STEPS} steps: {skipped} steps skipped")
    table = Table("rule", 36, {"steps judged": 14, "flagged": 10, "runs": 7, "closest": 10})
    for name, rule in RULES.items():
        by_run = [rule(norms) for norms in runs]
        distances = list(itertools.chain.from_iterable(by_run))
        flagged, runs_flagged = sum(x > 1 for x in distances), sum(max(run) > 1 for run in by_run)
        table.row(
            name, f"{len(distances):,}", f"{flagged:,}", f"{runs_flagged}", f"{max(distances):.2f}"
        )
    print("closest: the largest norm, on a scale from the mean (0) to the threshold (1)")


# ---- corrupted batches ---------------------------------------------------------------------------


def parent_settings(parent: int) -> list[str]:
    """Return the settings of a parent run, which its cases resume; it fills the spike window."""
    model = model_settings(random.Random(20_000 + parent))
    return [*model, "schedule.type=constant", "train.ema_decay=0.99", "checkpoint.keep_last=9"]


def train_parent(parent: int) -> None:
    """Train a parent run."""
    settings = [f"name=parent{parent}", f"train.steps={PARENT_STEPS}", "guard.spike=skip"]
    error = run(build(ALONE, [*parent_settings(parent), *settings]))
    assert not error, error


def resume_parent(world: World, case: Case, name: str) -> tuple[Trainer, Checkpoint]:
    """Return a trainer that resumes the parent run of a case, and the checkpoint to resume."""
    if world.first:
        shutil.copytree(f"jobs/parent{case.parent}", f"jobs/{name}")
    world.barrier()
    checkpoint = store.newest(Path(f"jobs/{name}/checkpoints"))
    assert checkpoint is not None
    policies = [f"guard.{why}={case.policy}" for why in ("non_finite", "spike")]
    settings = [
        f"name={name}", f"train.steps={STEPS}", f"checkpoint.every={SAVE_EVERY}", *policies,
        f"guard.rewind_around={AROUND}",
    ]  # fmt: skip
    trainer = build(world, [*parent_settings(case.parent), *settings], checkpoint)
    return trainer, checkpoint


@dataclass(frozen=True)
class Case:
    """One corrupted batch."""

    number: int
    parent: int
    kind: str
    policy: str
    step: int
    rank: int | None
    """The affected rank; None means all."""

    @property
    def skipped(self) -> range:
        """Steps whose batches have no effect on the model."""
        around = AROUND if self.policy == "rewind" else 0
        saved = (self.step - 1) // SAVE_EVERY * SAVE_EVERY
        return range(max(saved + 1, self.step - around), self.step + around + 1)


def cases(count: int, ranks: int) -> list[Case]:
    """Return cases that cycle through kinds and policies; everything else is random."""
    result = []
    mixed = itertools.cycle(itertools.product(KINDS, POLICIES))
    for number, (kind, policy) in zip(range(count), mixed, strict=False):
        rng = random.Random(1000 * ranks + number)
        step = rng.randrange(PARENT_STEPS + 1, STEPS - AROUND)
        rank = rng.choice([None, *range(ranks)]) if ranks > 1 else None
        result.append(Case(number, rng.randrange(PARENTS), kind, policy, step, rank))
    return result


def corrupt(trainer: Trainer, case: Case) -> None:
    """Corrupt the loss or the gradient of the case's step with hooks."""

    def change_loss(module: nn.Module, _: Any, loss: Tensor) -> Tensor | None:
        affected = case.rank in (None, trainer.world.rank)
        if trainer.position.step + 1 != case.step or not module.training or not affected:
            return None
        if case.kind == "nan":
            return loss * math.nan
        factor = math.inf if case.kind == "inf" else 1000.0
        loss = loss * 1.0
        loss.register_hook(lambda gradient: factor * gradient)  # type: ignore[no-untyped-call]
        return loss

    trainer.state.model.register_forward_hook(change_loss)


def remove_batches(trainer: Trainer, steps: range) -> None:
    """Remove the batches of these steps from the data order."""
    every = trainer.data.batches_from
    trainer.schedule.steps -= len(steps)

    def batches(first: int) -> Batches:
        with closing(every(first)) as all_batches:
            numbered = enumerate(all_batches, first + 1)
            yield from (batch for number, batch in numbered if number not in steps)

    trainer.data = replace(trainer.data, batches_from=batches)


def state(trainer: Trainer) -> str:
    """Return a hash of weights, optimizer state and weight average."""
    assert trainer.state.ema is not None
    tensors = dict(trainer.state.model.state_dict()) | optimizer_tensors(trainer.state.optimizers)
    digest = hashlib.sha256()
    for name, tensor in sorted((tensors | trainer.state.ema.tensors()).items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


Outcome = tuple[str, str, str, str]
"""Kind, policy, problems of the outcome (empty: none), and a hash of the final state."""


def run_case(world: World, case: Case) -> Outcome:
    """Run one case on this rank and return its outcome."""
    name = f"{world.size}-{case.number}"
    trainer, checkpoint = resume_parent(world, case, name)
    corrupt(trainer, case)
    error = run(trainer, checkpoint)
    world.barrier()  # rank 0 has closed the metrics file
    problems = []
    guard = list(jsonl.read(trainer.job.metrics, "guard"))
    why = "spike" if case.kind == "spike" else "non_finite"
    expected = [(step, why, case.step, case.policy) for step in case.skipped]
    if [(r["step"], r["why"], r["bad_step"], r["action"]) for r in guard] != expected:
        problems.append(f"records: {guard}")
    if case.policy == "stop":
        named = [f"at step {case.step}\n", *(r["ledger"] for r in guard)]
        if not all(part in error for part in named):
            problems.append(f"message {error!r}")
        if store.steps(trainer.job.checkpoints) != list(range(PARENT_STEPS, case.step, SAVE_EVERY)):
            problems.append(f"checkpoints: {store.steps(trainer.job.checkpoints)}")
        return case.kind, case.policy, "; ".join(problems), ""
    reference, checkpoint = resume_parent(world, case, f"{name}-reference")
    remove_batches(reference, case.skipped)
    error += run(reference, checkpoint)
    if error:
        problems.append(f"ended with {error!r}")
    if state(trainer) != state(reference):
        problems.append("its state differs")
    return case.kind, case.policy, "; ".join(problems), state(trainer)


def report_injected(by_ranks: Mapping[int, Sequence[Sequence[Outcome]]]) -> None:
    """Print a row for each kind and policy.

    `by_ranks` maps a number of ranks to the outcomes of all cases on each of these ranks.
    """
    table: dict[tuple[str, str], dict[int, Counter[bool]]] = defaultdict(
        lambda: {ranks: Counter() for ranks in by_ranks}
    )
    for ranks, results in by_ranks.items():
        for of_all_ranks in zip(*results, strict=True):
            kind, policy = of_all_ranks[0][:2]
            problems = {problem for _, _, problem, _ in of_all_ranks if problem}
            if len({state_hash for *_, state_hash in of_all_ranks}) > 1:
                problems.add("ranks differ")
            for problem in problems:
                print(f"  {kind}, {policy}, {ranks} ranks: {problem}")
            table[kind, policy][ranks][not problems] += 1
    total = sum(count for row in table.values() for cell in row.values() for count in cell.values())
    wrong = sum(cell[False] for row in table.values() for cell in row.values())
    print(f"{total} corrupted batches, {wrong} not handled as the policy requires")
    headings = {f"{ranks} ranks" if ranks > 1 else "1 rank": 12 for ranks in by_ranks}
    printed = Table("fault", 22, {"policy": 9, **headings})
    for (kind, policy), row in table.items():
        counts = (f"{cell[True]} of {cell.total()}" for cell in row.values())
        printed.row(KINDS[kind], policy, *counts)


# ---- processes -----------------------------------------------------------------------------------


def on_two_ranks(some: Sequence[Case]) -> list[list[Outcome]]:
    """Run the cases on two forked ranks and return the outcomes of each."""
    port = free_port()
    receivers = []
    for rank in range(2):
        receiver, sender = FORK.Pipe(duplex=False)
        FORK.Process(target=_rank, args=(sender, rank, port, some)).start()
        sender.close()
        receivers.append(receiver)
    return [receiver.recv() for receiver in receivers]


def _rank(result: Connection, rank: int, port: int, some: Sequence[Case]) -> None:
    os.environ.update(rank_environment(rank, 2, port))
    world = start(Ranks(rank, 2, rank, 2, "torchrun"), "cpu")
    result.send([run_case(world, case) for case in some])
    world.barrier()
    stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="?", type=int, default=100)
    parser.add_argument("--text", type=Path, default=NOVELS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, started = Path(name), time.monotonic()
        os.environ["DTT_DATA__TOKENS"] = str(make_novel_tokens(folder, given.text, 1024))
        os.chdir(folder)
        log.disabled = True
        half = (given.runs + 1) // 2
        with FORK.Pool(os.cpu_count()) as pool:
            pool.map(train_parent, range(PARENTS), chunksize=1)
            clean_runs = pool.map_async(clean, range(given.runs), chunksize=1)
            on_one = pool.starmap_async(run_case, [(ALONE, c) for c in cases(half, 1)], chunksize=1)
            on_two = on_two_ranks(cases(half, 2))
            report_clean(clean_runs.get())
            report_injected({1: [on_one.get()], 2: on_two})
        print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
