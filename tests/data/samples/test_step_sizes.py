"""How large each step is: batches and contexts that grow, against walking through the run."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dtt.base.errors import ConfigError
from dtt.config.load import resolve as load
from dtt.config.parallel import Sizes as MeshSizes
from dtt.config.train import TrainConfig
from dtt.data.samples.compatibility import check_batches
from dtt.data.samples.step_sizes import step_sizes_of

SEQ_LEN, FULL = 64, 4096
Sizes = list[tuple[Fraction, int]]
"""From when on, and tokens in a step."""


def train(**keys: Any) -> TrainConfig:
    sizes = {"seq_len": SEQ_LEN, "global_batch_tokens": FULL, "steps": 300}
    return TrainConfig.model_validate_json(json.dumps(sizes | keys))


def walk(sizes: Sizes, unit: str, steps: int) -> list[int]:
    """Tokens of each step: at every one, look how far the run has come, and take the size there."""
    taken: list[int] = []
    tokens = 0
    for step in range(steps):
        come = tokens if unit == "tokens" else step
        taken.append(next(size for at, size in reversed(sizes) if at <= come))
        tokens += taken[-1]
    return taken


def spelt(amount: Fraction, unit: str) -> int | float | str:
    """A length as a person writes it; shares are of 300 steps."""
    if unit == "share":
        return f"{float(amount / 3):.12g}%"
    return f"{math.ceil(amount)} tokens" if unit == "tokens" else int(amount)


units = st.sampled_from(["steps", "share", "tokens"])
lengths = st.integers(1, 299)


def in_unit(length: int, unit: str) -> Fraction:
    return Fraction(length * (FULL // 3 if unit == "tokens" else 1))


def assert_grows(schedule: dict[str, Any], sizes: Sizes, unit: str) -> None:
    taken = walk(sizes, unit, 300)
    assume(taken[-1] == FULL)  # else it is refused
    sizes = step_sizes_of(train(batch_schedule=schedule))
    assert [sizes.batch_tokens(step) for step in range(300)] == taken


@settings(max_examples=40)
@given(unit=units, every=st.integers(1, 40), start=st.integers(1, 63))
def test_a_batch_doubles_each_time_until_it_is_full(unit: str, every: int, start: int) -> None:
    between = in_unit(every, unit)
    sizes: Sizes = []
    while not sizes or sizes[-1][1] < FULL:
        sizes.append((len(sizes) * between, min(FULL, 64 * start * 2 ** len(sizes))))
    schedule = {"type": "doubling", "start": 64 * start, "every": spelt(between, unit)}
    assert_grows(schedule, sizes, unit)


@settings(max_examples=40)
@given(
    unit=units,
    starts=st.lists(lengths, min_size=1, max_size=6, unique=True).map(sorted),
    data=st.data(),
)
def test_a_list_gives_the_start_of_each_size(
    unit: str, starts: list[int], data: st.DataObject
) -> None:
    sizes = data.draw(
        st.lists(st.integers(1, 63), min_size=len(starts), max_size=len(starts), unique=True)
    )
    named = [*zip([0, *starts], [*sorted(64 * size for size in sizes), FULL], strict=True)]
    expected = [(in_unit(at, unit), size) for at, size in named]
    stages = [(spelt(at, unit), size) for at, size in expected]
    assert_grows({"type": "list", "stages": stages}, expected, unit)


@settings(max_examples=40)
@given(
    batch=st.sampled_from(["constant", "doubling"]),
    unit=units,
    length=st.integers(1, 9),  # doubled four times from 256 tokens, within 300 steps
    contexts=st.lists(st.sampled_from([8, 16, 32]), unique=True).map(sorted),
    context_unit=units,
)
def test_steps_use_every_sample_once_and_positions_invert_steps(
    batch: str, unit: str, length: int, contexts: list[int], context_unit: str
) -> None:
    schedule: dict[str, Any] = {"type": batch}
    if batch != "constant":
        over = spelt(in_unit(length, unit), unit)
        schedule |= {"start": 256, "every": over}
    starts = [in_unit(7 * i, context_unit) for i in range(len(contexts) + 1)]
    cut = [*zip((spelt(at, context_unit) for at in starts), [*contexts, SEQ_LEN], strict=True)]
    sizes = step_sizes_of(train(batch_schedule=schedule, context_schedule=cut))
    samples = tokens = 0
    for step in range(400):  # beyond the end of the run, too: mixtures ask
        stage = sizes.at(step)
        assert sizes.first_sample(step) == samples
        assert sizes.tokens_before(step) == tokens
        assert sizes.step_after(tokens) == step
        assert sizes.step_after(tokens + 1) == step + 1
        assert {sizes.step_of(samples), sizes.step_of(samples + stage.sequences - 1)} == {step}
        come = {"steps": step, "share": step, "tokens": tokens}[context_unit]
        assert stage.seq_len == next(
            seq_len for at, (_, seq_len) in reversed([*zip(starts, cut, strict=True)]) if at <= come
        )
        samples += stage.sequences
        tokens += sizes.batch_tokens(step)
    assert all(one.step < two.step for one, two in pairwise(sizes.ranges))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["batch_schedule.type=doubling", "batch_schedule.start=100"],
         "train.batch_schedule.start: 100 is not a multiple of train.seq_len = 64"),
        (["batch_schedule.type=doubling", "batch_schedule.start=4096"],
         "train.batch_schedule.start: 4096 is not below train.global_batch_tokens = 4096"),
        (["batch_schedule.type=doubling", "batch_schedule.every=soon"],
         "train.batch_schedule.every: must be steps (500), a share of the run (0.2, 20%) or"),
        (["batch_schedule={type: list, stages: [[0, 64], [9, 4100], [20, 4096]]}"],
         "train.batch_schedule.stages: must grow from stage to stage (got 64, 4100, 4096)"),
        (["batch_schedule={type: list, stages: [[0, 100], [20, 4096]]}"],
         "train.batch_schedule.stages: 100 is not a multiple of train.seq_len = 64"),
        (["batch_schedule={type: list, stages: [[1, 64], [20, 4096]]}"],
         "train.batch_schedule.stages: the first must begin at 0"),
        (["batch_schedule={type: list, stages: [[0, 64], [20, 2048]]}"],
         ".stages: the last must be train.global_batch_tokens = 4096 (got 2048)"),
        (["context_schedule=[[0, 24], [20%, 64]]"],
         "train.context_schedule: 24 does not divide train.seq_len = 64"),
        (["context_schedule=[[0, 16], [20%, 32]]"],
         "train.context_schedule: the last must be train.seq_len = 64 (got 32)"),
    ],
)  # fmt: skip
def test_an_invalid_schedule_is_refused_with_its_key(arguments: list[str], said: str) -> None:
    given = [f"train.{argument}" for argument in arguments]
    with pytest.raises(ConfigError) as caught:
        load(
            None, [f"train.seq_len={SEQ_LEN}", f"train.global_batch_tokens={FULL}", *given], env={}
        )
    assert said in str(caught.value)


def test_stages_out_of_order_are_refused_with_their_steps() -> None:
    stages = [(0, 64), ("50%", 128), ("1k tokens", FULL)]
    with pytest.raises(ConfigError, match=r"do not follow one another\n.*step 17, .*step 151"):
        step_sizes_of(train(batch_schedule={"type": "list", "stages": stages}))
    with pytest.raises(ConfigError, match=r"32 would begin with step 1[01], .*step 151"):
        step_sizes_of(train(context_schedule=[(0, 8), (150, 16), (10, 32), (200, SEQ_LEN)]))


def test_a_stage_after_the_end_of_the_run_is_refused() -> None:
    schedule = {"type": "doubling", "start": 256, "every": "3M tokens"}
    with pytest.raises(ConfigError) as caught:
        step_sizes_of(train(batch_schedule=schedule))
    assert "only after the end of the run" in str(caught.value)
    assert "train.steps = 300" in str(caught.value)
    with pytest.raises(ConfigError, match="reaches 64 only after the end"):
        step_sizes_of(train(context_schedule=[(0, 8), (300, SEQ_LEN)]))
    step_sizes_of(train(context_schedule=[(0, 8), (299, SEQ_LEN)]))


def test_a_batch_that_does_not_divide_over_the_processes_is_named_by_its_step() -> None:
    doubling = train(batch_schedule={"type": "doubling", "start": 128, "every": 10})
    check_batches(doubling, MeshSizes(replicate=2))
    with pytest.raises(ConfigError, match=r"step 1, 2 sequences, .* among 4 processes") as caught:
        check_batches(doubling, MeshSizes(replicate=4))
    assert "multiples of 256 tokens" in str(caught.value)
    # The batches of steps that are done bind nobody.
    check_batches(doubling, MeshSizes(replicate=4), done=10)
    with pytest.raises(ConfigError, match="step 1, "):
        check_batches(doubling, MeshSizes(replicate=4), done=9)
    stages = [(0, 256), (8, 320), (20, FULL)]
    with pytest.raises(ConfigError, match=r"step 9, 5 sequences"):
        check_batches(
            train(batch_schedule={"type": "list", "stages": stages}), MeshSizes(replicate=4)
        )
