"""Classes of a user's own in a run: what they compute, what a job keeps, what a resume refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support import resumed
from support.forked_runs import run
from support.own_classes import LION
from support.own_classes import POLYNOMIAL as POLY
from support.records import records
from support.running import ROOT, Dtt

from dtt.base.errors import ExitCode
from dtt.config.layers import Leaf
from dtt.config.load import resolve
from dtt.config.schedule import RunFacts
from dtt.mesh.mesh import Mesh
from dtt.mesh.sharding import layout_of
from dtt.optim import built
from dtt.params.table import Param, Params
from dtt.train.objectives.loss_function import check_ranks
from dtt.train.objectives.next_token import NextTokenConfig
from dtt.train.step import update

EXAMPLES = ROOT / "examples"
CONFIG = "train: {log_every: 1}\nschedule: {type: poly.py:Polynomial, power: 1.5}\n"


@pytest.fixture
def own(dtt: Dtt) -> Dtt:
    (dtt.folder / "lab").mkdir()
    (dtt.folder / "lab/poly.py").write_text(POLY)
    (dtt.folder / "lab/run.yaml").write_text(CONFIG)
    return dtt


def rates(job: Path) -> dict[int, float]:
    return {record["step"]: record["lr"] for record in records(job, "train")}


def test_an_own_schedule_trains_and_a_resume_changes_no_bit(own: Dtt) -> None:
    more = ("-c", "lab/run.yaml", "optim.lr=0.5")
    assert resumed.differing(own, "replicate=1", *more) == []
    expected = {1: 0.25, 2: 0.5 * 0.75**1.5, 3: 0.5 * 0.5**1.5, 4: 0.5 * 0.25**1.5}
    assert rates(own.folder / "jobs/t") == pytest.approx(expected)


def test_the_job_keeps_the_file(own: Dtt) -> None:
    own("train", "-c", "lab/run.yaml", *resumed.SETTINGS, "train.steps=2")
    assert (own.folder / "jobs/t/own_code/poly.py").read_text() == POLY
    shutil.rmtree(own.folder / "lab")
    own("train", "jobs/t", "train.steps=3", "--allow-change", "train.steps")
    manifest = json.loads((own.folder / "jobs/t/checkpoints/step-000003/MANIFEST.json").read_text())
    assert list(manifest["code"]) == ["poly.py"]
    # What does not train reads the job without its code.
    (own.folder / "jobs/t/own_code/poly.py").write_text("raise SystemExit\n")
    own("generate", "jobs/t", "-p", "1")
    done = own("train", "jobs/t", expect=ExitCode.USAGE)
    assert "SystemExit" in done.stderr


def test_other_commands_read_the_job_without_its_code(own: Dtt, tokens: Path) -> None:
    keys = [key for key in resumed.SETTINGS if not key.startswith("data.")]
    own("train", "-c", "lab/run.yaml", *keys, f"data.tokens={tokens}", "schedule.warmup=1")
    branched = ("name=other", "schedule.type=constant", "train.steps=4")
    done = own("train", "--branch", "jobs/t@2", *branched, expect=ExitCode.USAGE)
    assert "decays after step 0" in done.stderr
    (own.folder / "jobs/t/own_code/poly.py").write_text("raise SystemExit\n")
    for command in ("export jobs/t", "ckpt ls jobs/t", "ckpt prune jobs/t", "report jobs/t"):
        own(*command.split())


def test_a_changed_original_is_taken_only_when_asked_for(own: Dtt) -> None:
    started = ("train", "-c", "lab/run.yaml", *resumed.SETTINGS)
    own(*started, "train.steps=2")
    (own.folder / "lab/poly.py").write_text(POLY.replace("self.power", "1.0"))
    longer = ("train.steps=3", "--allow-change", "train.steps")
    done = own(*started, *longer)
    assert "lab/poly.py has changed" in done.stderr
    longer = ("train.steps=4", "--allow-change", "train.steps", "--allow-change", "schedule.type")
    own(*started, *longer)
    assert rates(own.folder / "jobs/t")[4] == pytest.approx(2e-3 * 0.25)
    # Now the copy is another one than the checkpoint was trained with.
    (own.folder / "jobs/t/own_code/poly.py").write_text(POLY)
    done = own("train", "jobs/t", expect=ExitCode.USAGE)
    assert "not the file that the job has trained with" in done.stderr
    assert "--allow-change schedule.type" in done.stderr


@pytest.mark.parametrize(
    ("example", "layout"),
    [
        ("lion", "replicate=1"),
        pytest.param("lion", "shard=2", marks=pytest.mark.slow),
        ("kronecker", "shard=2"),
    ],
)
def test_an_own_optimizer_trains_and_a_resume_changes_no_bit(
    dtt: Dtt, example: str, layout: str
) -> None:
    own_type = f"optim.type={EXAMPLES}/{example}.py:{example.capitalize()}"
    assert resumed.differing(dtt, layout, own_type, "optim.lr=1e-3") == []
    planned = dtt("plan", *resumed.SETTINGS, own_type, "--json")
    assert json.loads(planned.stdout)


def test_a_schedule_and_an_optimizer_of_the_library_work_the_same_as_ones_own(dtt: Dtt) -> None:
    """The weights of an own class that is the built-in one."""
    (dtt.folder / "mine.py").write_text(
        "import dtt\nimport torch\n"
        "class Adam(dtt.Optimizer):\n"
        "    def build(self, params, run):\n"
        "        groups = [\n"
        "            {'params': [p.tensor], 'weight_decay': 0.1 if p.role == 'matrix' else 0.0}\n"
        "            for p in params.values()\n"
        "        ]\n"
        "        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95), fused=True)\n"
    )
    for job, kind in (("a", "adamw"), ("b", "mine.py:Adam")):
        dtt("train", *resumed.SETTINGS, f"name={job}", f"optim.type={kind}", "optim.lr=1e-3")
    one, other = (
        dtt.folder / f"jobs/{job}/checkpoints/step-000004/model-00000.safetensors" for job in "ab"
    )
    assert one.read_bytes() == other.read_bytes()


def test_an_own_loss_trains_and_a_resume_changes_no_bit(dtt: Dtt) -> None:
    focal = (f"objective.type={EXAMPLES}/focal.py:Focal", "objective.gamma=2.0")
    assert resumed.differing(dtt, "shard=2", "train.log_every=1", *focal) == []
    logged = records(dtt.folder / "jobs/t", "train")
    assert all(0 < r["loss"] < r["cross_entropy"] for r in logged)


@pytest.mark.slow
def test_an_own_loss_without_its_factor_is_the_cross_entropy(dtt: Dtt, tokens: Path) -> None:
    """Validation is the same, and has the own loss beside it; terms are means in every layout."""
    keys = [key for key in resumed.SETTINGS if not key.startswith("data.")]
    keys += [f"data.tokens={tokens}", "train.eval_every=2", "train.log_every=1"]
    (dtt.folder / "plain.py").write_text(
        "import dtt\n"
        "class Plain(dtt.Objective):\n"
        "    def loss(self, out, batch):\n"
        "        return out.sum(), {'tokens': 2 * out.sum(), 'one': (batch.targets >= 0).sum()}\n"
    )
    keys += ["model.dropout=0.0", "train.seq_len=20"]
    dtt("train", *keys, "name=a", "objective.type=next_token")
    expected = {kind: records(dtt.folder / "jobs/a", kind) for kind in ("train", "eval")}
    for job, layout in (("b", "shard=2 context=2"), ("c", "pipeline=2 tensor=2")):
        parallel = [f"parallel.{part}" for part in layout.split()]
        own = (f"name={job}", "objective.type=plain.py:Plain", *parallel)
        run(dtt, "train", *keys, *own, ranks=4)
        found = {kind: records(dtt.folder / f"jobs/{job}", kind) for kind in expected}
        for mine, theirs in zip(expected["eval"], found["eval"], strict=True):
            assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-5)
            assert theirs["bits_per_byte"] == pytest.approx(mine["bits_per_byte"], rel=1e-5)
            assert theirs["objective"] == pytest.approx(mine["loss"], rel=1e-5)
            assert theirs["own/tokens"] == pytest.approx(2 * mine["loss"], rel=1e-5)
        for mine, theirs in zip(expected["train"], found["train"], strict=True):
            assert theirs["tokens"] == mine["tokens"]
            assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-5)
            assert theirs["cross_entropy"] == pytest.approx(mine["loss"], rel=1e-5)
            assert theirs["own/tokens"] == pytest.approx(2 * mine["loss"], rel=1e-5)
            assert theirs["own/one"] == pytest.approx(1.0)


WEIGHED = """
from distillation import Distillation
from dtt.mesh.sharding import local


class Weighed(Distillation):
    def loss(self, out, batch):
        loss, terms = super().loss(out, batch)
        held = sum(local(weight).nbytes for weight in self._teacher.parameters())
        return loss, terms | {"held": held * (batch.targets >= 0).sum()}
"""
TEACHER = "objective.teacher=jobs/teacher"


@pytest.mark.slow
def test_a_teacher_is_sharded_and_stays_the_same(dtt: Dtt, monkeypatch: pytest.MonkeyPatch) -> None:
    """A student of its own weights has no divergence; a term says what each rank holds."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    dtt("train", *resumed.SETTINGS, "train.steps=2", "name=teacher")
    (dtt.folder / "mine.py").write_text(WEIGHED)
    taught = (
        *resumed.SETTINGS, "objective.type=mine.py:Weighed", TEACHER, "init.from=jobs/teacher",
        "model.dropout=0.0", "train.log_every=1", "optim.lr=0.1",
    )  # fmt: skip
    dtt("train", *taught)
    expected = records(dtt.folder / "jobs/t", "train")
    divergences = [record["own/divergence"] for record in expected]
    assert abs(divergences[0]) < 1e-5 < divergences[-1]
    sharded = (*taught, "name=s", "parallel.shard=2")
    run(dtt, "train", *sharded, ranks=2)
    devices = "launch.nodes=1", "launch.gpus_per_node=2", "--gpu", "H100", "--json"
    plan = json.loads(dtt("plan", *sharded, *devices).stdout)
    held = plan["memory"]["models of the objective"]
    # The teacher trains on. The resumed run, in another layout, keeps the one that it began with.
    shutil.rmtree(dtt.folder / "jobs/s/checkpoints/step-000004")
    dtt("train", "jobs/teacher", "train.steps=4", "--allow-change", "train.steps")
    dtt("train", "jobs/s", "parallel.shard=1")
    found = records(dtt.folder / "jobs/s", "train")
    for mine, theirs in zip(expected, found, strict=True):
        assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-5)
        assert theirs["own/divergence"] == pytest.approx(mine["own/divergence"], abs=1e-5, rel=1e-3)
        assert mine["own/held"] == pytest.approx(4 * plan["parameters"], rel=1e-6)
    assert [r["own/held"] for r in found] == pytest.approx([held, held, 2 * held, 2 * held])
    shutil.rmtree(dtt.folder / "jobs/teacher/checkpoints/step-000002")
    done = dtt("train", "jobs/s", "--from-step", "2", expect=ExitCode.INPUT_MISSING)
    assert "the weights of jobs/teacher with which the run began are missing" in done.stderr
    done = dtt("train", *taught, "parallel.tensor=2", expect=ExitCode.USAGE)
    assert "parallel.tensor: must be 1 for a loss that needs logits" in done.stderr


def test_ranks_with_other_terms_stop_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Added up by their places, values of different names would be mixed."""
    monkeypatch.setattr(Mesh, "gather", lambda _self, mine: [mine, ["own/b"]])
    with pytest.raises(ValueError, match=r"\['own/b'\] on rank 1, \['own/a'\] on 0"):
        check_ranks(NextTokenConfig(), ["own/a"], Mesh())


STATEFUL = """
import dtt
import torch


class Centred(dtt.Objective):
    _mean = torch.zeros(())

    def loss(self, out, batch):
        self._mean = 0.9 * self._mean + 0.1 * out.detach().mean()
        return (out * (1 + 0.1 * torch.tanh(out.detach() - self._mean))).sum()

    def state(self):
        return {"mean": self._mean}

    def restore(self, state):
        self._mean = state["mean"]
"""


def test_the_state_of_a_loss_is_kept(dtt: Dtt) -> None:
    (dtt.folder / "mine.py").write_text(STATEFUL)
    assert resumed.differing(dtt, "replicate=1", "objective.type=mine.py:Centred") == []


def test_a_step_that_the_guard_skips_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LION)
    config: Any = resolve({("optim", "type"): Leaf("mine.py:Lion", f"{tmp_path}/c.yaml:1")}, env={})
    weight = torch.nn.Parameter(torch.ones(3))
    params = Params([Param("w", weight, "vector", layout_of(weight, 1))])
    optimizers = built.build(config.config.optim, params, RunFacts(1))
    for skip, expected in ((1.0, 1.0), (0.0, 0.5)):
        weight.grad = torch.full((3,), 2.0)
        optimizers["own"].param_groups[0]["lr"] = 0.5
        update(optimizers, torch.tensor(skip), step=0)
        assert weight.tolist() == [expected] * 3
        assert weight.grad is None


@pytest.mark.parametrize("theirs", ["config.yaml", "own_code/poly.py"])
def test_a_job_of_another_user_runs_no_code_unless_trusted(own: Dtt, theirs: str) -> None:
    own("train", "-c", "lab/run.yaml", *resumed.SETTINGS, "train.steps=2")
    job = own.folder / "jobs/t"
    if theirs == "config.yaml":  # its owner may name any file, such as one beside it
        (job / "own_code/poly.py").rename(job / "poly.py")
    shutil.chown(job / theirs, 12345)
    arguments = ("train", "jobs/t", "train.steps=3", "--allow-change", "train.steps")
    done = own(*arguments, expect=ExitCode.USAGE)
    assert "code of another user" in done.stderr
    own(*arguments, "--trust")


def test_types_with_other_keys_say_what_they_drop(own: Dtt) -> None:
    (own.folder / "lab/run.yaml").write_text("schedule: {warmup: 1, decay: 2}\n")
    own_type = "schedule.type=lab/poly.py:Polynomial"
    shown = own("config", "show", "-c", "lab/run.yaml", own_type).stdout
    assert "  warmup: 1 " in shown
    assert f"schedule.decay = 2 (lab/run.yaml:1) is not used: {own_type} has no such key" in shown
    explained = own("config", "explain", "schedule.power", "-c", "lab/run.yaml", expect=2)
    assert "no key" in explained.stderr
