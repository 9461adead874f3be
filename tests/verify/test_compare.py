"""`dtt verify` finds planted faults by the check of their kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import verify_faults
from support.running import Dtt
from support.verify_faults import FAULTS, faulty_runs

from dtt.base.errors import ConfigError, EnvironmentUnfit, ExitCode
from dtt.config.load import resolve
from dtt.config.run import RunConfig
from dtt.verify import run
from dtt.verify.differences import EXACT
from dtt.verify.layout_runs import MARGIN, CannotRun, LayoutRuns, tolerances
from dtt.verify.layouts import layouts_of
from dtt.verify.shrink import shrink


def config(keys: str) -> RunConfig:
    return resolve(None, keys.split(), env={}).config


QUICK = (
    "gradient not averaged", "mean per micro-batch", "norm of the local shard",
    "ranks read the same", "decay of norms", "skipped on one rank",
)  # fmt: skip
"""Faults for each check; nightly_faults.py has all."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n != QUICK[0] else []) for n in QUICK]
)
def test_a_fault_is_found_by_the_check_of_its_kind(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    letters = "DLGNURS" if "S" in fault.checks else "DLGNUR"
    cfg = config(fault.keys)
    case = faulty_runs(name, tmp_path / "case", cfg, letters)
    result = run.verify(name, cfg, case, parts=False)
    assert result.failed is not None
    difference = result.found[result.failed].difference
    assert difference is not None
    assert difference.check in fault.checks
    error = run.explain(result, tmp_path)
    assert error.exit_code == 1
    assert f"{result.failed.name}: check {difference.check}: " in str(error)
    assert f"dtt verify -c {tmp_path}/differs.yaml repeats it" in str(error)
    again = resolve(tmp_path / "differs.yaml", (), env={}).config
    assert layouts_of(again) == layouts_of(result.cfg)
    assert again.data == result.cfg.data


def test_a_run_that_dtt_refuses_is_no_difference(tmp_path: Path) -> None:
    cfg = config("model.n_heads=3 model.dim=192 parallel.tensor=2 parallel.replicate=1")
    case = LayoutRuns(tmp_path / "case", shrink(cfg))
    case.prepare()
    with pytest.raises(CannotRun, match="dtt refuses to train with tensor 2"):
        case.check(layouts_of(cfg)[0])


@pytest.mark.slow
def test_in_bf16_the_tolerance_is_that_of_another_order_of_sums(tmp_path: Path) -> None:
    cfg = config("parallel.shard=2 parallel.replicate=1 train.precision=bf16 train.device=cpu")
    case = LayoutRuns(tmp_path / "case", shrink(cfg, exact=False), exact=False)
    case.prepare()
    checked = case.check(layouts_of(cfg)[0])
    assert checked.difference is None
    assert 1e-6 < checked.noise["G"] < case.reference.tolerances["G"] < 10


@pytest.mark.slow
def test_a_clean_run_is_verified(dtt: Dtt) -> None:
    done = dtt("verify", "-c", "quickstart", "parallel.replicate=1")
    assert "verified: 1 layout, 8 checks" in done.stdout
    assert "not covered: kernels of a GPU" in done.stdout
    assert not list(dtt.folder.iterdir())


RIGHT = {
    "tensor 2 with expert 2": "parallel.tensor=2 parallel.replicate=1 parallel.expert=2 "
    "model.family=dots1 model.n_experts=8 model.n_expert_groups=4 model.expert_groups_per_token=2 "
    "optim.type=muon train.remat=selective",
    "shard 2 x tensor 2": "parallel.shard=2 parallel.tensor=2 parallel.replicate=1 "
    "model.family=gemma3 train.remat=selective optim.normuon_beta2=0.95 "
    f"{verify_faults.DOCUMENTS}",
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", RIGHT)
def test_ranks_compute_what_one_process_does(layout: str, tmp_path: Path) -> None:
    cfg = config(RIGHT[layout])
    case = LayoutRuns(tmp_path / "case", shrink(cfg), "DLGNUR")
    result = run.verify("run", cfg, case, parts=False)
    assert [found.name for found in result.found] == [layout]
    assert result.failed is None


def test_mistakes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device, error in (("tpu", "no such device"), ("cuda", "no GPU")):
        with pytest.raises((ConfigError, EnvironmentUnfit), match=error):
            run.run([("run", RunConfig())], device, as_json=False)
    assert run.missing_configuration().exit_code == ExitCode.USAGE


def test_two_equal_runs_leave_the_last_bit_to_rounding() -> None:
    found = tolerances({"L": 0.0, "G": 1e-7, "U": 2e-7})
    assert found["L"] == EXACT["L"]
    assert found["N"] == EXACT["N"]
    assert found["G"] == MARGIN * 1e-7
    assert found["S"] == found["U"] == MARGIN * 2e-7


@pytest.mark.slow
def test_a_model_that_differs_from_itself_is_compared_with_no_layout(dtt: Dtt) -> None:
    """The tolerances of two runs with dropout would let anything pass."""
    sizes = (
        "hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2, "
        "num_key_value_heads: 2, head_dim: 16"
    )
    said = dtt(
        "verify", f"model={{family: transformers, config: {{model_type: seed_oss, {sizes}}}}}",
        "data.type=synthetic", "data.vocab_size=256", "train.seq_len=32", "train.micro_batch=2",
        "train.global_batch_tokens=256", "parallel.shard=2", "name=v", expect=ExitCode.USAGE,
    )  # fmt: skip
    assert "two runs of one process differ" in said.stderr
    assert "attention_dropout=0.0" in said.stderr
