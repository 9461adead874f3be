"""`dtt mup` on real tokens: it passes what is right, and says what is wrong."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
from running import Dtt

from dtt.base.errors import ConfigError, Diverged, ExitCode
from dtt.config.load import resolve
from dtt.config.run import RunConfig
from dtt.model.scaling import Scaling
from dtt.mup import run as mup
from dtt.mup.coordinate_check import KINDS, faults, slopes
from dtt.mup.transfer import drift, optimum, power


def config(tokens: Path, *arguments: str) -> RunConfig:
    return resolve(
        None,
        [
            f"data.tokens={tokens}", "model.dim=64", "model.n_heads=4", "model.n_layers=2",
            "train.seq_len=32", "train.global_batch_tokens=256", "train.steps=4",
            "train.precision=fp32", *arguments,
        ],
    ).config  # fmt: skip


def size_of(picture: Path) -> tuple[int, ...]:
    """Width and height of a PNG, from its header."""
    head = picture.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    return struct.unpack(">II", head[16:])


def coord_check(cfg: RunConfig, out: Path, widths: str = "32,64,128", **options: Any) -> None:
    options = {"tolerance": 0.35, "compare": True, "as_json": False} | options
    mup.coord_check(cfg, widths, out=out, **options)


ADAMW = ("optim.type=adamw", "optim.lr=3e-3")
MUON = ("optim.type=muon", "optim.lr=1e-2", "optim.adamw.lr=3e-3")


@pytest.mark.slow(except_for=["muon"])
@pytest.mark.parametrize("optim", [ADAMW, MUON], ids=["adamw", "muon"])
def test_activations_keep_their_size_under_mup_and_grow_without(
    tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], optim: tuple[str, ...]
) -> None:
    coord_check(config(tokens, *optim), tmp_path)
    report = json.loads((tmp_path / "coord-check.json").read_text())
    assert report["mup"]["passed"]
    assert report["mup"]["scaling"]["base_dim"] == 32
    assert not report["standard"]["passed"]
    assert [fault.split()[0] for fault in report["standard"]["faults"]] == list(KINDS[1:])
    assert report["mup"]["sizes"]["32"] == report["standard"]["sizes"]["32"]  # the base is the base
    assert len(report["mup"]["slopes"]) == len(report["mup"]["sizes"]["128"]) == 5
    assert min(size_of(tmp_path / "coord-check.png")) > 300
    printed = capsys.readouterr().out
    assert "mup       pass" in printed
    assert "standard  FAIL: attn grows as width^" in printed


@pytest.mark.parametrize("optim", [ADAMW, MUON], ids=["adamw", "muon"])
def test_an_unscaled_learning_rate_fails_the_check(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optim: tuple[str, ...]
) -> None:
    monkeypatch.setattr(Scaling, "learning_rates", lambda *_: {})
    with pytest.raises(Diverged, match=r"why: +\w+ grows as width\^"):
        coord_check(config(tokens, *optim), tmp_path, "32,128", compare=False)
    assert (tmp_path / "coord-check.png").exists()  # to look at what is wrong


def test_the_base_of_the_configuration_is_the_base_of_the_check(
    tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = config(tokens, "scaling.type=mup", "scaling.base_dim=64", "train.steps=1")
    coord_check(cfg, tmp_path, "32,64", compare=False, as_json=True, tolerance=9.0)
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["mup"]
    assert report["mup"]["scaling"]["base_dim"] == 64


def test_transfer_trains_every_width_at_every_rate_and_seed(
    tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = config(tokens, *ADAMW, "schedule.warmup=1")
    mup.transfer(
        cfg, "16,32", "1e-3,1e-2,1e30", seeds=2, tolerance=99.0, compare=True, out=tmp_path,
        as_json=True,
    )  # fmt: skip
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "transfer.json").read_text())
    assert report["mup"]["losses"]["16"] == report["standard"]["losses"]["16"]
    assert report["mup"]["losses"]["32"] != report["standard"]["losses"]["32"]
    for losses in report["mup"]["losses"].values():
        assert losses["1e+30"] == [None, None]  # diverged
        assert losses["0.01"][0] != losses["0.01"][1]
        assert max(losses["0.01"]) < min(losses["0.001"]) < math.log(320)
    assert report["mup"]["best"]["32"] == {
        "lr": 0.01, "loss": pytest.approx(sum(report["mup"]["losses"]["32"]["0.01"]) / 2),
        "bracketed": True,
    }  # fmt: skip
    assert report["mup"]["drift_octaves"] == report["mup"]["power"] == 0.0
    assert min(size_of(tmp_path / "transfer.png")) > 300


def test_a_warm_up_that_is_longer_than_a_transfer_run_is_shortened(tokens: Path) -> None:
    cfg = config(tokens, "schedule.warmup=200", "train.steps=1000")
    assert mup.short_warmup(cfg, 60) == {"schedule.warmup": "10%"}
    assert mup.short_warmup(cfg, 200) == {}
    assert mup.short_warmup(config(tokens, "schedule.warmup=10%"), 60) == {}


def test_a_best_rate_at_the_end_of_the_grid_fails(tokens: Path, tmp_path: Path) -> None:
    with pytest.raises(Diverged, match="best learning rate at width 16 is at the end of the grid"):
        mup.transfer(
            config(tokens, *ADAMW), "16,32", "1e-5,2e-5", seeds=1, tolerance=99.0, compare=False,
            out=tmp_path, as_json=False,
        )  # fmt: skip


def test_the_best_rate_is_the_lowest_point_of_a_parabola() -> None:
    best = optimum({2.0**x: 3.0 + (x - 0.3) ** 2 for x in range(-3, 4)})
    assert best.lr == pytest.approx(2**0.3)
    assert best.loss == pytest.approx(3.0)
    diverging = optimum({0.5: 4.0, 1.0: 3.0, 2.0: math.inf})
    assert (diverging.lr, diverging.loss, diverging.bracketed) == (1.0, 3.0, True)
    assert not optimum({1.0: 2.0, 2.0: 3.0}).bracketed
    assert drift({64: best, 256: diverging}) == pytest.approx(0.3)
    assert power({64: best, 256: diverging}) == pytest.approx(-0.15)


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
def test_invalid_widths_are_refused(tokens: Path, tmp_path: Path, widths: str) -> None:
    with pytest.raises(ConfigError, match="expected two or more different positive numbers"):
        coord_check(config(tokens), tmp_path, widths)


def test_a_width_that_splits_a_head_is_refused_by_the_command(dtt: Dtt, tokens: Path) -> None:
    run = dtt(
        "mup", "coord-check", "--widths", "32,64,72", f"data.tokens={tokens}", "model.dim=64",
        "model.n_heads=4", "train.seq_len=32", "train.global_batch_tokens=256",
        expect=ExitCode.USAGE,
    )  # fmt: skip
    assert "the model cannot be 72 wide with heads of the same size" in run.stderr
    assert "--widths 16,32,64" in run.stderr
    assert "at width" not in run.stderr  # nothing was trained before
