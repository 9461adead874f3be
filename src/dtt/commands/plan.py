"""`dtt plan`: estimate the memory, time, disk space and cost of a run before it starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from dtt.config.data import GivenTokenizerConfig, TextDataConfig, TrainedTokenizerConfig
from dtt.config.run import RunConfig
from dtt.data.dataset import open_dataset
from dtt.data.encoder import Encoder
from dtt.data.tokenizer import find_tokenizer
from dtt.errors import ConfigError, InputError
from dtt.model import count
from dtt.runtime import dist
from dtt.runtime.log import log
from dtt.runtime.ranks import Ranks
from dtt.train.clock import in_words
from dtt.train.estimate import advice, gpus
from dtt.train.estimate.case import Case, make_case
from dtt.train.estimate.communication import LINK
from dtt.train.estimate.duration import SOURCE, Run, Step, achieved, run_of, step_of
from dtt.train.estimate.memory import (
    GIB,
    SPARE,
    Memory,
    checkpoint_bytes,
    checkpoints_at_once,
    memory,
)
from dtt.train.estimate.probe import Measured
from dtt.train.estimate.probe import probe as measure


@dataclass(frozen=True)
class Told:
    """The complete estimate of a run."""

    case: Case
    memory: Memory
    step: Step
    run: Run
    change: advice.Change | None
    """Change that makes the run fit into memory; None if it fits or no such change was found."""
    price: float | None
    """Price of a device hour, in any currency; None: no cost is printed."""

    @property
    def room(self) -> float:
        """Bytes of device memory that the run may use at its peak."""
        return (1 - SPARE[self.case.gpu.kind]) * self.case.gpu.memory

    @property
    def fits(self) -> bool:
        """True if the peak fits into the memory of a device."""
        return self.memory.total <= self.room


def run(
    cfg: RunConfig,
    gpu: str | None,
    nodes: int | None,
    gpus_per_node: int | None,
    price: float | None,
    *,
    probe: bool,
    as_json: bool,
) -> None:
    """Estimate the run and print the result, without building a model or reading tokens.

    With `probe`, also trains three steps on this machine and prints the error of the estimate.
    """
    per_node = gpus_per_node or cfg.launch.processes
    device = gpus.find(gpu or gpus.here(), per_node)
    vocab_size, steps = known_of_the_data(cfg)
    case = make_case(cfg, device, nodes or cfg.launch.nodes, per_node, vocab_size, steps)
    peak, one = memory(case), step_of(case)
    told = Told(case, peak, one, run_of(case, one), None, price)
    if not told.fits:
        told = Told(case, peak, one, told.run, advice.remedy(case), price)
    measured = probed(case) if probe else None
    if as_json:
        found = {} if measured is None else {"probe": asdict(measured)}
        print(json.dumps(facts(told) | found, indent=1))
        return
    print("\n".join(lines(told)))
    if measured is not None:
        print("\n".join(_probe_lines(told, measured)))


def nothing_to_plan() -> ConfigError:
    """Return the error of a command that names neither a configuration nor a key."""
    return ConfigError(
        "plan takes a config (-c FILE), or the keys of a run",
        why="got neither",
        next="dtt plan -c quickstart, or dtt plan -c FILE",
    )


def probed(case: Case) -> Measured:
    """Measure three steps of the run on this machine.

    Raises ConfigError if the run has more than one device.
    """
    if case.devices > 1:
        raise ConfigError(
            f"--probe is for a single device, and the plan is for {case.devices}",
            next="--nodes 1 --gpus-per-node 1, with a train.global_batch_tokens for one",
        )
    world = dist.start(Ranks(), case.gpu.kind)
    return measure(case, world)


def known_of_the_data(cfg: RunConfig) -> tuple[int, int]:
    """Return the vocabulary size and the number of steps that the data suffices for.

    Both come from the token files if they exist, and else from the configuration. Raises
    ConfigError if the vocabulary size cannot be determined.
    """
    if not isinstance(cfg.data, TextDataConfig):
        try:
            dataset = open_dataset(cfg)
        except InputError:
            log.info("there are no token files yet: the plan is of what the configuration says")
        else:
            return dataset.manifest.vocab_size, dataset.steps
    return cfg.model.vocab_size or _tokenizer_size(cfg), cfg.train.steps


def _tokenizer_size(cfg: RunConfig) -> int:
    match cfg.tokenizer:
        case TrainedTokenizerConfig(vocab_size=size):
            return size
        case GivenTokenizerConfig():
            path = find_tokenizer(cfg.tokenizer)
            return Encoder(path.read_bytes(), None, path).vocab_size


def facts(told: Told) -> dict[str, Any]:
    """Return the estimate for `--json`, in bytes, seconds and FLOPs."""
    case, one = told.case, told.step
    per_token = count.flops_per_token(case.arch, case.cfg.train.seq_len)
    tokens = case.stages.tokens_before(case.steps)
    blocks, outside = parameters(case)
    return {
        "family": case.arch.family,
        "parameters": count.parameters(case.arch),
        "parameters_matrices": blocks,
        "parameters_embedding_and_head": outside,
        "steps": case.steps,
        "tokens": tokens,
        "tokens_per_parameter": tokens / count.parameters(case.arch),
        "flops_per_token": per_token,
        "flops": per_token * tokens,
        "gpu": case.gpu.name,
        "nodes": case.nodes,
        "gpus_per_node": case.gpus_per_node,
        "mesh": case.sizes._asdict(),
        "precision": case.precision.value,
        "micro_batch": case.micro_batch,
        "accumulation": case.accumulation,
        "memory": told.memory.parts,
        "memory_peak": told.memory.total,
        "memory_peak_at": told.memory.moment,
        "memory_device": case.gpu.memory,
        "fits": told.fits,
        "change": told.change,
        "communication": {
            each.kind: {"bytes": each.bytes, "seconds": each.seconds} for each in one.exchanges
        },
        "step_seconds": one.seconds,
        "mfu": one.mfu,
        "achieved": achieved(case),
        "achieved_source": SOURCE if case.gpu.kind == "cuda" else None,
        "seconds": told.run.seconds,
        "slices": told.run.slices,
        "checkpoint_bytes": checkpoint_bytes(case),
        "checkpoints_bytes": checkpoints_at_once(case) * checkpoint_bytes(case),
        "device_hours": device_hours(told),
        "cost": None if told.price is None else told.price * device_hours(told),
    }


def parameters(case: Case) -> tuple[int, int]:
    """Return the number of parameters in hidden matrices, and in embeddings and head.

    The remaining parameters are those of norms and biases.
    """
    two = [weight for weight in case.weights if len(weight.shape) > 1]
    inside = sum(prod(weight.shape) for weight in two if weight.in_block)
    return inside, sum(prod(weight.shape) for weight in two) - inside


def device_hours(told: Told) -> float:
    """Return the device hours of the run: number of devices times hours."""
    return told.case.devices * told.run.seconds / 3600


def lines(told: Told) -> Iterator[str]:
    """Yield the lines of the report."""
    yield from _run_lines(told.case)
    yield ""
    yield from _memory_lines(told)
    yield ""
    yield from _step_lines(told)
    yield ""
    yield from _whole_lines(told)
    yield ""
    yield from _assumptions(told)


def _run_lines(case: Case) -> Iterator[str]:
    arch, train = case.arch, case.cfg.train
    total, (inside, outside) = count.parameters(arch), parameters(case)
    per_token = count.flops_per_token(arch, train.seq_len)
    tokens = case.stages.tokens_before(case.steps)
    yield (
        f"{'model':<10}{arch.family}, {_number(total)} parameters: {_number(inside)} in matrices, "
        f"{_number(outside)} in embeddings and head"
    )
    yield (
        f"{'run':<10}{case.steps:,} steps of {case.stages.describe(case.steps)}: "
        f"{_number(tokens)} tokens, {tokens / total:.3g} per parameter"
    )
    yield f"{'':<10}{_number(per_token)} FLOPs per token, {per_token * tokens:.2e} in all"
    mesh = case.sizes.describe()
    yield (
        f"{'devices':<10}{case.devices} x {case.gpu.name} on {case.nodes} "
        f"node{'s' * (case.nodes > 1)}{f': {mesh}' if mesh else ''}"
    )
    remat = "" if train.remat == "none" else f", remat {train.remat}"
    if remat and train.remat_every > 1:
        remat += f" of every {train.remat_every}th block"
    yield (
        f"{'':<10}{case.precision}{', compiled' if case.compiled else ''}{remat}; "
        f"micro-batch of {case.micro_batch} x {train.seq_len}, {case.accumulation} to a step"
    )


def _memory_lines(told: Told) -> Iterator[str]:
    case, peak = told.case, told.memory
    yield f"memory of a device at its peak ({peak.moment}), GiB"
    for part, size in peak.parts.items():
        if size:
            yield f"  {part:<28}{size / GIB:>10.2f}"
    yield f"  {'together':<28}{peak.total / GIB:>10.2f}  of {case.gpu.memory / GIB:.1f}"
    if told.fits:
        yield "  fits"
        return
    yield f"  does not fit: {told.room / GIB:.1f} GiB can be used"
    if told.change is None:
        yield "  no batch, remat or mesh of these devices makes it fit: a smaller model"
        return
    changed = advice.changed_by(case, told.change)
    assert changed is not None, "it was tried"
    better = memory(changed).total / GIB
    yield f"  fits with {advice.described(case, told.change)} ({better:.1f} GiB)"


def _step_lines(told: Told) -> Iterator[str]:
    one = told.step
    yield f"{'received by a device in a step':<30}{'GB':>10}{'seconds':>10}"
    for each in one.exchanges:
        aside = "" if each.hidden else "  nothing beside it"
        yield f"  {each.kind:<28}{each.bytes / 1e9:>10.3g}{each.seconds:>10.3g}{aside}"
    if not one.exchanges:
        yield "  nothing"
    yield (
        f"{'step':<10}≈ {one.seconds:.3g} s ({one.compute:.3g} of products, {one.optimizer:.3g} of "
        f"the optimizer, {one.exposed:.3g} of exchanges that"
    )
    yield f"{'':<10}nothing hides), MFU ≈ {one.mfu:.0%}"


def _whole_lines(told: Told) -> Iterator[str]:
    case, run = told.case, told.run
    slices = ""
    if run.slices is not None:
        slices = f", {run.slices} job{'s' * (run.slices > 1)} of {case.cfg.launch.time}"
    elif case.cfg.launch.time_limit is not None:
        slices = f"; launch.time ({case.cfg.launch.time}) is too short to begin with"
    yield f"{'time':<10}≈ {in_words(run.seconds)}{slices}"
    size, most = checkpoint_bytes(case), checkpoints_at_once(case)
    yield (
        f"{'disk':<10}{size / 1e9:.3g} GB a checkpoint, at most {most} at once: "
        f"{most * size / 1e9:.3g} GB"
    )
    hours = device_hours(told)
    cost = "" if told.price is None else f" x {told.price:g} = {told.price * hours:,.0f}"
    yield f"{'cost':<10}≈ {hours:,.3g} device hours{cost}"


def _probe_lines(told: Told, measured: Measured) -> Iterator[str]:
    """Yield a table of planned and measured values; an error is planned / measured - 1."""
    planned = told.memory.total - told.memory.parts["framework"] - told.memory.parts["batches"]
    memory_error = planned / measured.memory - 1
    time_error = told.step.seconds / measured.seconds - 1
    yield ""
    yield f"{'measured in three steps':<30}{'plan':>10}{'measured':>10}{'error':>10}"
    yield (
        f"  {'memory beyond start, GiB':<28}{planned / GIB:>10.2f}{measured.memory / GIB:>10.2f}"
        f"{memory_error:>+10.1%}"
    )
    yield (
        f"  {'step, seconds':<28}{told.step.seconds:>10.3g}{measured.seconds:>10.3g}"
        f"{time_error:>+10.1%}"
    )


def _assumptions(told: Told) -> Iterator[str]:
    case = told.case
    gpu = case.gpu
    peak = (gpu.fp32 if case.product_bytes == 4 else gpu.bf16) / 1e12
    source = f"as published by\n  {SOURCE}" if gpu.kind == "cuda" else "a guess"
    yield f"assumed: {achieved(case):.1%} of {peak:.3g} TFLOP/s, {source};"
    yield (
        f"{LINK:.0%} of {gpu.within / 1e9:.3g} GB/s within a node, {gpu.between / 1e9:.3g} between "
        f"nodes; {SPARE[gpu.kind]:.0%} of the memory stays free."
    )
    yield "Times are estimates, below 1B parameters too short: measure a few steps."


def _number(value: float) -> str:
    """Format a number with a magnitude suffix, such as 124.40M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.2f}{unit}"
    return f"{value:.0f}"
