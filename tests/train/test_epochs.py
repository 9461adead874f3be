"""`train.epochs`: the number of steps follows from the data, and every command knows it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.running import Dtt

from dtt.base.errors import ConfigError
from dtt.config.load import load_job
from dtt.config.load import resolve as load
from dtt.config.train import TrainConfig
from dtt.data.samples.dataset import open_dataset
from dtt.data.samples.step_sizes import step_sizes_of, steps_of_epochs
from dtt.track import jsonl

SCHEDULES: list[dict[str, Any]] = [
    {"type": "constant"},
    {"type": "doubling", "start": 64, "every": "20%"},
    {"type": "doubling", "start": 64, "every": 2},
    {"type": "list", "stages": [[0, 128], ["300 tokens", 512]]},
]


def section(**keys: Any) -> TrainConfig:
    sizes = {"seq_len": 64, "global_batch_tokens": 512, "steps": 0}
    return TrainConfig.model_validate_json(json.dumps(sizes | keys))


@settings(max_examples=100)
@given(
    schedule=st.sampled_from(SCHEDULES),
    samples=st.integers(100, 3000),
    hundredths=st.integers(50, 400),
)
def test_the_last_step_is_the_one_that_completes_the_epochs(
    schedule: dict[str, Any], samples: int, hundredths: int
) -> None:
    train = section(batch_schedule=schedule, epochs=hundredths / 100)
    steps = steps_of_epochs(train, samples)
    sizes = step_sizes_of(train.model_copy(update={"steps": steps}))
    total = math.ceil(hundredths * samples / 100)
    assert sizes.first_sample(steps - 1) < total <= sizes.first_sample(steps)


def test_a_schedule_that_starts_after_the_epochs_is_refused() -> None:
    late = section(epochs=1.0, batch_schedule={"type": "list", "stages": [[0, 64], [90, 512]]})
    assert steps_of_epochs(late, 100) == 92
    with pytest.raises(ConfigError, match="only after the end of the run"):
        steps_of_epochs(late, 50)


def length(*layers: str) -> tuple[int, float | None]:
    """The length of a run that a file (YAML) and then arguments describe."""
    file, *arguments = layers
    path = Path("run.yaml")
    path.write_text(f"train: {file}\n")
    train = load(path, arguments, env={}).config.train
    return train.steps, train.epochs


def test_the_last_one_given_of_steps_and_epochs_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert length("{}") == (1000, None)
    assert length("{epochs: 2}") == (0, 2.0)
    assert length("{steps: 50}", "train.epochs=2") == (0, 2.0)
    assert length("{epochs: 2}", "train.steps=50") == (50, None)
    assert length("{epochs: 2}", "train.epochs=3") == (0, 3.0)
    assert length("{steps: 40, epochs: 2}", "train.epochs=2") == (40, 2.0)
    with pytest.raises(ConfigError, match="greater than 0"):
        length("{steps: 0}")


@pytest.mark.slow
def test_a_run_lasts_its_epochs_and_a_resume_keeps_them(
    dtt: Dtt, tiny: Callable[..., list[str]]
) -> None:
    arguments = [a for a in tiny(train__seq_len=256, train__global_batch_tokens=1024) if
                 not a.startswith("train.steps")]  # fmt: skip
    samples = len(open_dataset(load(None, arguments).config).sources[0])
    steps = math.ceil(1.5 * samples / 4)
    assert samples > 8
    planned = json.loads(dtt("plan", *arguments, "train.epochs=1.5", "--json").stdout)
    assert planned["steps"] == steps
    assert f"{steps} steps of " in dtt("data", "mix", *arguments, "train.epochs=1.5").stdout
    dry = dtt("submit", "train", *arguments, "train.epochs=1.5", "--dry-run").stdout
    assert f"{steps} steps of 1024 tokens" in dry
    dtt("train", *arguments, "train.epochs=1.5")
    job = dtt.folder / "jobs/t"
    stored = load_job(job).train
    assert (stored.steps, stored.epochs) == (steps, 1.5)
    assert "# train.epochs=1.5" in (job / "config.yaml").read_text()
    records = [r for r in jsonl.read(job / "metrics.jsonl") if r["kind"] == "train"]
    assert records[-1]["step"] == steps
    assert json.loads(dtt("job", "status", "jobs/t", "--json").stdout)["steps"] == steps
    assert "is done" in dtt("train", *arguments, "train.epochs=1.5").stderr
    assert "is done" in dtt("train", "jobs/t").stderr
    refused = dtt("train", "jobs/t", "train.epochs=3", expect=2).stderr
    assert "different values of: train.epochs" in refused
    assert "train.steps" not in refused
    dtt("train", "jobs/t", "train.epochs=3", "--allow-change", "train.epochs")
    assert load_job(job).train.steps == math.ceil(3 * samples / 4)
    # `dtt pipeline` proposes this command; it replaces the epochs.
    dtt("train", "jobs/t", f"train.steps={3 * samples}", "--allow-change", "train.steps")
    assert (load_job(job).train.steps, load_job(job).train.epochs) == (3 * samples, None)


def test_steps_and_epochs_that_contradict_each_other_are_refused(
    dtt: Dtt, tiny: Callable[..., list[str]]
) -> None:
    stderr = dtt("train", *tiny(train__steps=7, train__epochs=2), expect=2).stderr
    assert "train.steps=7 contradicts train.epochs=2" in stderr
    assert "leave out one of them" in stderr
    assert not (dtt.folder / "jobs").exists()
