"""`dtt mup` on real tokens: it passes what is right, and says what is wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from support.running import Dtt

from dtt.base.errors import ConfigError, Diverged, ExitCode
from dtt.config.load import resolve
from dtt.config.run import RunConfig
from dtt.model.scaling import Scaling
from dtt.mup import run as mup
from dtt.mup.run import KINDS, drift, faults, slopes


def config(tokens: Path, *arguments: str) -> RunConfig:
    return resolve(
        None,
        [
            f"data.tokens={tokens}", "model.dim=64", "model.n_heads=4", "model.n_layers=2",
            "train.seq_len=32", "train.global_batch_tokens=256", "train.steps=4",
            "train.precision=fp32", *arguments,
        ],
    ).config  # fmt: skip


ADAMW = ("optim.type=adamw", "optim.lr=3e-3")
MUON = ("optim.type=muon", "optim.lr=1e-2", "optim.adamw.lr=3e-3")


@pytest.mark.slow(except_for=["muon"])
@pytest.mark.parametrize("optim", [ADAMW, MUON], ids=["adamw", "muon"])
def test_activations_keep_their_size_under_mup(
    tokens: Path, capsys: pytest.CaptureFixture[str], optim: tuple[str, ...]
) -> None:
    mup.coord_check(config(tokens, *optim), "32,64,128", as_json=False)
    head, *rows, verdict = capsys.readouterr().out.splitlines()
    assert head.split() == ["step", *KINDS]
    assert (len(rows), verdict) == (5, "pass")


@pytest.mark.parametrize("optim", [ADAMW, MUON], ids=["adamw", "muon"])
def test_an_unscaled_learning_rate_fails_the_check(
    tokens: Path, monkeypatch: pytest.MonkeyPatch, optim: tuple[str, ...]
) -> None:
    monkeypatch.setattr(Scaling, "lr_factor", lambda *_: 1.0)
    with pytest.raises(Diverged, match=r"why: +\w+ grows as width\^"):
        mup.coord_check(config(tokens, *optim), "32,128", as_json=False)


def test_the_base_of_the_configuration_is_the_base_of_the_check(
    tokens: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mup, "TOLERANCE", 9.0)
    for given, base in ((("scaling.type=mup", "scaling.base_dim=64"), 64), ((), 32)):
        mup.coord_check(config(tokens, "train.steps=1", *given), "32,64", as_json=True)
        assert json.loads(capsys.readouterr().out)["scaling"]["base_dim"] == base


def test_transfer_trains_every_width_at_every_rate(
    tokens: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mup.transfer(
        config(tokens, *ADAMW, "schedule.warmup=1"), "16,32", "1e-3,1e-2,1e30", as_json=True
    )
    report = json.loads(capsys.readouterr().out)
    for losses in report["losses"].values():
        assert losses["1e+30"] is None  # diverged
        assert losses["0.01"] < losses["0.001"] < math.log(320)
    assert report["best"] == {"16": 0.01, "32": 0.01}


def test_a_warm_up_that_is_longer_than_a_transfer_run_is_shortened(tokens: Path) -> None:
    cfg = config(tokens, "schedule.warmup=200", "train.steps=1000")
    assert mup.short_warmup(cfg, 60) == {"schedule.warmup": "10%"}
    assert mup.short_warmup(cfg, 200) == {}
    assert mup.short_warmup(config(tokens, "schedule.warmup=10%"), 60) == {}


def test_a_best_rate_at_the_end_of_the_grid_fails(tokens: Path) -> None:
    with pytest.raises(Diverged, match="best learning rate at width 16 is at the end of the grid"):
        mup.transfer(config(tokens, *ADAMW), "16,32", "1e-5,2e-5", as_json=False)


def test_best_rates_may_be_neighbours_inside_the_grid() -> None:
    tried = [1.0, 2.0, 4.0, 8.0, 16.0]
    assert drift({64: 4.0, 128: 4.0, 256: 8.0}, tried) == []
    assert drift({64: 2.0, 128: 8.0}, tried) == [
        "the best learning rates are 2 places of the grid apart"
    ]
    assert drift({64: 2.0, 128: 1.0}, tried) == [
        "the best learning rate at width 128 is at the end of the grid"
    ]


def test_slopes_are_exponents_of_the_width_and_non_finite_sizes_are_faults() -> None:
    grown = {w: [dict.fromkeys(KINDS, 2.0), dict.fromkeys(KINDS, w**0.5)] for w in (64, 128, 256)}
    first, last = slopes(grown)
    assert set(first.values()) == {0.0}
    assert all(slope == pytest.approx(0.5) for slope in last.values())
    assert faults([first, last], 0.35)[0] == "embed grows as width^0.50 at step 1"
    vanished = [dict.fromkeys(KINDS, -0.5)]
    assert len(faults(vanished, 0.35)) == len(KINDS)
    assert faults([*vanished, first], 0.35) == []  # nothing is learnt yet at first
    for size in (math.nan, math.inf, 0.0):
        (slope,) = slopes({64: [dict.fromkeys(KINDS, 1.0)], 128: [dict.fromkeys(KINDS, size)]})
        assert faults([slope], 0.35)[0] == "embed grows as width^inf at step 0"


@pytest.mark.parametrize("widths", ["64", "64,64", "64,x", "-64,128", "64.5,128"])
def test_invalid_widths_are_refused(tokens: Path, widths: str) -> None:
    with pytest.raises(ConfigError, match="expected two or more different positive numbers"):
        mup.coord_check(config(tokens), widths, as_json=False)


def test_a_width_that_splits_a_head_is_refused_by_the_command(dtt: Dtt, tokens: Path) -> None:
    run = dtt(
        "mup", "coord-check", "--widths", "32,64,72", f"data.tokens={tokens}", "model.dim=64",
        "model.n_heads=4", "train.seq_len=32", "train.global_batch_tokens=256",
        expect=ExitCode.USAGE,
    )  # fmt: skip
    assert "the model cannot be 72 wide with heads of the same size" in run.stderr
    assert "--widths 16,32,64" in run.stderr
    assert "at width" not in run.stderr  # nothing was trained before
