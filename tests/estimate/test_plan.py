"""`dtt plan`: one screen, and the same as JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.running import Dtt

from dtt.artifacts.manifests import TokensManifest
from dtt.base.errors import ConfigError
from dtt.config.load import resolve
from dtt.estimate import gpus, plan
from dtt.jobs.clock import in_words

RUN = (
    "model.dim=64", "model.n_layers=2", "model.n_heads=2", "train.seq_len=64",
    "train.global_batch_tokens=4096", "train.micro_batch=8", "train.steps=100",
)  # fmt: skip


def planned(
    capsys: pytest.CaptureFixture[str],
    *arguments: str,
    gpu: str = "H100",
    nodes: int = 1,
    gpus_per_node: int = 8,
    price: float | None = None,
) -> tuple[dict[str, object], str]:
    """The JSON, and the screen."""
    devices = (f"launch.nodes={nodes}", f"launch.gpus_per_node={gpus_per_node}")
    cfg = resolve(None, [*RUN, *devices, *arguments]).config
    said = []
    for as_json in (True, False):
        plan.run(cfg, gpu, price, as_json=as_json)
        said.append(capsys.readouterr().out)
    return json.loads(said[0]), said[1]


def test_without_data_the_plan_uses_the_configuration(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    facts, screen = planned(capsys, "tokenizer.vocab_size=1000", price=2.5)
    assert facts["parameters_embedding_and_head"] == 2 * 1024 * 64
    assert facts["tokens"] == 100 * 4096
    assert facts["mesh"] == {"pipeline": 1, "replicate": 8, "shard": 1, "context": 1, "tensor": 1}
    assert facts["fits"] is True
    assert facts["memory_peak"] == sum(facts["memory"].values())  # type: ignore[attr-defined]
    assert facts["cost"] == pytest.approx(2.5 * 8 * facts["seconds"] / 3600)  # type: ignore[operator]
    assert "  fits\n" in screen
    assert max(map(len, screen.splitlines())) <= 100
    assert len(screen.splitlines()) <= 40


def test_the_plan_of_a_pipeline_has_a_line_for_each_rank(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = ("tokenizer.vocab_size=50000", "model.n_layers=8", "parallel.pipeline=2")
    facts, screen = planned(capsys, *keys)
    ranks: list[dict[str, int]] = facts["pipeline_ranks"]  # type: ignore[assignment]
    assert [rank["layers"] for rank in ranks] == [4, 4]
    assert max(rank["peak"] for rank in ranks) == facts["memory_peak"]
    assert "\n0          4       2 " in screen
    assert max(map(len, screen.splitlines())) <= 100


def test_a_plan_needs_only_a_dataset_name(dtt: Dtt) -> None:
    plan = dtt("plan", "-d", "tinystories", "--gpu", "H100", "launch.gpus_per_node=8", "--json")
    assert json.loads(plan.stdout)["parameters"] > 0
    assert "plan requires a config" in dtt("plan", "--gpu", "H100", expect=2).stderr


def test_the_plan_uses_the_sizes_of_token_files(
    capsys: pytest.CaptureFixture[str], tokens: Path
) -> None:
    facts, _ = planned(
        capsys, f"data.tokens={tokens}", "data.on_exhausted=stop", "train.steps=1000000"
    )
    windows = (TokensManifest.read(tokens).counts("train").tokens - 1) // 64
    assert facts["steps"] == windows // 64


def test_a_plan_that_does_not_fit_names_what_takes_less(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    many = ("train.seq_len=8192", "train.global_batch_tokens=8388608", "train.micro_batch=128")
    facts, screen = planned(capsys, "model.dim=1024", "model.n_layers=12", *many)
    assert facts["fits"] is False
    assert "less memory, the cheapest first: a smaller train.micro_batch" in screen
    fewer = (*many[:2], "train.micro_batch=8", "train.remat=full")
    assert planned(capsys, "model.dim=1024", "model.n_layers=12", *fewer)[0]["fits"]


@pytest.mark.parametrize(
    ("gpu", "precision", "fits"),
    [("H200", "bf16", True), ("H100", "bf16", False), ("H100", "bf16-pure", True)],
)
def test_llama_3_8b_with_fp32_masters_takes_128_gb_of_state(
    gpu: str, precision: str, fits: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = [
        "optim.type=adamw", "train.seq_len=4096", "train.micro_batch=1", "train.remat=full",
        "train.global_batch_tokens=4096", f"train.precision={precision}",
    ]  # fmt: skip
    cfg = resolve("models/llama3-8b", alone).config
    plan.run(cfg, gpu, None, as_json=True)
    facts = json.loads(capsys.readouterr().out)
    plan.run(cfg, gpu, None, as_json=False)
    screen = capsys.readouterr().out
    assert facts["fits"] == fits
    assert ("does not fit" in screen) != fits
    if precision == "bf16":
        parts = [facts["memory"][part] for part in ("parameters", "optimizer state", "gradients")]
        assert sum(parts) == 16 * facts["parameters"]
        assert sum(parts) / 1e9 == pytest.approx(128.5, abs=0.1)
        for part in ("parameters", "optimizer state", "gradients"):
            assert f"{part:<28}{facts['memory'][part] / 2**30:>10.2f}" in screen


def test_the_report_names_the_measured_speed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    facts, screen = planned(capsys)
    assert facts["achieved"] == 0.72
    assert "assumed: 72.0% of 989 TFLOP/s, measured by\n  dtt on one H200" in screen
    assert facts["achieved_source"] in screen
    assert "72.0%" not in planned(capsys, "train.compile=false")[1]
    facts, screen = planned(capsys, gpu="cpu", gpus_per_node=1)
    assert facts["achieved_source"] is None
    assert "TFLOP/s, a guess" in screen


@pytest.mark.parametrize(
    ("said", "gpu"),
    [
        ("NVIDIA RTX A6000", "RTX A6000"), ("NVIDIA L4", "L4"), ("NVIDIA L40", "L40"),
        ("NVIDIA L40S", "L40S"), ("Tesla T4", "T4"), ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"), ("NVIDIA A100 80GB PCIe", "A100-80"),
        ("NVIDIA A10", "A10"), ("NVIDIA H100 80GB HBM3", "H100"), ("AMD Instinct MI300X", "MI300X"),
        ("a100", "A100-80"), ("rtx4090", "RTX 4090"), ("4090", "RTX 4090"), ("h100_80gb", "H100"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"), ("a6000", "RTX A6000"), ("T4000", None),
        ("", None), ("Tesla V100-SXM2-16GB", None), ("gpu", None),
    ],
)  # fmt: skip
def test_a_card_is_known_by_the_names_of_users_drivers_and_clusters(
    said: str, gpu: str | None
) -> None:
    assert gpus.known_name(said) == gpu


@pytest.mark.parametrize(
    ("keys", "gpu"),
    [
        (["launch.gpus_per_node=8"], None),
        (["launch.gpus_per_node=some:8"], None),
        (["train.device=cuda"], None),
        (["launch.gpus_per_node=a100:8"], "A100-80"),
    ],
)
def test_gpus_of_another_machine_are_named_or_compared(
    keys: list[str], gpu: str | None, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    cfg = resolve(None, [*RUN, "tokenizer.vocab_size=1000", *keys], env={}).config
    found = gpus.for_run(cfg, None)
    assert (found and found.name) == gpu
    if gpu is None:
        plan.run(cfg, None, None, as_json=False)
        screen = capsys.readouterr().out
        assert all(f"\n{name} " in screen for name in gpus.GPUS)
        assert "--gpu NAME" in screen
        with pytest.raises(ConfigError, match="plan needs a GPU"):
            plan.run_stages([cfg], None, None, as_json=False)


def test_a_time_budget_bounds_time_steps_and_tokens(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    many = ("tokenizer.vocab_size=1000", "train.steps=40000000000", "schedule.warmup=1")
    whole, screen = planned(capsys, *many)
    assert re.search(r"\ntime +≈ \d+ d \d+ h to \d+ d \d+ h\n", screen)
    assert in_words(118_157 * 3600) == "13.5 years"
    facts, screen = planned(capsys, *many, "train.budget=10m")
    assert facts["seconds"] == pytest.approx(600, rel=0.01)
    assert facts["tokens"] == facts["steps"] * 4096 < whole["tokens"]  # type: ignore[operator]
    assert "train.budget is 10m, train.steps at most 40,000,000,000" in screen
    assert planned(capsys, "train.budget=10m", "schedule.warmup=1")[0]["steps"] == 100
