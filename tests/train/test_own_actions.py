"""Actions of a user's own: when they run, what they see and record, and how a job resumes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from support import resumed
from support.forked_runs import run
from support.own_classes import NORMS
from support.running import ROOT, Dtt

from dtt.base.errors import ExitCode
from dtt.report.metrics_history import MetricsHistory
from dtt.track.base import scalars

ACTIONS = "actions: [{type: mine.py:Norms}, {type: mine.py:Norms, name: each, every: 1}]\n"


def own(dtt: Dtt, code: str = NORMS, actions: str = ACTIONS) -> tuple[str, ...]:
    (dtt.folder / "mine.py").write_text(code)
    (dtt.folder / "run.yaml").write_text(actions)
    return "-c", "run.yaml", *resumed.SETTINGS


def recorded(dtt: Dtt, name: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (dtt.folder / "jobs/t/metrics.jsonl").read_text().splitlines())
    found = [record for record in lines if record["kind"] == f"own/{name}"]
    return [{key: value for key, value in one.items() if key != "time"} for one in found]


def test_numbers_are_those_of_whole_tensors_in_every_layout(dtt: Dtt) -> None:
    started = *own(dtt), "model.dropout=0.0"
    run(dtt, "train", *started, "parallel.shard=2", ranks=2)
    sharded = recorded(dtt, "Norms")
    run(dtt, "train", *started, "name=u", ranks=1)
    (dtt.folder / "jobs/t").rename(dtt.folder / "jobs/sharded")
    (dtt.folder / "jobs/u").rename(dtt.folder / "jobs/t")
    alone = recorded(dtt, "Norms")
    assert [one["step"] for one in sharded] == [2, 4]
    for one, other in zip(sharded, alone, strict=True):
        assert one["norm"] == pytest.approx(other["norm"], rel=1e-5)
        assert (one["rank"], other["rank"]) == (0.5, 0.0)


def test_a_resume_repeats_no_action_and_changes_no_number(dtt: Dtt) -> None:
    started = own(dtt)
    dtt("train", *started)
    whole = {name: recorded(dtt, name) for name in ("Norms", "each")}
    assert [one["seen"] for one in whole["each"]] == [1, 2, 3, 4]
    # The checkpoint of step 2 was saved before the actions of step 2.
    for step in (4, 3):
        folder = dtt.folder / f"jobs/t/checkpoints/step-{step:06d}"
        if folder.exists():
            folder.rename(dtt.folder / folder.name)
    dtt("train", "jobs/t")
    assert {name: recorded(dtt, name) for name in whole} == whole


CUT = NORMS.replace(
    "        self._seen += 1\n",
    """        self._seen += 1
        if run.step == 2 and not (run.path / "asked").exists():
            (run.path / "asked").touch()
            (run.path / "control/stop").touch()
            while not run.stop_wanted():
                pass
            return None
""",
)


def test_an_action_that_a_stop_request_cuts_short_runs_again_from_its_state(dtt: Dtt) -> None:
    started = own(dtt, CUT, "actions: [{type: mine.py:Norms, every: 1}]\n")
    dtt("train", *started, expect=ExitCode.PREEMPTED)
    assert [one["seen"] for one in recorded(dtt, "Norms")] == [1]
    dtt("train", "jobs/t")
    assert [one["seen"] for one in recorded(dtt, "Norms")] == [1, 2, 3, 4]


def test_its_numbers_are_curves_of_every_tracker(dtt: Dtt) -> None:
    dtt("train", *own(dtt))
    [record, *_] = recorded(dtt, "Norms")
    assert {name for name, _ in scalars(record)} >= {"own/Norms/norm", "own/Norms/seen"}
    series = MetricsHistory.read(dtt.folder / "jobs/t/metrics.jsonl").series
    assert [*series["own/each/seen"].steps] == [1, 2, 3, 4]
    assert "own/Norms/norm" in (dtt.folder / "jobs/t/report.html").read_text()


STOPPING = f"""
actions: [{{type: {ROOT}/examples/early_stopping.py:EarlyStopping, every: 1, patience: 2}}]
optim: {{lr: 1e-30, adamw: {{lr: 1e-30}}}}
train: {{steps: 9}}
"""


@pytest.mark.parametrize("every", [1, 100])
def test_a_run_that_an_action_ends_is_complete(dtt: Dtt, tokens: Path, every: int) -> None:
    """It is evaluated, saved and done; a resume, with and without the action, knows that."""
    (dtt.folder / "run.yaml").write_text(STOPPING)
    others = ("train.steps", "train.eval", "data.")
    keys = [key for key in resumed.SETTINGS if not key.startswith(others)]
    keys += [
        f"data.tokens={tokens}",
        f"checkpoint.every={every}",
        "train.eval_every=1",
        "train.eval_tokens=60",
    ]
    started = ("-c", "run.yaml", *keys, "train.sample_tokens=8", "train.sample_every=0")
    done = dtt("train", *started)
    assert "EarlyStopping ends the run after step 3" in done.stderr
    lines = (dtt.folder / "jobs/t/metrics.jsonl").read_text().splitlines()
    kinds = [(r["kind"], r["step"]) for r in map(json.loads, lines)]
    assert {("eval", 3), ("sample", 3)} <= {*kinds}
    assert (dtt.folder / "jobs/t/checkpoints/step-000003").is_dir()
    again = dtt("train", "jobs/t")
    assert "step 4" not in again.stderr
    assert recorded(dtt, "EarlyStopping")[-1]["step"] == 3
    dtt("train", "jobs/t", "actions=[]")
    assert (dtt.folder / "jobs/t/checkpoints/step-000009").is_dir()


KILLED_ONCE = """
import os, signal
from pathlib import Path
import dtt

class Killed(dtt.Action):
    every: int = 1

    def run(self, run):
        if run.step == 4 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"seen": run.step}
"""


def test_what_a_kill_after_the_last_step_cut_off_is_done_by_the_next_attempt(dtt: Dtt) -> None:
    """The checkpoint of the last step is complete by then, but the run is not."""
    started = *own(dtt, KILLED_ONCE, "actions: [{type: mine.py:Killed}]\n"), "train.sample_every=2"
    sampled = *started, "train.sample_tokens=4"
    dtt("train", *sampled, expect=-signal.SIGKILL)
    metrics = dtt.folder / "jobs/t/metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    assert [one["step"] for one in recorded(dtt, "Killed")] == [1, 2, 3]
    # As if the kill had come before the sample, of which no checkpoint has a trace either.
    cut = [line for line in lines if '"kind": "sample", "step": 4' not in line]
    assert len(cut) == len(lines) - 1
    metrics.write_text("".join(cut))
    dtt("train", "jobs/t")
    assert [one["step"] for one in recorded(dtt, "Killed")] == [1, 2, 3, 4]
    assert ("sample", 4) in [(r["kind"], r["step"]) for r in map(json.loads, metrics.open())]
    assert "jobs/t is done" in dtt("train", "jobs/t").stderr


def test_actions_may_change_on_a_resume(dtt: Dtt) -> None:
    dtt("train", *resumed.SETTINGS, "train.steps=2")
    dtt("train", *own(dtt), "train.steps=4", "--allow-change", "train.steps")
    assert [one["step"] for one in recorded(dtt, "each")] == [2, 3, 4]
    assert (dtt.folder / "jobs/t/own_code/mine.py").read_text() == NORMS


NOISE = f"actions: [{{type: {ROOT}/examples/gradient_noise.py:GradientNoise, every: 1}}]\n"


def test_the_gradient_noise_is_that_of_the_same_batches_in_every_layout(dtt: Dtt) -> None:
    """And measuring it changes nothing of what is trained."""
    (dtt.folder / "run.yaml").write_text(NOISE)
    # The micro-batches of all ranks together are the same 20 rows.
    keys = (
        *resumed.SETTINGS, resumed.FOR_MORE_RANKS, "model.dropout=0.0", "train.micro_batch=10",
    )  # fmt: skip
    found, hashes = [], []
    for layout in (("parallel.shard=2", "name=t"), ("train.micro_batch=20", "name=t")):
        run(dtt, "train", "-c", "run.yaml", *keys, *layout, ranks=2 if "shard" in layout[0] else 1)
        found.append(recorded(dtt, "GradientNoise"))
        hashes.append([*weights(dtt)])
        (dtt.folder / "jobs/t").rename(dtt.folder / f"jobs/{len(found)}")
    run(dtt, "train", *keys, "train.micro_batch=20", "name=t", ranks=1)
    assert [*weights(dtt)] == hashes[1]
    assert [one["step"] for one in found[0]] == [1, 2, 3, 4]
    for one, other in zip(*found, strict=True):
        assert one["noise"] == pytest.approx(other["noise"], rel=1e-3)
        assert one["signal"] == pytest.approx(other["signal"], rel=1e-2)
        assert one["noise"] > 0


def weights(dtt: Dtt) -> list[bytes]:
    folder = dtt.folder / "jobs/t/checkpoints/step-000004"
    return [path.read_bytes() for path in sorted(folder.glob("model*.safetensors"))]
