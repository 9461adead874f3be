"""`dtt plan`: estimate the memory, time, disk space and cost of a run before it starts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dtt.base.errors import ConfigError
from dtt.config.run import RunConfig
from dtt.estimate import gpus
from dtt.estimate.activations import most_waiting
from dtt.estimate.case import Case
from dtt.estimate.communication import LINK
from dtt.estimate.duration import SOURCE, TORCHTITAN, achieved, slowest_like
from dtt.estimate.estimates import (
    Estimate,
    estimate_of,
    make_estimate,
    vocabulary_and_steps,
)
from dtt.estimate.memory import GIB, SPARE
from dtt.estimate.optimizer_cost import checkpoint_bytes, checkpoints_at_once
from dtt.jobs.clock import in_words
from dtt.model import count

COLUMNS = {
    "weights": "parameters", "optimizer": "optimizer state", "gradients": "gradients",
    "gathered": "gathered parameters", "activations": "activations",
    "received": "received hidden states",
}  # fmt: skip
"""Part of the memory by column."""


def run(
    cfg: RunConfig,
    gpu: str | None,
    price: float | None,
    *,
    as_json: bool,
) -> None:
    """Estimate the run and print the result, without building a model or reading tokens."""
    device = gpus.for_run(cfg, gpu)
    if device is None:
        _compare(cfg, price, as_json=as_json)
        return
    estimate = make_estimate(cfg, device, price)
    if as_json:
        print(json.dumps(facts(estimate), indent=1))
    else:
        print("\n".join(lines(estimate)))


def _compare(cfg: RunConfig, price: float | None, *, as_json: bool) -> None:
    """Print a line for each GPU in GPUS: the run is for GPUs, and nothing says for which."""
    size, steps, cfg = vocabulary_and_steps(cfg)
    found = {n: facts(estimate_of(cfg, gpu, price, size, steps)) for n, gpu in gpus.GPUS.items()}
    if as_json:
        print(json.dumps({"gpus": found}, indent=1))
        return
    devices = cfg.launch.nodes * cfg.launch.processes
    print(f"{devices} GPUs, and neither the configuration nor this machine says which\n")
    print("\n".join(_table("gpu", found)))
    print("\nnext: --gpu NAME shows the plan for one; launch.gpus_per_node=NAME:N sets it")


def run_stages(
    stages: Sequence[RunConfig],
    gpu: str | None,
    price: float | None,
    *,
    as_json: bool,
) -> None:
    """Estimate the stages of training and print a line for each, and their sum."""
    names = [cfg.name.rpartition("/")[2] for cfg in stages]
    device = gpus.for_run(stages[0], gpu)
    if device is None:
        why = "the stages are for GPUs, and neither they nor this machine say for which"
        raise ConfigError("plan needs a GPU", why=why, next=f"--gpu {' or '.join(gpus.GPUS)}")
    estimates = _of_stages(stages, device, price)
    found = dict(zip(names, map(facts, estimates), strict=True))
    total = {
        key: sum(one[key] for one in found.values())
        for key in ("steps", "tokens", "seconds", "slow_seconds", "device_hours")
    }
    total |= {"cost": None if price is None else price * total["device_hours"]}
    if as_json:
        print(json.dumps({"stages": found, "total": total}, indent=1))
    else:
        print("\n".join(_table("stage", {**found, "total": total})))
        for name, one in found.items():
            if not one["fits"]:
                more = f"dtt plan --stage {name} shows its parts"
                print(f"stage {name} does not fit into memory: {more}")
        print("", *_assumptions(estimates[0]), sep="\n")


def _of_stages(
    stages: Sequence[RunConfig], device: gpus.Gpu, price: float | None
) -> list[Estimate]:
    found: list[Estimate] = []
    for cfg in stages:  # the tokenizer of a later stage may not exist before the first is tokenized
        size = found[0].case.arch.vocab_size if found else None
        found.append(make_estimate(cfg, device, price, size))
    return found


def _table(head: str, found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a table of the facts of several estimates, by name; a sum has no memory."""
    width = max(map(len, [*found, head]))
    priced = any(one["cost"] is not None for one in found.values())
    yield (
        f"{head:<{width}}{'steps':>12}{'tokens':>12}{'GiB':>8}{'of':>8}{'at best':>14}"
        f"{'as others':>14}{'device hours':>14}{'cost' if priced else '':>{12 * priced}}"
    )
    for name, one in found.items():
        memory_columns = (
            f"{one['memory_peak'] / GIB:>8.2f}{one['memory_device'] / GIB:>8.1f}"
            if "memory_peak" in one
            else " " * 16
        )
        cost = "" if one["cost"] is None else f"{one['cost']:>12,.0f}"
        yield (
            f"{name:<{width}}{one['steps']:>12,}{_number(one['tokens']):>12}{memory_columns}"
            f"{in_words(one['seconds']):>14}{in_words(one['slow_seconds']):>14}"
            f"{one['device_hours']:>14.3g}{cost}"
            f"{'' if one.get('fits', True) else '  does not fit'}"
        )


def missing_configuration() -> ConfigError:
    """Return the error of a command that names neither a configuration nor a key."""
    return ConfigError(
        "plan requires a config (-c FILE) or config keys",
        why="got neither",
        next="run dtt plan -c quickstart, or dtt plan -c FILE",
    )


def facts(estimate: Estimate) -> dict[str, Any]:
    """Return the estimate for `--json`, in bytes, seconds and FLOPs."""
    case, one = estimate.case, estimate.step
    per_token = case.flops_per_token
    tokens = case.step_sizes.tokens_before(case.steps)
    blocks, outside = _matrices_and_rest(case)
    pipeline: dict[str, Any] = {}
    if case.sizes.pipeline > 1:
        ranks = [
            {"layers": case.of_rank(rank).own_blocks, "memory": peak.parts, "peak": peak.total}
            for rank, peak in enumerate(estimate.ranks)
        ]
        pipeline = {"pipeline_ranks": ranks, "idle_seconds": one.idle}
    return {
        "family": case.model.family,
        "parameters": count.parameters(case.model),
        "parameters_matrices": blocks,
        "parameters_embedding_and_head": outside,
        "steps": case.steps,
        "tokens": tokens,
        "tokens_per_parameter": tokens / count.parameters(case.model),
        "flops_per_token": per_token,
        "flops": per_token * tokens,
        "gpu": case.gpu.name,
        "nodes": case.nodes,
        "gpus_per_node": case.gpus_per_node,
        "mesh": case.sizes._asdict(),
        "precision": case.precision.value,
        "micro_batch": case.micro_batch,
        "accumulation": case.accumulation,
        "memory": estimate.memory.parts,
        "memory_peak": estimate.memory.total,
        "memory_peak_at": estimate.memory.moment,
        "memory_device": case.gpu.memory,
        "fits": estimate.fits,
        "communication": {
            each.kind: {"bytes": each.bytes, "seconds": each.seconds} for each in one.collectives
        },
        "step_seconds": one.seconds,
        "slow_step_seconds": one.seconds / estimate.share,
        "mfu": one.mfu,
        "slow_mfu": one.mfu * estimate.share,
        **pipeline,
        "achieved": achieved(case),
        "achieved_source": SOURCE if case.gpu.kind == "cuda" else None,
        "seconds": estimate.run.seconds,
        "slow_seconds": estimate.slow_seconds,
        "slices": estimate.run.slices,
        "checkpoint_bytes": checkpoint_bytes(case),
        "checkpoints_bytes": checkpoints_at_once(case) * checkpoint_bytes(case),
        "device_hours": estimate.device_hours,
        "cost": None if estimate.price is None else estimate.price * estimate.device_hours,
    }


def lines(estimate: Estimate) -> Iterator[str]:
    """Yield the lines of the report."""
    yield from _run_lines(estimate.case)
    yield ""
    yield from _memory_lines(estimate)
    yield ""
    if len(estimate.ranks) > 1:
        yield from _pipeline_lines(estimate)
        yield ""
    yield from _step_lines(estimate)
    yield ""
    yield from _total_lines(estimate)
    yield ""
    yield from _assumptions(estimate)


def _matrices_and_rest(case: Case) -> tuple[int, int]:
    """Return the number of parameters in hidden matrices, and in embeddings and head.

    The remaining parameters are those of norms and biases.
    """
    two = [weight for weight in case.all_weights if len(weight.shape) > 1]
    inside = sum(weight.numel for weight in two if weight.in_block)
    return inside, sum(weight.numel for weight in two) - inside


def _run_lines(case: Case) -> Iterator[str]:
    arch, train = case.arch, case.cfg.train
    total, (inside, outside) = count.parameters(case.model), _matrices_and_rest(case)
    per_token = case.flops_per_token
    tokens = case.step_sizes.tokens_before(case.steps)
    yield (
        f"{'model':<10}{arch.family}, {_number(total)} parameters: {_number(inside)} in matrices, "
        f"{_number(outside)} in embeddings and head"
    )
    if arch.mixture is not None:
        active = _number(count.active_parameters(arch))
        yield f"{'':<10}{active} compute a token: {arch.mixture.describe()}"
    if trained := case.adapter:
        four_bits = ", those in matrices in 4 bits" * any(w.quantized for w in case.all_weights)
        yield f"{'':<10}{_number(trained)} trained in the adapter, the others frozen{four_bits}"
    yield (
        f"{'run':<10}{case.steps:,} steps of {case.step_sizes.describe(case.steps)}: "
        f"{_number(tokens)} tokens, {tokens / total:.3g} per parameter"
    )
    yield f"{'':<10}{_number(per_token)} FLOPs per token, {per_token * tokens:.2e} in total"
    mesh = case.sizes.describe()
    yield (
        f"{'devices':<10}{case.devices} x {case.gpu.name} on {case.nodes} "
        f"node{'s' * (case.nodes > 1)}{f': {mesh}' if mesh else ''}"
    )
    remat = "" if train.remat == "none" else f", remat {train.remat}"
    yield (
        f"{'':<10}{case.precision}{', compiled' if case.compiled else ''}{remat}; "
        f"micro-batch of {case.micro_batch} x {train.seq_len}, {case.accumulation} per step"
    )


def _memory_lines(estimate: Estimate) -> Iterator[str]:
    case, peak = estimate.case, estimate.memory
    of_rank = f" of pipeline rank {estimate.ranks.index(peak)}" if len(estimate.ranks) > 1 else ""
    yield f"memory of a device{of_rank} at its peak ({peak.moment}), GiB"
    for part, size in peak.parts.items():
        if size:
            yield f"  {part:<28}{size / GIB:>10.2f}"
    yield f"  {'total':<28}{peak.total / GIB:>10.2f}  of {case.gpu.memory / GIB:.1f}"
    if estimate.fits:
        yield "  fits"
        return
    yield f"  does not fit: {estimate.room / GIB:.1f} GiB are usable"
    yield "  less memory, the cheapest first: a smaller train.micro_batch, train.remat=selective,"
    yield "  parallel.shard=-1, train.remat=full, parallel.reduce=each, parallel.tensor, more nodes"


def _pipeline_lines(estimate: Estimate) -> Iterator[str]:
    """Yield a table with a line for each rank of the pipeline."""
    widths = [len(column) + 2 for column in COLUMNS] + [9]
    head = "".join(f"{name:>{n}}" for name, n in zip((*COLUMNS, "total"), widths, strict=True))
    yield f"{'rank':<5}{'layers':>7}{'waiting':>8}{head}"
    for rank, peak in enumerate(estimate.ranks):
        of_rank = estimate.case.of_rank(rank)
        sizes = [*(peak.parts.get(part, 0) for part in COLUMNS.values()), peak.total]
        columns = "".join(f"{size / GIB:>{n}.2f}" for size, n in zip(sizes, widths, strict=True))
        yield f"{rank:<5}{of_rank.own_blocks:>7}{most_waiting(of_rank):>8}{columns}"
    yield "at each rank's peak in GiB; waiting: passes whose backward pass has not started"
    idle = estimate.step.idle / estimate.step.seconds
    yield f"each rank is idle for {idle:.1%} of a step, at its start and end"


def _step_lines(estimate: Estimate) -> Iterator[str]:
    one = estimate.step
    yield f"{'received per device and step':<30}{'GB':>10}{'seconds':>10}"
    for each in one.collectives:
        note = "" if each.hidden else "  not overlapped"
        yield f"  {each.kind:<28}{each.bytes / 1e9:>10.3g}{each.seconds:>10.3g}{note}"
    if not one.collectives:
        yield "  nothing"
    idle = f", {one.idle:.3g} idle" if one.idle else ""
    share = estimate.share
    ranges = f"{one.seconds:.3g} s", f"{one.mfu:.0%}"
    if share < 1:
        slow = one.seconds / share
        ranges = f"{one.seconds:.3g} to {slow:.3g} s", f"{one.mfu * share:.0%} to {one.mfu:.0%}"
    yield f"{'step':<10}≈ {ranges[0]}, MFU ≈ {ranges[1]}"
    yield (
        f"{'':<10}{one.compute:.3g} s computation, {one.optimizer:.3g} optimizer, "
        f"{one.exposed:.3g} exposed communication{idle}"
    )


def _total_lines(estimate: Estimate) -> Iterator[str]:
    case, run = estimate.case, estimate.run
    slices = ""
    if run.slices is not None:
        slices = f", {run.slices} job{'s' * (run.slices > 1)} of {case.cfg.launch.time}"
    elif case.cfg.launch.time_limit is not None:
        slices = f"; launch.time ({case.cfg.launch.time}) is too short to start"
    if (budget := case.cfg.train.budget) is not None:
        slices += f"; train.budget is {budget}, train.steps at most {case.cfg.train.steps:,}"
    longest = estimate.slow_seconds
    until = f" to {in_words(longest)}" if longest > run.seconds else ""
    yield f"{'time':<10}≈ {in_words(run.seconds)}{until}{slices}"
    size, most = checkpoint_bytes(case), checkpoints_at_once(case)
    yield (
        f"{'disk':<10}{size / 1e9:.3g} GB per checkpoint, at most {most} at once: "
        f"{most * size / 1e9:.3g} GB"
    )
    hours = estimate.device_hours
    cost = (
        "" if estimate.price is None else f" x {estimate.price:g} = {estimate.price * hours:,.0f}"
    )
    yield f"{'cost':<10}≈ {hours:,.3g} device hours{' at best' if until else ''}{cost}"


def _assumptions(estimate: Estimate) -> Iterator[str]:
    case = estimate.case
    gpu = case.gpu
    peak = (gpu.bf16 if case.product_bytes == 2 else gpu.fp32) / 1e12
    source = f"measured by\n  {SOURCE};" if gpu.kind == "cuda" else "a guess;"
    yield f"assumed: {achieved(case):.1%} of {peak:.3g} TFLOP/s, {source}"
    if (like := slowest_like(case)) is not None:
        yield f"  the longer time: {like.describe()}\n  ({TORCHTITAN});"
    yield (
        f"{LINK:.0%} of {gpu.within / 1e9:.3g} GB/s within a node, {gpu.between / 1e9:.3g} between "
        f"nodes; {SPARE[gpu.kind]:.0%} of the memory stays free."
    )
    yield "Times are estimates: measure a few steps."


def _number(value: float) -> str:
    """Format a number with a magnitude suffix, such as 124.40M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.2f}{unit}"
    return f"{value:.0f}"
