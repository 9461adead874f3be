"""Contract of the actions of a run, which a kill never repeats, and of its one configuration."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ranks import on_ranks
from support.running import Dtt, in_this_process

from dtt.config import load
from dtt.config.load import resolve
from dtt.config.run import RunConfig
from dtt.mesh.dist import World
from dtt.track import jsonl
from dtt.train.actions.action import StepAction, Stop
from dtt.train.actions.built_in import Log, Sample, SaveCheckpoint, Tasks, Validate
from dtt.train.objects import Run
from dtt.train.run import run as train
from dtt.train.state import Position

Done = list[tuple[int, str]]
"""Steps and the actions after them."""
BASE = resolve(None, []).config


class Killed(Exception):
    """The run ends without a trace, as by SIGKILL."""


def configured(
    log: int, validate: int, tasks: int, sample: int, save: int, *, timed: bool
) -> RunConfig:
    train = {"log_every": log, "eval_every": validate, "sample_every": sample}
    sections: dict[str, dict[str, Any]] = {
        "train": train | {"budget": "5m" if timed else None},
        "eval": {"every": tasks},
        "checkpoint": {"every": save},
    }
    updated = {name: getattr(BASE, name).model_copy(update=new) for name, new in sections.items()}
    return BASE.model_copy(update=updated)


CONFIGS = st.builds(
    configured,
    *[st.integers(0, 4)] * 4,
    st.integers(1, 4),
    timed=st.booleans(),
)


@dataclass
class Simulation:
    """A run whose actions do nothing, as the loop of `Trainer` holds them.

    It is killed after the actions of the numbers in `kills`; a stop request cuts short those in
    `cuts`. `done` lists the others without those that no checkpoint contains.
    """

    cfg: RunConfig
    steps: int
    kills: Collection[int] = ()
    cuts: Collection[int] = ()
    position: Position = field(default_factory=Position)
    count: int = 0
    done: Done = field(default_factory=list)
    saved: Any = None

    def work(self, name: str) -> list[Any] | None:
        self.count += 1
        if self.count in self.cuts and name in ("validate", "tasks"):
            return None
        self.done.append((self.position.step, name))
        if name == "save":
            self.saved = json.loads(json.dumps(self.position.to_json()))
        if self.count in self.kills:
            raise Killed
        return []

    def attempt(self) -> bool:
        """Run to the end (True) or until a stop request (False)."""
        run = cast("Run", self)
        actions = [
            Simulated(self.cfg, lambda: self.steps, of, self)
            for of in (Log, SaveCheckpoint, Validate, Tasks, Sample)
        ]
        while True:
            for action in actions:
                if action.due(self.position) and action.run(run, lambda: False) is None:
                    if self.position.done.get("save") != self.position.step:
                        actions[1].run(run, lambda: False)
                    return False
            if self.position.step == self.steps:
                return True
            self.position.step += 1

    def run(self) -> Done:
        """Start again until the end."""
        while True:
            with suppress(Killed):
                if self.attempt():
                    return self.done
            self.position = Position() if self.saved is None else Position.from_json(self.saved)
            # Of the step itself, metrics.jsonl keeps what was recorded after the save.
            step = self.position.step
            self.done = [] if self.saved is None else [d for d in self.done if d[0] <= step]
            self.position.done |= {name: step for at, name in self.done if at == step}


@dataclass(frozen=True)
class Simulated(StepAction):
    """An action with the rule of a real one."""

    real: type[StepAction]
    simulation: Simulation

    @property
    def name(self) -> str:
        return str(self.real.name)

    def rule(self, position: Position) -> bool:
        return self.real.rule(self, position)

    def work(self, run: Run, stop: Stop) -> list[Any] | None:
        return self.simulation.work(self.name)


def wanted(cfg: RunConfig, steps: int) -> Done:
    def multiples(interval: int) -> set[int]:
        return set(range(0, steps + 1, interval)) if interval else set()

    ends, last = {0, steps}, {steps}
    due = {
        "log": (multiples(cfg.train.log_every) | last) - {0},
        "save": (multiples(cfg.checkpoint.every) | last) - {0},
        "validate": multiples(cfg.train.eval_every) | ends,
        "tasks": multiples(cfg.eval.every) | (ends if cfg.train.timed else last),
        "sample": multiples(cfg.train.sample_every) | ends,
    }
    return [(step, name) for step in range(steps + 1) for name in due if step in due[name]]


@given(CONFIGS, st.integers(1, 9), *[st.lists(st.integers(1, 40), max_size=6)] * 2)
def test_every_action_runs_when_the_configuration_says_whatever_kills_and_stops_the_run(
    cfg: RunConfig, steps: int, kills: list[int], cuts: list[int]
) -> None:
    assert Simulation(cfg, steps).run() == wanted(cfg, steps)
    found = Simulation(cfg, steps, kills, cuts).run()
    # Saves at a stop request come on top, and a cut action runs after such a save.
    without_saves = [done for done in found if done[1] != "save"]
    assert without_saves == [done for done in wanted(cfg, steps) if done[1] != "save"]


def killed(_world: World, folder: str, arguments: list[str], count: int) -> None:
    """Train until so many actions have run, and die."""
    run, left = StepAction.run, [count]

    def counted(action: StepAction, *given: Any) -> Any:
        records = run(action, *given)
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return records

    StepAction.run = counted  # type: ignore[method-assign]
    os.chdir(folder)
    train(None, arguments, [], None)


@pytest.mark.slow
def test_a_run_killed_after_any_action_has_the_records_of_an_undisturbed_one(
    dtt: Dtt, tiny: Any, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "one", "a": "two", "b": "three"}\n')
    (tmp_path / "words.yaml").write_text(
        "type: multiple_choice\ndata: {file: rows.jsonl}\nprompt: '{text}'\n"
        "choices: ['{a}', '{b}']\ngold: 0\nchance: 0.5\n"
    )
    arguments = tiny(
        train__steps=2, train__log_every=1, train__eval_every=1, train__sample_every=1,
        eval__tasks=f"[{tmp_path / 'words.yaml'}]", eval__every=1,
        checkpoint__every=1, checkpoint__asynchronous=False,
    )  # fmt: skip
    dtt("train", *arguments, "name=whole")
    kills = 0
    for count in range(1, 9):
        try:
            on_ranks(1, killed, str(dtt.folder), arguments, count)
            break
        except EOFError:
            kills += 1
    assert kills >= 5
    dtt("train", *arguments)
    kinds = {"train", "eval", "task", "sample", "data"}
    found, whole = (
        [r for r in jsonl.read(dtt.folder / f"jobs/{name}/metrics.jsonl") if r["kind"] in kinds]
        for name in ("t", "whole")
    )
    assert found == whole


def test_a_command_validates_each_configuration_once(
    dtt: Dtt, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtt("train", *tiny(train__steps=2))
    validated = []
    monkeypatch.setattr(load, "validate", lambda *given: validated.append(0) or validate(*given))
    longer = ["train.steps=3"]
    for overrides, expected in (([], 1), (longer, 2), ([], 1)):
        validated.clear()
        load._stored.cache_clear()
        load._validated.cache_clear()
        with in_this_process(dtt.folder):
            train(None, ["jobs/t", *overrides], ["train.steps"] if overrides else [], None)
        assert len(validated) == expected


validate = load.validate
