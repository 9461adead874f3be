"""`dtt ckpt`, --from-step and init.from: what is there, what differs, where to go on from."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.running import Dtt


@pytest.fixture(scope="module")
def trained(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of 12 steps with checkpoints of steps 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("trained")
    Dtt(folder)("train", f"data.tokens={tokens}", *SMALL, "name=t", "checkpoint.keep_last=3")
    return folder


SMALL = (
    "model.dim=16", "model.n_layers=2", "model.n_heads=2", "train.steps=12", "train.seq_len=32",
    "train.micro_batch=4", "train.global_batch_tokens=256", "train.eval_every=4",
    "train.sample_tokens=0", "checkpoint.every=4", "schedule.warmup=2",
)  # fmt: skip


@pytest.fixture
def dtt(trained: Path, tmp_path: Path) -> Dtt:
    """The command beside a copy of that job."""
    shutil.copytree(trained / "jobs", tmp_path / "jobs")
    return Dtt(tmp_path)


def checkpoints(dtt: Dtt) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(dtt("ckpt", "ls", "jobs/t", "--json").stdout)
    return found


def test_ls_lists_checkpoints_with_their_loss(dtt: Dtt) -> None:
    found = checkpoints(dtt)
    assert [c["name"] for c in found] == ["step-000004", "step-000008", "step-000012"]
    records = [json.loads(line) for line in (dtt.folder / "jobs/t/metrics.jsonl").open()]
    losses = {r["step"]: r["loss"] for r in records if r["kind"] == "eval"}
    assert [c["eval_loss"] for c in found] == [losses[4], losses[8], losses[12]]
    assert all(c["world_size"] == c["attempt"] == 1 and c["bytes"] > 1000 for c in found)
    table = dtt("ckpt", "ls", "jobs/t").stdout
    assert f"{losses[8]:.4f}" in table.splitlines()[2]


def test_verify_reports_damage_and_exits_with_65(dtt: Dtt) -> None:
    assert dtt("ckpt", "ls", "jobs/t", "--verify").stdout.count("verified") == 3
    os.truncate(dtt.folder / "jobs/t/checkpoints/step-000008/state-00000.safetensors", 100)
    reported = dtt("ckpt", "ls", "jobs/t", "--verify", expect=65)
    assert "state-00000.safetensors has 100 bytes" in reported.stdout
    assert "1 of 3 checkpoints" in reported.stderr
    dtt("ckpt", "ls", "jobs/t@12", "--verify")
    assert "there are: 4, 8, 12" in dtt("ckpt", "ls", "jobs/t@5", "--verify", expect=66).stderr


def test_prune_follows_the_rules_but_keeps_the_newest_verified_checkpoint(dtt: Dtt) -> None:
    (dtt.folder / "jobs/t/checkpoints/step-000012/MANIFEST.json").write_text("{}")
    stdout = dtt("ckpt", "prune", "jobs/t", "checkpoint.keep_last=1", "--dry-run").stdout
    assert stdout == "would delete  jobs/t/checkpoints/step-000004\n"
    assert len(checkpoints(dtt)) == 3
    dtt("ckpt", "prune", "jobs/t", "checkpoint.keep_last=1")
    left = checkpoints(dtt)
    assert [c["name"] for c in left] == ["step-000008", "step-000012"]
    assert left[1]["problem"]


@pytest.mark.slow
def test_from_step_renames_newer_checkpoints(dtt: Dtt) -> None:
    dtt("train", "jobs/t", "--from-step", 4, "train.steps=6", "--allow-change", "train.steps")
    names = [c["name"] for c in checkpoints(dtt)]
    assert names == [
        "step-000004", "step-000006", "superseded-step-000008-2", "superseded-step-000012-2",
    ]  # fmt: skip
    again = dtt("train", "jobs/t", "train.steps=8", "--allow-change", "train.steps")
    assert "resumed from jobs/t/checkpoints/step-000006" in again.stderr
    steps = [json.loads(line)["step"] for line in (dtt.folder / "jobs/t/metrics.jsonl").open()]
    assert max(steps) == 8
    dtt("ckpt", "prune", "jobs/t")
    assert not [c for c in checkpoints(dtt) if c["name"].startswith("superseded")]


def test_a_failed_from_step_supersedes_nothing(dtt: Dtt) -> None:
    manifest = dtt.folder / "jobs/t/config.yaml"
    shutil.copytree(tokens_of(manifest), dtt.folder / "other")
    record = dtt.folder / "other/manifest.json"
    text = record.read_text()
    key = json.loads(text)["key"]
    record.write_text(text.replace(key, "0" * len(key)))
    where = ("data.tokens=other", "--allow-change", "data.tokens")
    reported = dtt("train", "jobs/t", "--from-step", 4, *where, expect=2)
    assert "have changed since" in reported.stderr
    assert len(checkpoints(dtt)) == 3


def tokens_of(config: Path) -> Path:
    return Path(yaml.safe_load(config.read_text())["data"]["tokens"])


def test_a_missing_step_supersedes_nothing(dtt: Dtt) -> None:
    assert "there are: 4, 8, 12" in dtt("train", "jobs/t", "--from-step", 5, expect=66).stderr
    assert len(checkpoints(dtt)) == 3
