"""Anomalous steps change nothing, on all ranks alike, and never wait for the host.

Whole runs are made in one process for each rank. Hooks on the model spoil what it returns in
training, at chosen steps: its loss, or the gradient that comes back.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from support.guarded_runs import STEPS, build, one_step
from support.ranks import on_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dtt.base.errors import Diverged
from dtt.base.ranks import Ranks
from dtt.checkpoint import store
from dtt.config.train import GuardConfig
from dtt.mesh.dist import World
from dtt.model.output import Output
from dtt.track import jsonl
from dtt.train import anomaly_guard as guard_module
from dtt.train.anomaly_guard import FINE, NON_FINITE, SPIKE, WINDOW, Guard
from dtt.train.state import Position, optimizer_tensors
from dtt.train.trainer import Trainer

ALONE = World(Ranks(), torch.device("cpu"), None)
BAD = 10
Poison = Mapping[int, str]
"""What is spoilt, by step."""


def poison(trainer: Trainer, at: Poison, rank: int | None = None) -> None:
    """Spoil what the model returns in training, on one rank or all."""

    def spoil(module: nn.Module, _: Any, output: Output) -> Output | None:
        kind = at.get(trainer.position.step + 1)
        if kind is None or not module.training or rank not in (None, trainer.world.rank):
            return None
        if kind == "nan":
            return output._replace(loss=output.loss * math.nan)
        factor = {"inf": math.inf, "spike": 1000.0}[kind]
        loss = output.loss * 1.0
        loss.register_hook(lambda gradient: factor * gradient)
        return output._replace(loss=loss)

    trainer.state.model.register_forward_hook(spoil)


def without(trainer: Trainer, *steps: int) -> Trainer:
    """Return the trainer without the batches of these steps."""
    every = trainer.batches_from
    trainer.schedule.steps -= len(steps)

    def batches(first: int) -> Any:
        with closing(every(first)) as all_batches:
            numbered = zip(itertools.count(first + 1), all_batches, strict=False)
            yield from (batch for number, batch in numbered if number not in steps)

    return replace(trainer, batches_from=batches)


def finish(trainer: Trainer) -> dict[str, Any]:
    """Run to the end; what came out, and what the job says of it."""
    error = None
    folder = trainer.job.checkpoints
    try:
        assert trainer.run()
    except Diverged as diverged:
        error = str(diverged)
    trainer.saver.close()
    for tracker in trainer.trackers:
        tracker.close()
    assert trainer.state.ema is not None
    state = dict(trainer.state.model.state_dict()) | optimizer_tensors(trainer.state.optimizers)
    state |= trainer.state.ema.tensors()
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode() + state[name].numpy().tobytes())
    return {
        "state": digest.hexdigest(),
        "finite": all(bool(t.isfinite().all()) for t in state.values()),
        "error": error,
        "position": trainer.position.to_json(),
        "records": [r for r in jsonl.read(trainer.job.metrics) if r["kind"] in ("train", "guard")],
        "checkpoints": store.steps(folder),
    }


class Case(NamedTuple):
    """A run to look at."""

    poison: Poison = MappingProxyType({})
    settings: tuple[str, ...] = ()
    leave_out: tuple[int, ...] = ()
    """Steps whose batches are not in the order."""
    rank: int | None = None
    """The only one whose share is spoilt; None: all are."""
    resume: bool = False
    """Take up the run of this name as after a kill: with the records of its end, the newest
    checkpoint from before the bad step."""


SKIP = ("guard.non_finite=skip", "guard.spike=skip")
ADAMW = "optim.type=adamw"
NAN, INF, SPIKED = {BAD: "nan"}, {BAD: "inf"}, {BAD: "spike"}
EVERY_STEP = dict.fromkeys(range(BAD, STEPS + 1), "nan")
CASES = {
    "nan": Case(NAN, SKIP),
    "inf": Case(INF, SKIP),
    "spike": Case(SPIKED, SKIP),
    "first": Case({1: "nan"}, SKIP),
    "nan-adamw": Case(NAN, (*SKIP, ADAMW)),
    "first-adamw": Case({1: "nan"}, (*SKIP, ADAMW)),
    "without": Case(leave_out=(BAD,)),
    "without-first": Case(leave_out=(1,)),
    "without-adamw": Case(settings=(ADAMW,), leave_out=(BAD,)),
    "without-first-adamw": Case(settings=(ADAMW,), leave_out=(1,)),
    "unguarded": Case(),
    "clean": Case(settings=SKIP),
    "stop": Case(NAN),
    "stop-spike": Case(SPIKED, ("guard.spike=stop",)),
    "hopeless": Case(EVERY_STEP, SKIP),
    "nan resumed": Case(NAN, SKIP, resume=True),
    "spike resumed": Case(SPIKED, SKIP, resume=True),
}
ON_TWO_RANKS = {
    "nan": Case(NAN, SKIP, rank=1),
    "spike": Case(SPIKED, SKIP, rank=1),
    "stop": Case(NAN, rank=0),
    **{name: CASES[name] for name in ("without", "unguarded", "nan resumed")},
}


def runs(world: World, folder: Path, tokens: Path) -> dict[str, dict[str, Any]]:
    """What all cases come to, by name; and how often a step takes a number off the device."""
    # The runs are short; this is a process of its own.
    guard_module.SPIKE_WINDOW, guard_module.MAX_SKIPS = 8, 3
    cases = CASES if world.size == 1 else ON_TWO_RANKS
    found = {name: run(world, folder, tokens, name, case) for name, case in cases.items()}
    step = one_step(build(world, folder, tokens, "name=one-step", *SKIP))
    with Fetches() as fetches:
        step()
    return found | {"one step": {"fetches": fetches.count}}


def run(world: World, folder: Path, tokens: Path, name: str, case: Case) -> dict[str, Any]:
    """What one comes to."""
    job = name.split()[0]
    if case.resume:
        if world.first:
            shutil.rmtree(folder / f"jobs/{job}/checkpoints/step-{STEPS:06d}")
        world.barrier()
    trainer = build(world, folder, tokens, f"name={job}", *case.settings)
    poison(trainer, case.poison, case.rank)
    if case.leave_out:
        trainer = without(trainer, *case.leave_out)
    return finish(trainer)


Found = Callable[[int], dict[str, dict[str, Any]]]


def on_two(*values: object) -> Any:
    """Return the parameters of a slow case on two ranks."""
    return pytest.param(2, *values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def found(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What the cases come to on so many ranks: the same on every rank."""

    @cache
    def on(ranks: int) -> dict[str, dict[str, Any]]:
        by_rank = on_ranks(ranks, runs, tmp_path_factory.mktemp("jobs"), tokens)
        for other in by_rank:
            for name, its in other.items():
                for fact in its.keys() - {"records"}:  # only the first rank closes them
                    assert its[fact] == by_rank[0][name][fact], (name, fact)
        return by_rank[0]

    return on


def guard_records(run: Mapping[str, Any]) -> list[tuple[int, str, int, str]]:
    records = (r for r in run["records"] if r["kind"] == "guard")
    return [(r["step"], r["why"], r["bad_step"], r["action"]) for r in records]


@pytest.mark.parametrize(
    ("ranks", "run", "reference"),
    [
        (1, "nan", "without"), (1, "inf", "without"), (1, "spike", "without"),
        (1, "first", "without-first"), (1, "nan-adamw", "without-adamw"),
        (1, "first-adamw", "without-first-adamw"), on_two("nan", "without"),
        on_two("spike", "without"),
    ],
)  # fmt: skip
def test_a_skipped_step_changes_no_state(
    found: Found, ranks: int, run: str, reference: str
) -> None:
    cases = found(ranks)
    assert cases[run]["state"] == cases[reference]["state"]
    assert cases[run]["state"] != cases["unguarded"]["state"]
    bad = 1 if run.startswith("first") else BAD
    why = "spike" if run == "spike" else "non_finite"
    assert guard_records(cases[run]) == [(bad, why, bad, "skip")]


@pytest.mark.parametrize("ranks", [1, on_two()])
def test_the_data_order_continues_after_a_skipped_step(found: Found, ranks: int) -> None:
    """Ledger, tokens and rate of every step are those of a run in which nothing was bad."""
    facts = [
        [(r["step"], r["ledger"], r["tokens"], r["lr"]) for r in found(ranks)[run]["records"]
         if r["kind"] == "train"]
        for run in ("nan", "spike", "unguarded")
    ]  # fmt: skip
    assert all(some == facts[-1] for some in facts)


def test_records_name_the_batch_and_are_json_without_nan(found: Found) -> None:
    by_kind = {r["kind"]: r for r in found(1)["nan"]["records"] if r["step"] == BAD}
    assert by_kind["train"]["skipped"] is True
    assert by_kind["train"]["loss"] is None
    assert by_kind["train"]["grad_norm"] is None
    assert by_kind["guard"]["ledger"] == by_kind["train"]["ledger"]
    usual, spiked = (
        next(r for r in found(1)["spike"]["records"] if r["step"] == step)
        for step in (BAD - 1, BAD)
    )
    assert spiked["skipped"] is True
    assert spiked["grad_norm"] > 100 * usual["grad_norm"]
    assert spiked["loss"] == pytest.approx(usual["loss"], rel=0.5)
    for run in CASES:
        json.dumps(found(1)[run]["records"], allow_nan=False)


def test_a_good_run_is_the_same_with_and_without_a_guard(found: Found) -> None:
    clean, unguarded = found(1)["clean"], found(1)["unguarded"]
    assert clean["state"] == unguarded["state"]
    assert clean["records"] == unguarded["records"]
    assert guard_records(clean) == []


@pytest.mark.parametrize(
    ("ranks", "run", "what"),
    [(1, "stop", "loss is nan"), (1, "stop-spike", "grad_norm is"), on_two("stop", "loss is nan")],
)
def test_stop_keeps_the_state_before_and_explains_how_to_resume(
    found: Found, ranks: int, run: str, what: str
) -> None:
    stopped = found(ranks)[run]
    assert stopped["error"].startswith(f"training diverged: {what}")
    assert stopped["checkpoints"] == [4, 8]
    assert stopped["finite"]
    last = stopped["records"][-1]
    assert (last["kind"], last["step"], last["action"]) == ("guard", BAD, "stop")
    for part in (last["ledger"], f"dtt data at-step jobs/{run} {BAD}", "lower optim.lr", "=skip"):
        assert part in stopped["error"]


@pytest.mark.parametrize(("ranks", "run"), [(1, "nan"), (1, "spike"), on_two("nan")])
def test_a_resumed_run_reaches_the_same_verdicts(found: Found, ranks: int, run: str) -> None:
    assert found(ranks)[f"{run} resumed"] == found(ranks)[run]


def test_too_many_bad_steps_end_the_run(found: Found) -> None:
    skipped = found(1)["hopeless"]
    assert f"loss is nan at step {BAD + 2}" in skipped["error"]
    assert f"3 of the last 100 steps were anomalous, the first {BAD}" in skipped["error"]
    assert skipped["finite"]


# ---- the judgement alone -------------------------------------------------------------------------


def verdicts(guard: Guard, norms: list[float], loss: float = 2.0) -> list[float]:
    judged = (guard.judge(torch.tensor([loss, norm])) for norm in norms)
    return [float(judgement.values[2]) for judgement in judged]


@pytest.fixture(autouse=True)
def short_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module, "SPIKE_WINDOW", 8)


def watching() -> Guard:
    return Guard(GuardConfig(spike="skip"), ALONE, Path("jobs/t"))


@pytest.mark.parametrize(
    ("before", "norms", "expected"),
    [
        ([1.0] * 7, [1e6], [FINE]),
        ([1.0] * 8, [1e6], [SPIKE]),
        ([1.0] * 8, [3.99], [FINE]),
        ([1.0] * 8, [4.01], [SPIKE]),
        # ln: 0 ± 0.74, of which 6 are a factor of 85
        ([0.5, 2.0] * 4, [80.0], [FINE]),
        ([0.5, 2.0] * 4, [90.0], [SPIKE]),
        # A spike does not hide the next, nor does a norm of zero.
        (
            [1.0] * 8,
            [1e6, 1e6, math.nan, 0.0, 1e6, 1.0],
            [SPIKE, SPIKE, NON_FINITE, FINE, SPIKE, FINE],
        ),
    ],
)
def test_a_spike_is_four_times_the_usual_norm_and_six_deviations_above_a_full_window(
    before: list[float], norms: list[float], expected: list[float]
) -> None:
    assert verdicts(watching(), [*before, *norms]) == [FINE] * len(before) + expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_without_a_window_no_finite_norm_is_a_spike(value: float) -> None:
    guard = Guard(GuardConfig(), ALONE, Path("jobs/t"))
    assert verdicts(guard, [1.0, value, 1e9]) == [FINE, NON_FINITE, FINE]
    assert verdicts(guard, [1.0], loss=value) == [NON_FINITE]
    assert guard.tensors() == {}


def test_a_window_of_another_size_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    old, same = watching(), watching()
    verdicts(old, [1.0] * 8)
    same.load(old.tensors())
    assert torch.equal(same.tensors()[WINDOW], old.tensors()[WINDOW])
    monkeypatch.setattr(guard_module, "SPIKE_WINDOW", 16)
    new = watching()
    new.load(old.tensors())
    assert bool(new.tensors()[WINDOW].isnan().all())


def test_skips_long_ago_do_not_count() -> None:
    guard, position = Guard(GuardConfig(non_finite="skip"), ALONE, Path("jobs/t")), Position()
    seen = (2.0, math.inf, NON_FINITE)
    for step in range(1, 2000, 12):
        list(guard.review({"step": step, "ledger": "ab"}, seen, position))
    assert len(position.recent_skips) == 9
    with pytest.raises(Diverged, match="10 of the last 100 steps"):
        list(guard.review({"step": step + 1, "ledger": "ab"}, seen, position))


def test_a_position_comes_back_from_json_and_from_an_older_checkpoint() -> None:
    done = {"validate": 5, "log": 12, "save": 12}
    position = Position(12, 300, 9, b"a" * 16, b"b" * 16, done, 1.25, 8, [3, 7])
    record = json.loads(json.dumps(position.to_json()))
    assert Position.from_json(record) == position
    del record["skipped"], record["trained"]
    assert Position.from_json(record) == replace(position, trained=12, recent_skips=[])


# ---- no waiting for the device -------------------------------------------------------------------


class Fetches(TorchDispatchMode):
    """Counts how often a number is taken off a tensor."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_host_synchronisations_are_counted() -> None:
    with Fetches() as fetches:
        torch.ones(()).item()
        bool(torch.ones(()) > 0)
    assert fetches.count == 2


@pytest.mark.parametrize("ranks", [1, on_two()])
def test_a_guarded_step_does_not_synchronise_with_the_device(found: Found, ranks: int) -> None:
    assert found(ranks)["one step"] == {"fetches": 0}
