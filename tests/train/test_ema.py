"""A run that averages its weights: measured beside them, kept bit for bit, exported and used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.running import Dtt
from support.tiny_job import END_OF_DOCUMENT, make_tokenizer, write_checkpoint, write_job

from dtt.base.errors import ConfigError, InputError
from dtt.checkpoint import store
from dtt.generate import run as generate
from dtt.hf import export
from dtt.hf.read import read_hf_folder
from dtt.optim.ema import averages
from dtt.track import jsonl


@pytest.fixture(scope="module")
def job(tiny: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 steps with checkpoints of 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("averaged")
    done = Dtt(folder)(
        "train",
        *tiny(
            train__ema_decay=0.9,
            train__z_loss=1e-4,
            optim__lr=2e-2,
            optim__adamw__lr=3e-2,
            checkpoint__keep_last=3,
        ),
    )
    assert "; with averaged weights " in done.stderr
    return folder / "jobs/t"


def test_its_loss_is_recorded_next_to_that_of_the_weights(job: Path) -> None:
    evals = [r for r in jsonl.read(job / "metrics.jsonl") if r["kind"] == "eval"]
    assert [r["step"] for r in evals] == [0, 5, 10, 12]
    assert evals[0]["ema_loss"] == evals[0]["loss"]
    assert all(r["ema_loss"] > r["loss"] for r in evals[1:])  # it falls, and the average lags


def exported(job: Path, out: Path, *, ema: bool) -> dict[str, torch.Tensor]:
    manifest = export.run(
        str(job), ["export.dtype=fp32"], out=out, upload=None, private=False, ema=ema
    )
    assert manifest.ema == ema
    assert ("moving average" in (out / "README.md").read_text()) == ema
    return dict(read_hf_folder(out).state)


def test_it_is_exported_and_distinguished_from_the_weights(job: Path, tmp_path: Path) -> None:
    checkpoint = store.find(str(job))
    weights = checkpoint.tensors(store.MODEL)
    average = averages(checkpoint.tensors(store.STATE))
    for expected, ema in ((weights, False), (average, True)):
        got = exported(job, tmp_path / "out", ema=ema)
        assert all(torch.equal(got[name], expected[name]) for name in expected), ema
    assert not torch.equal(weights["embed.weight"], average["embed.weight"])
    with pytest.raises(ConfigError, match="is not one"):
        generate.run(
            str(tmp_path / "out"), ["x"], generate.Sampling(max_tokens=1, temperature=0), ema=True
        )


def test_the_averaged_weights_continue_a_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path)
    a, b, c = make_tokenizer().encode("abc").ids
    end = END_OF_DOCUMENT
    write_checkpoint(job, 15, says={a: b, b: end}, average_says={a: c, c: end})
    for ema, expected in ((False, "ab\n"), (True, "ac\n")):
        generate.run(str(job), ["a"], generate.Sampling(max_tokens=9, temperature=0), ema=ema)
        assert capsys.readouterr().out == expected


def test_a_job_without_one_explains_which_setting_keeps_one(job: Path) -> None:
    other = write_job(job.parents[1] / "other")
    with pytest.raises(
        InputError, match=r"no moving average of the weights(.|\n)*train.ema_decay=0.999"
    ):
        exported(other, job / "no", ema=True)
