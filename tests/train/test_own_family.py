"""Models of a user's own: training on every layout, resumes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import resumed
from support.running import ROOT, Dtt

from dtt.base.errors import ExitCode
from dtt.checkpoint import store
from dtt.config.load import resolve
from dtt.mesh.sharding import FullTensor
from dtt.model.architecture import BuiltArchitecture
from dtt.model.decoder import make_model
from dtt.model.init import initialize
from dtt.model.scaling import scaled

EXAMPLE = ROOT / "examples/residual_values.py"
WITHOUT_DATA = [key for key in resumed.WITHOUT_MODEL if not key.startswith("data.")]
SMALL = "dim: 32, layers: 2, heads: 2"


@pytest.fixture
def own(dtt: Dtt) -> Dtt:
    (dtt.folder / "mine.py").write_text(EXAMPLE.read_text())
    (dtt.folder / "run.yaml").write_text(
        f"model: {{family: mine.py:ValueResiduals, {SMALL}}}\ntrain: {{log_every: 1}}\n"
    )
    return dtt


@pytest.mark.parametrize(
    "layout", ["replicate=1", "shard=2", pytest.param("replicate=2", marks=pytest.mark.slow)]
)
def test_an_own_model_trains_and_a_resume_changes_no_bit(own: Dtt, layout: str) -> None:
    more = ("-c", "run.yaml", "optim.type=adamw")
    assert resumed.differing(own, layout, *more, settings=resumed.WITHOUT_MODEL) == []


def test_muon_trains_its_matrices_and_it_is_generated_from(own: Dtt, tokens: Path) -> None:
    done = own("train", "-c", "run.yaml", *WITHOUT_DATA, f"data.tokens={tokens}", "train.steps=2")
    assert "matrix  muon             8" in done.stderr
    own("generate", "jobs/t", "-p", "the", "--max-new-tokens", "3")
    done = own("export", "jobs/t", expect=ExitCode.USAGE)
    assert "model.family=mine.py:ValueResiduals" in done.stderr
    # The model is what its code computes: without it, there is nothing to generate with.
    (own.folder / "jobs/t/own_code/mine.py").write_text("raise SystemExit\n")
    assert "SystemExit" in own("generate", "jobs/t", "-p", "1", expect=ExitCode.USAGE).stderr
    own("report", "jobs/t")


def test_weights_of_another_job_start_it(own: Dtt) -> None:
    settings = (*resumed.WITHOUT_MODEL, "train.steps=1", "schedule.warmup=0", "optim.type=adamw")
    started = ("train", "-c", "run.yaml", *settings)
    own(*started, "name=first")
    own(*started, "name=second", "init.from=jobs/first", "optim.lr=1e-30")
    first, second = (weights(own.folder / "jobs" / name) for name in ("first", "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name][()], second[name][()]) for name in first)


def weights(job: Path) -> dict[str, FullTensor]:
    checkpoint = store.newest(job / "checkpoints")
    assert checkpoint is not None
    return dict(checkpoint.stored(store.MODEL))


def built(folder: Path, text: str) -> BuiltArchitecture:
    (folder / "mine.py").write_text(text)
    path = folder / "run.yaml"
    path.write_text(f"model: {{family: mine.py:ValueResiduals, {SMALL}}}\n")
    arch = scaled(resolve(path).config, 320).arch
    assert isinstance(arch, BuiltArchitecture)
    return arch


def test_initial_values_follow_from_the_seed_and_the_name(tmp_path: Path) -> None:
    arch = built(tmp_path, EXAMPLE.read_text())
    drawn = []
    for seed in (0, 0, 1):
        model = make_model(arch)
        model.to_empty(device="cpu")
        torch.rand(3)  # other numbers drawn before change nothing
        initialize(model, seed)
        drawn.append({name: tensor.detach() for name, tensor in model.named_parameters()})
    assert all(torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0])
    assert not torch.equal(drawn[0]["layers.0.up.weight"], drawn[2]["layers.0.up.weight"])
    assert not torch.equal(drawn[0]["layers.0.up.weight"], drawn[0]["layers.1.up.weight"])
    assert drawn[0]["head.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert torch.equal(drawn[0]["norm.weight"], torch.ones(32))


MISTAKES = {
    "no model": ("return Decoder(self", "return object() or (self", "not a dtt.Model"),
    "another vocabulary": ("Decoder(self, vocab_size,", "Decoder(self, 64,", "64 rows for"),
    "no blocks": ("range(keys.layers)", "range(0)", "no blocks"),
    "a tie": (
        "vocab_size, bias=False)",
        "vocab_size, bias=False)\n        self.head.weight = self.embed.weight",
        "are one parameter",
    ),
    "joined documents": (
        "context.attend(q, k, (v + first) / 2)",
        "F.scaled_dot_product_attention(q, k, (v + first) / 2, is_causal=True)",
        "documents in one row see each other",
    ),
    "an unused parameter": (
        "self.norm = nn.RMSNorm(keys.dim)",
        "self.norm = nn.RMSNorm(keys.dim); self.idle = nn.Linear(4, 4)",
        "parameters get no gradient, such as idle.weight",
    ),
    "an exception": ("x, first = self.embed", "x, first = self.emebd", 'mine.py", line'),
    "another shape": ("return self.norm(x)\n", "return self.norm(x)[:, :-1]\n", "mine.py"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_model_is_named(own: Dtt, tokens: Path, mistake: str) -> None:
    wrong, right, expected = MISTAKES[mistake]
    text = EXAMPLE.read_text()
    assert wrong in text
    (own.folder / "mine.py").write_text(text.replace(wrong, right))
    data = (f"data.tokens={tokens}", "data.packing=best-fit", "data.mask_documents=true")
    done = own("train", "-c", "run.yaml", *WITHOUT_DATA, *data, expect=ExitCode.USAGE)
    assert expected in done.stderr
    assert "model.family=mine.py:ValueResiduals" in done.stderr


@pytest.mark.parametrize(
    "keys",
    ["parallel.tensor=2", "parallel.context=2", "parallel.pipeline=2", "train.precision=fp8",
     "scaling.type=mup scaling.base_dim=32"],
)  # fmt: skip
def test_what_needs_to_know_the_inside_is_refused(own: Dtt, keys: str) -> None:
    done = own(
        "train", "-c", "run.yaml", *resumed.WITHOUT_MODEL, *keys.split(), expect=ExitCode.USAGE
    )
    assert f"{keys.partition('=')[0]}" in done.stderr
    assert "model.family=mine.py:ValueResiduals" in done.stderr


def test_its_keys_are_checked_and_explained(own: Dtt) -> None:
    done = own("train", "-c", "run.yaml", "model.layer=3", expect=ExitCode.USAGE)
    assert "did you mean model.layers?" in done.stderr
    assert "Width of the residual" in own("config", "explain", "model.dim", "-c", "run.yaml").stdout
    done = own("config", "show", "-c", "run.yaml", "model.n_heads=2", expect=ExitCode.USAGE)
    assert "not mine.py:ValueResiduals" in done.stderr
