"""A length has a unit and an amount: 1, a step, is not 1.0, the whole run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dtt.base.errors import ConfigError
from dtt.config import explain, sweep
from dtt.config.base import Length
from dtt.config.load import changes_on_resume, resolve
from dtt.config.optim import own_decays

KEYS = ("schedule.warmup", "schedule.decay", "train.batch_schedule.every")
BATCH = ["train.batch_schedule.type=doubling", "train.batch_schedule.start=1024"]


@pytest.mark.parametrize("key", KEYS)
def test_a_step_and_the_whole_run_are_a_change_on_resume(tmp_path: Path, key: str) -> None:
    step, whole, percent = (
        resolve(None, [*BATCH, f"{key}={text}"], env={}) for text in ("1", "1.0", "100%")
    )
    assert changes_on_resume(step.config, whole.config) == [key]
    assert step.config != whole.config
    assert changes_on_resume(whole.config, percent.config) == []
    for resolved in (step, whole, percent):
        (tmp_path / "run.yaml").write_text(explain.show(resolved))
        again = resolve(tmp_path / "run.yaml", env={}).config
        assert again == resolved.config
        assert json.dumps(again.model_dump(mode="json")) == json.dumps(
            resolved.config.model_dump(mode="json")
        )


def test_a_step_and_the_whole_run_are_two_decays_of_groups() -> None:
    groups = "[{match: embed, decay: 1}, {match: head, decay: 1.0}, {match: vector, decay: 100%}]"
    config = resolve(None, [f"optim.groups={groups}"], env={}).config
    assert own_decays(config.optim) == (Length(1), Length(1.0))


def test_a_start_of_the_batch_is_a_step_or_the_whole_run() -> None:
    for text, unit in (("1", "steps"), ("1.0", "share")):
        stages = f"train.batch_schedule={{type: list, stages: [[0, 4096], [{text}, 524288]]}}"
        (_, _), (start, _) = resolve(
            None, [stages, "train.global_batch_tokens=524288"], env={}
        ).config.train.batch_schedule.stages  # type: ignore[union-attr]
        assert start.unit == unit


def test_a_sweep_tells_a_step_from_the_whole_run(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("parameters: {schedule.warmup: [1, 1.0]}\n")
    found = sweep.combinations(sweep.read(tmp_path / "a.yaml").sweep)
    assert [str(values["schedule.warmup"]) for values in found] == ["1", "1.0"]


@pytest.mark.parametrize("text", ["-1", "1.5", "true", "5 steps", "101%", "9" * 30, "1e-40"])
def test_what_is_no_length_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"schedule\.warmup"):
        resolve(None, [f"schedule.warmup={text}"], env={})
