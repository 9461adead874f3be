"""Preference tuning as a user runs it: rows, token files, reference log-probabilities, DPO."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import forked_runs
from support.preference_pairs import prepare, settings
from support.records import records
from support.running import Dtt, kill_when
from torch import Tensor

from dtt.checkpoint import store
from dtt.data.samples.reference import ReferenceManifest
from dtt.train.objectives.dpo import METRICS


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with token files of pairs, a model to start from, and a finished job `one`."""
    folder = tmp_path_factory.mktemp("preference")
    prepare(Dtt(folder))
    Dtt(folder)("train", *settings(name="one"))
    return folder


@pytest.fixture
def dtt(prepared: Path, tmp_path: Path) -> Dtt:
    """The command, in a copy of that folder."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    return Dtt(tmp_path)


def weights(job: Path, step: int) -> dict[str, Tensor]:
    checkpoint = store.at_step(job / "checkpoints", step)
    return {name: tensor[()] for name, tensor in checkpoint.stored(store.MODEL).items()}


def rows_of(job: Path) -> Any:
    return np.fromfile(job / "reference/train-00000.f32", "<f4").reshape(-1, 192)


def assert_same_run(one: Path, other: Path) -> None:
    """The losses, metrics and weights of two runs are the same, up to rounding."""
    for kind, keys in (("train", ("loss", "grad_norm", *METRICS)), ("eval", ("loss", *METRICS))):
        pairs = list(zip(records(one, kind), records(other, kind), strict=True))
        assert len(pairs) >= 3
        for a, b in pairs:
            assert a.get("ledger") == b.get("ledger")
            for key in keys:
                assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-5), key
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    np.testing.assert_allclose(rows_of(one), rows_of(other), rtol=1e-5, atol=1e-5)
    theirs = weights(other, 8)
    for name, value in weights(one, 8).items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-3, atol=1e-4)


def test_the_margin_of_held_out_pairs_grows_until_all_are_right(prepared: Path) -> None:
    start, middle, end = records(prepared / "jobs/one", "eval")
    assert start["loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert start["reward_margin"] == pytest.approx(0, abs=1e-5)
    assert 0 < middle["reward_margin"] < end["reward_margin"]
    assert end["loss"] < middle["loss"] < start["loss"]
    assert end["reward_accuracy"] == 1.0
    assert end["logp_chosen"] - end["logp_rejected"] > (
        start["logp_chosen"] - start["logp_rejected"]
    )


def test_every_step_reports_the_metrics_and_counts_targets_as_tokens(prepared: Path) -> None:
    job = prepared / "jobs/one"
    steps = records(job, "train")
    assert [record["step"] for record in steps] == [*range(1, 9)]
    assert all(set(METRICS) < set(record) for record in steps)
    assert steps[0]["tokens"] > 8 * 2, "more targets than pairs"
    manifest = ReferenceManifest.read(job / "reference")
    assert [file.path for file in manifest.files] == ["train-00000.f32", "validation-00000.f32"]
    assert (rows_of(job) <= 0).all()
    assert (rows_of(job) < 0).any(axis=1).all()


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bits(dtt: Dtt) -> None:
    process = dtt.start("train", *settings())
    kill_when((dtt.folder / "jobs/t/checkpoints/step-000004").exists, process)
    shutil.rmtree(dtt.folder / "jobs/tiny")  # the log-probabilities are in the job
    dtt("train", "jobs/t")
    theirs = weights(dtt.folder / "jobs/one", 8)
    for name, value in weights(dtt.folder / "jobs/t", 8).items():
        assert value.equal(theirs[name]), name


@pytest.mark.slow
def test_a_pipeline_computes_the_same_and_resumes_to_the_same_bits(dtt: Dtt) -> None:
    layout = {"parallel__pipeline": 2, "parallel__replicate": 1}
    forked_runs.run(dtt, "train", *settings(**layout), ranks=2)
    job = dtt.folder / "jobs/t"
    assert_same_run(dtt.folder / "jobs/one", job)
    expected = weights(job, 8)
    forked_runs.run(dtt, "train", "jobs/t", "--from-step", 4, ranks=2)
    for name, value in weights(job, 8).items():
        assert value.equal(expected[name]), name


def test_without_its_log_probabilities_a_started_job_is_refused(dtt: Dtt) -> None:
    file = dtt.folder / "jobs/one/reference/train-00000.f32"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    arguments = "train.steps=9", "--allow-change", "train.steps"
    refused = dtt("train", "jobs/one", *arguments, expect=66)
    assert "the log-probabilities of the reference model are missing or damaged" in refused.stderr


def test_another_reference_is_computed_anew_and_then_trained_from_the_initial_weights(
    dtt: Dtt,
) -> None:
    dtt("train", *settings(objective__reference="jobs/tiny@10"))
    other, one = rows_of(dtt.folder / "jobs/t"), rows_of(dtt.folder / "jobs/one")
    assert np.abs(other - one).max() > 1e-3
    start = records(dtt.folder / "jobs/t", "eval")[0]
    wanted = records(dtt.folder / "jobs/one", "eval")[0]
    assert start["logp_chosen"] == pytest.approx(wanted["logp_chosen"], rel=1e-6)
    assert abs(start["reward_margin"]) > 1e-4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["objective.type=next_token"], "data.type=preference needs dpo, not next_token"),
        (["data.type=chat"], "objective.type=dpo needs preference, not chat"),
        (["chat.too_long=whole_turns"], "data.type=preference needs drop or stop"),
        (["chat.turns=expand"], "data.type=preference needs all"),
        (["train.z_loss=0.1"], "objective.type=dpo has no z-loss"),
        (["init.from=null"], "objective.type=dpo needs the weights of a fine-tuned model"),
        (["objective.beta=0"], "objective.beta"),
        (["objective.reference=jobs/none"], "no checkpoint in jobs/none/checkpoints"),
        (
            ["data.type=chat", "objective.type=next_token"],
            "hold preference pairs, but data.type=chat",
        ),
        (["train.seq_len=16", "train.global_batch_tokens=128"], "can be used"),
        (
            ["chat.too_long=stop", "train.seq_len=64", "train.global_batch_tokens=512"],
            "preference pairs are longer than train.seq_len = 64",
        ),
    ],
)
def test_a_mistake_is_answered_with_one_message(
    dtt: Dtt, arguments: list[str], message: str
) -> None:
    missing = "jobs/none" in message
    refused = dtt("train", *settings(), *arguments, expect=66 if missing else 2)
    assert message in refused.stderr
    assert not (dtt.folder / "jobs/t").exists()


@pytest.mark.slow
def test_the_model_card_gives_the_loss_per_pair(dtt: Dtt) -> None:
    dtt("export", "jobs/one")
    card = (dtt.folder / "exports/one/README.md").read_text()
    loss = records(dtt.folder / "jobs/one", "eval")[-1]["loss"]
    assert f"{loss:.4f} nats per pair (DPO), 100.0% of the preference pairs correct" in card


IPO = """
import dtt


class Ipo(dtt.Objective):
    \"\"\"IPO (Azar et al., arXiv 2310.12036), for one pair in a row.\"\"\"

    per_pair = needs_reference = True
    beta: float = 0.1

    def loss(self, out, batch):
        ratio = -out - batch.extra["reference_logprobs"]
        sign = 1 - 2 * (batch.doc_ids % 2)
        margin = (ratio * sign * (batch.targets != -100)).sum()
        return (margin - 1 / (2 * self.beta)) ** 2, {"margin": margin}
"""


def test_a_loss_of_pairs_of_ones_own_gets_the_reference_and_is_validated(dtt: Dtt) -> None:
    (dtt.folder / "ipo.py").write_text(IPO)
    dtt("train", *settings(name="own"), "objective.type=ipo.py:Ipo", "train.steps=2")
    job = dtt.folder / "jobs/own"
    assert (job / "reference").is_dir()
    evaluated = records(job, "eval")[-1]
    assert evaluated.keys() >= {"loss", "own/margin"}
    assert evaluated["bits_per_byte"] is None
    assert "objective" not in evaluated
