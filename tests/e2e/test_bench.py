"""`dtt bench`: from a Hub to a row of the table, as real processes on small files."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.loopback_hub import LoopbackHub
from support.published_files import VOCAB_SIZE, learnable, publish, random
from support.running import Dtt

from dtt.artifacts.jobdir import JobDir

TINY = (
    "model.dim=32", "model.n_layers=1", "model.n_heads=2", "model.n_kv_heads=2",
    "model.head_dim=16", "model.ffn_dim=64", f"model.vocab_size={VOCAB_SIZE}", "train.seq_len=32",
    "train.global_batch_tokens=256", "train.micro_batch=8", "train.eval_every=10",
    "train.log_every=5", "train.eval_tokens=256", "train.precision=fp32", "train.compile=false",
    "train.device=cpu", "schedule.warmup=0", "optim.lr=0.02", "optim.adamw.lr=0.02",
)  # fmt: skip
FILES = 25
"""Number of files that the recipe fineweb-3.28 names."""


class Benches:
    """`dtt bench fineweb-3.28` with a tiny model, in one folder with one Hub."""

    def __init__(self, dtt: Dtt, hub: LoopbackHub) -> None:
        self.dtt, self.hub = dtt, hub
        self.env = {
            "HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(dtt.folder / "hf"), "HF_TOKEN": "", "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def publish(self, ids: list[np.ndarray]) -> None:
        publish(self.hub, self.dtt.folder, ids)

    def command(self, *more: str) -> tuple[str, ...]:
        return ("bench", "fineweb-3.28", *TINY, *more)

    def results(self) -> list[dict[str, Any]]:
        paths = sorted(self.dtt.folder.glob("jobs/bench/fineweb-3.28/*/bench.json"))
        return [json.loads(path.read_text()) for path in paths]


@pytest.fixture
def benches(dtt: Dtt) -> Iterator[Benches]:
    with LoopbackHub() as hub:
        yield Benches(dtt, hub)


def records(job: Path, kind: str) -> list[dict[str, Any]]:
    lines = (job / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


@pytest.mark.slow
def test_runs_stop_at_the_target_and_are_scored_there(benches: Benches) -> None:
    benches.publish([learnable(600), *[learnable(2000)] * (FILES - 1)])
    dtt = benches.dtt
    done = dtt(*benches.command("train.steps=1000000", "--runs", "2"), **benches.env)
    [result] = benches.results()
    assert (result["recipe"], result["official"], result["resumed"]) == (
        "fineweb-3.28", False, False
    )  # fmt: skip
    assert result["remarks"][0] == "not an official record"
    assert [run["seed"] for run in result["runs"]] == [0, 1]
    for run in result["runs"]:
        job = dtt.folder / run["job"]
        evaluations = {r["step"]: r["loss"] for r in records(job, "eval")}
        first = next(step for step, loss in evaluations.items() if loss <= 3.28)
        assert (run["reached"], run["step"], run["value"]) == (True, first, evaluations[first])
        assert run["tokens"] == 256 * first
        assert run["seconds"] > 0
        ending = JobDir(job).exit_record(1)
        assert ending is not None
        assert ending["code"] == 75
        assert ending["asked_by"] == "dtt bench: loss 3.28 is reached"
        assert first <= ending["step"] < 1_000_000
    values = [run["value"] for run in result["runs"]]
    test = result["target_test"]
    assert test["statistic"] == pytest.approx((3.28 - sum(values) / 2) * 2**0.5)
    assert test["significant"] == (test["statistic"] >= 0.004)
    assert [len(result["data"]["files"]), result["data"]["source"]] == [26, "kjj0/fineweb10B-gpt2"]
    for words in ("to loss 3.28", "llm.c", "45 min", "changed", "not an official record"):
        assert words in done.stdout
    assert "seed-1" in dtt("job", "ls").stdout
    assert "fineweb-3.28" in dtt("bench").stdout


@pytest.mark.slow
def test_a_bench_that_was_interrupted_continues_and_says_that_the_target_was_missed(
    benches: Benches,
) -> None:
    benches.publish([random(600, 0), *[random(2000, 1)] * (FILES - 1)])
    dtt = benches.dtt
    command = benches.command("train.steps=1500", "--runs", "1")
    process = dtt.start(*command, **benches.env)
    found: list[Path] = []
    while not found or not records(found[0].parent, "train"):
        assert process.poll() is None, dtt.wait(process).stderr
        time.sleep(0.05)
        found = list(dtt.folder.glob("jobs/bench/fineweb-3.28/*/seed-0/metrics.jsonl"))
    process.send_signal(signal.SIGINT)
    stopped = dtt.wait(process)
    assert stopped.returncode == 75
    assert "the bench stopped in train" in stopped.stderr
    assert not benches.results()
    other = dtt("bench", "fineweb-3.28", "train.steps=many", expect=2, **benches.env)
    assert "train.steps" in other.stderr

    done = dtt(*command, **benches.env)
    assert "0 of 1 runs are done" in done.stderr
    [result] = benches.results()
    [run] = result["runs"]
    assert (run["reached"], run["step"], run["attempts"]) == (False, 1500, 2)
    assert run["best"] > 5
    assert result["resumed"] is True
    assert result["target_test"]["significant"] is None
    for words in ("target not reached by 1 of 1 runs, best 5.", "one run: no", "resumed"):
        assert words in done.stdout

    file = dtt.folder / "data/bench/fineweb-3.28/fineweb_train_000003.bin"
    file.write_bytes(file.read_bytes()[:-2] + b"\0\1")
    damaged = dtt(*command, expect=65, **benches.env).stderr
    for words in (
        str(file.relative_to(dtt.folder)),
        "sha256",
        f"rm {file.relative_to(dtt.folder)}",
    ):
        assert words in damaged


@pytest.mark.slow
def test_the_laptop_recipe_needs_no_network(dtt: Dtt) -> None:
    small = (
        "model.dim=32", "model.n_layers=1", "model.n_heads=2", "schedule.warmup=0",
        "train.budget=9s", "train.eval_tokens=2048", "train.global_batch_tokens=512",
        "train.micro_batch=2",
    )  # fmt: skip
    done = dtt("bench", "laptop", *small, "--runs", "1", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    [path] = dtt.folder.glob("jobs/bench/laptop/*/bench.json")
    result = json.loads(path.read_text())
    [run] = result["runs"]
    assert 0 < run["value"] < 8
    assert run["reached"] is None
    assert result["target_test"] is None
    assert result["data"]["source"] == "python-stdlib"
    assert result["changed"]["train.budget"] == "9s"
    assert len(result["data"]["files"][0]["sha256"]) == 64
    for words in ("one run: no significance is claimed", "changed", "bits per byte"):
        assert words in done.stdout
    assert "1 of 3 runs" in done.stdout
