"""Training on all token folders below a folder, in real processes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.running import Dtt

from dtt.config.load import resolve
from dtt.data.samples.dataset import open_dataset
from dtt.track import jsonl

KINDS = ("train", "eval", "sample", "data")
STEPS = 8


@pytest.fixture(scope="module")
def folders(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three token folders by one tokenizer, two of them below `tokens`."""
    folder = tmp_path_factory.mktemp("folders")
    dtt = Dtt(folder)
    for name, count in (("tokens/web/a", 300), ("tokens/b", 120), ("apart", 200)):
        text = folder / f"{Path(name).name}.jsonl"
        texts = (" ".join(str(i * j + count) for j in range(5 + i % 40)) for i in range(count))
        text.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        given = ("tokenizer.type=file", f"tokenizer.path={tokens / 'tokenizer.json'}")
        dtt("download", "-d", text.name)
        dtt("tokenize", "-d", text.name, f"tokenize.out={name}", *given,
            "tokenize.validation_fraction=0.1")  # fmt: skip
    return folder


@pytest.fixture
def project(dtt: Dtt, folders: Path, monkeypatch: pytest.MonkeyPatch) -> Dtt:
    """A project with a copy of these folders."""
    monkeypatch.chdir(dtt.folder)
    for name in ("tokens", "apart"):
        shutil.copytree(folders / name, dtt.folder / name)
    return dtt


def settings(*more: str, steps: int = STEPS) -> list[str]:
    return [
        "data.mask_documents=true", "name=t", "model.dim=16", "model.n_layers=1",
        "model.n_heads=2", "train.precision=fp32", f"train.steps={steps}", "train.seq_len=32",
        "train.micro_batch=8", "train.global_batch_tokens=256", "train.eval_every=4",
        "train.eval_tokens=512", "train.log_every=2", "train.sample_tokens=0",
        "checkpoint.every=4", "schedule.warmup=2", *more,
    ]  # fmt: skip


def result(dtt: Dtt, *more: str) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Train; return the metrics, and the bytes of the last checkpoint."""
    shutil.rmtree(dtt.folder / "jobs", ignore_errors=True)
    dtt("train", *settings(*more))
    job = dtt.folder / "jobs/t"
    metrics = [r for r in jsonl.read(job / "metrics.jsonl") if r["kind"] in KINDS]
    last = sorted((job / f"checkpoints/step-{STEPS:06}").glob("*.safetensors"))
    assert last
    return metrics, {file.name: file.read_bytes() for file in last}


def samples(dtt: Dtt, *more: str) -> dict[str, int]:
    dataset = open_dataset(resolve(None, settings(*more)).config)
    shown = dtt("data", "mix", *settings(*more)).stdout
    assert all(f"\n  {source.name} " in f"\n{shown}" for source in dataset.sources)
    return {source.name: len(source) for source in dataset.sources}


def test_a_pattern_trains_as_its_folders_listed_by_hand(project: Dtt) -> None:
    alone = "data.sources=[{path: tokens/**}]"
    listed = "{path: tokens/b}, {path: tokens/web/a, name: web/a}"
    assert result(project, alone) == result(project, f"data.sources=[{listed}]")


def test_the_weight_of_a_pattern_is_split_in_proportion_to_the_sizes(project: Dtt) -> None:
    weighted = "data.sources=[{path: tokens/**, weight: 0.25}, {path: apart, weight: 0.75}]"
    later = "data.weights=[{step: 5, weights: {tokens/**: 2, apart: 2}}]"
    size = samples(project, weighted)
    a, b = size["web/a"], size["b"]
    assert a > 1.5 * b > 0
    by_hand = (
        f"data.sources=[{{path: tokens/b, weight: {b}}}, {{path: tokens/web/a, name: web/a, "
        f"weight: {a}}}, {{path: apart, weight: {3 * (a + b)}}}]"
    )
    then = f"data.weights=[{{step: 5, weights: {{b: {b}, web/a: {a}, apart: {a + b}}}}}]"
    assert result(project, weighted, later) == result(project, by_hand, then)
    data = json.loads((project.folder / "jobs/t/data.json").read_text())
    assert [source["name"] for source in data["sources"]] == ["b", "web/a", "apart"]


def test_another_set_of_folders_is_refused_on_resume_and_named(project: Dtt) -> None:
    pattern = "data.sources=[{path: tokens/**}]"
    project("train", *settings(pattern))
    resume = ["train", *settings(pattern, steps=12), "--allow-change=train.steps"]
    for name, why in (("c", "new: c"), ("web/a", "missing: web/a")):
        folder = project.folder / "tokens" / name
        moved = project.folder / "moved"
        if folder.exists():
            folder.rename(moved)
        else:
            shutil.copytree(project.folder / "apart", folder)
        refused = project(*resume, expect=2).stderr
        assert "have changed since" in refused
        assert why in refused
        if moved.exists():
            moved.rename(folder)
        else:
            shutil.rmtree(folder)
    assert "resumed from" in project(*resume).stderr


def test_every_command_that_lists_sources_lists_the_folders(project: Dtt) -> None:
    pattern = "data.sources=[{path: tokens/**}]"
    assert samples(project, pattern).keys() == {"b", "web/a"}
    # Their samples, of which 8 are a step, decide the length of a run of one epoch.
    steps = -(-sum(samples(project, pattern).values()) // 8)
    epoch = [s for s in settings(pattern) if not s.startswith("train.steps")]
    plan = project("plan", *epoch, "train.epochs=1").stdout
    assert f"{steps:,} steps of 256 tokens" in plan
    missing = project("train", "data.sources=[{path: none/**}]", expect=66).stderr
    assert "no token folders match none/**" in missing
