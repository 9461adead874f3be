"""Training of adapters as a user runs it: what is trained and saved, resumes, layouts, merging."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from support import forked_runs
from support.bitsandbytes_values import of_bitsandbytes
from support.preference_pairs import prepare
from support.preference_pairs import settings as preference_settings
from support.running import Dtt
from support.tokenized_conversations import write_conversations
from torch import Tensor

from dtt.artifacts.jobdir import JobDir
from dtt.base.errors import ConfigError
from dtt.checkpoint import store
from dtt.config.adapter import LoraConfig
from dtt.config.load import load_job
from dtt.data.samples.reference import ReferenceManifest
from dtt.hf.read import read_hf_folder
from dtt.hf.read_checkpoint import checkpoint_weights
from dtt.model.adapted_layers import Adapted, adapted_layers
from dtt.model.decoder import Decoder
from dtt.model.lora import LoraLinear, attach
from dtt.track import jsonl
from dtt.train.warm_start import take_base

STEPS = 8
MODEL = {"model.dim": 64, "model.n_layers": 2, "model.n_heads": 4, "model.n_kv_heads": 2}
RUN = {
    "data.type": "chat", "data.tokens": "tokens", "train.seq_len": 128, "train.steps": STEPS,
    "train.global_batch_tokens": 1024, "train.micro_batch": 4, "train.precision": "fp32",
    "train.eval_every": 4, "train.log_every": 1, "train.eval_answers": 0, "train.sample_tokens": 0,
    "schedule.warmup": 2, "checkpoint.every": 4, "checkpoint.keep_last": 9,
    "optim.type": "adamw", "optim.lr": "3e-3",
}  # fmt: skip
LORA = {
    "init.from": "hf:exports/base", "adapter.type": "lora", "adapter.rank": 4, "adapter.alpha": 8,
    "adapter.rank_pattern": "{down: 2}", "adapter.alpha_pattern": "{q: 16}",
}  # fmt: skip


def arguments(*parts: dict[str, object], **changes: object) -> list[str]:
    values: dict[str, object] = dict(RUN)
    for part in (*parts, {key.replace("__", "."): value for key, value in changes.items()}):
        values |= part
    return [f"{key}={value}" for key, value in values.items()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with conversations, a model `exports/base`, and a finished adapter `jobs/lora`."""
    folder = tmp_path_factory.mktemp("adapter")
    write_conversations(folder)
    dtt = Dtt(folder)
    dtt("train", *arguments(MODEL, name="base"))
    dtt("export", "jobs/base", "export.dtype=fp32")
    dtt("train", *arguments(LORA, name="lora"))
    return folder


@pytest.fixture
def dtt(trained: Path, tmp_path: Path) -> Dtt:
    """The command, in a copy of that folder."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return Dtt(tmp_path)


def newest(job: Path) -> store.Checkpoint:
    found = store.newest(JobDir(job).checkpoints)
    assert found is not None
    return found


def tensors(job: Path) -> dict[str, Tensor]:
    checkpoint = newest(job)
    return {**checkpoint.tensors(store.MODEL), **checkpoint.tensors(store.STATE)}


def losses(job: Path) -> list[float]:
    return [r["loss"] for r in jsonl.read(JobDir(job).metrics) if r["kind"] in ("train", "eval")]


def test_a_checkpoint_has_the_adapter_and_its_state_alone(trained: Path) -> None:
    checkpoint = newest(trained / "jobs/lora")
    saved = checkpoint.tensors(store.MODEL)
    assert {name.rpartition(".")[2] for name in saved} == {"lora_a", "lora_b"}
    assert saved["layers.0.mlp.down.lora_a"].shape[0] == 2
    assert saved["layers.1.attn.q.lora_a"].shape == (4, 64)
    state = checkpoint.tensors(store.STATE)
    assert all(".lora_" in path for path in state if path.startswith("adamw/"))
    needed = sum(tensor.nbytes for tensor in (*saved.values(), *state.values()))
    assert sum(file.bytes for file in checkpoint.manifest.files) <= 1.05 * needed + 20_000
    assert checkpoint.manifest.base is not None
    assert Path(checkpoint.manifest.base.folder) == (trained / "exports/base").resolve()


def test_a_new_adapter_changes_nothing_and_a_trained_one_learns(trained: Path) -> None:
    base, lora = (losses(trained / "jobs" / name) for name in ("base", "lora"))
    assert lora[0] == pytest.approx(base[-1], abs=1e-6), "the first validation, before any step"
    assert lora[-1] < lora[0] - 0.01


def test_a_resumed_adapter_has_the_same_bits(dtt: Dtt) -> None:
    before = tensors(dtt.folder / "jobs/lora")
    shutil.rmtree(dtt.folder / "jobs/lora/checkpoints/step-000008")
    dtt("train", "jobs/lora")
    after = tensors(dtt.folder / "jobs/lora")
    assert before.keys() == after.keys()
    assert all(tensor.equal(after[name]) for name, tensor in before.items())


@pytest.mark.slow
def test_a_base_in_4_bits_resumes_on_another_layout_and_goes_to_peft(dtt: Dtt) -> None:
    dtt("train", *arguments(LORA, name="q", adapter__base="nf4"))
    job = dtt.folder / "jobs/q"
    before, whole = tensors(job), losses(job)
    assert whole[0] == pytest.approx(losses(dtt.folder / "jobs/lora")[0], abs=1e-2)
    assert whole[0] != losses(dtt.folder / "jobs/lora")[0]
    assert whole[-1] < whole[0] - 0.01
    shutil.rmtree(job / "checkpoints/step-000008")
    shutil.copytree(job, dtt.folder / "jobs/on-two")
    dtt("train", "jobs/q")
    assert all(tensor.equal(tensors(job)[name]) for name, tensor in before.items())
    forked_runs.run(dtt, "train", "jobs/on-two", "parallel.shard=2", ranks=2)
    assert losses(dtt.folder / "jobs/on-two") == pytest.approx(whole, abs=1e-5)
    dtt("export", "jobs/q", "export.dtype=fp32")
    dtt("export", "jobs/q", "--adapter")
    cfg = LoraConfig.model_validate({**load_job(job).adapter.model_dump(), "base": "nf4"})
    base = read_hf_folder(dtt.folder / "exports/base")
    ours = Decoder(base.decoder)
    attach(ours, cfg, torch.float32)
    take_base(ours, base.state, "base")
    ours.load_state_dict(newest(job).tensors(store.MODEL), strict=False)
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(dtt.folder / "exports/base", dtype=torch.float32)
    for layer in theirs.model.layers.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data = of_bitsandbytes(layer.weight.data)
    adapted = peft.PeftModel.from_pretrained(theirs, dtt.folder / "exports/q-adapter").eval()
    ids = torch.arange(2, 34)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(ids), adapted(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow(except_for=["changed"])
@pytest.mark.parametrize("change", ["changed", "gone"])
def test_an_adapter_is_not_resumed_on_other_weights(dtt: Dtt, change: str) -> None:
    dtt("train", *arguments(LORA, name="t"))
    shutil.rmtree(dtt.folder / "jobs/t/checkpoints/step-000008")
    weights = dtt.folder / "exports/base/model.safetensors"
    if change == "gone":
        shutil.rmtree(weights.parent)
    else:
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    said = dtt("train", "jobs/t", expect=66 if change == "gone" else 65).stderr
    assert "exports/base" in said
    assert ("are missing" if change == "gone" else "are not those") in said


@pytest.mark.slow
def test_frozen_weights_are_stored_in_bf16_and_train_as_in_fp32(dtt: Dtt) -> None:
    for ranks, keys in ((1, {}), (2, {"parallel.shard": 2})):
        run = arguments(
            LORA, keys, name=f"bf16-{ranks}", train__precision="bf16",
            train__micro_batch=4 // ranks, train__sample_tokens=2, train__eval_answers=2,
            train__eval_answer_tokens=2,
        )  # fmt: skip
        forked_runs.run(dtt, "train", *run, ranks=ranks)
        assert losses(dtt.folder / f"jobs/bf16-{ranks}") == pytest.approx(
            losses(dtt.folder / "jobs/lora"), rel=1e-2
        )
    own = newest(dtt.folder / "jobs/bf16-2").tensors(store.MODEL)
    assert own["layers.0.attn.q.lora_b"].dtype == torch.float32


def test_merged_weights_are_the_sum_in_fp32(trained: Path) -> None:
    job = trained / "jobs/lora"
    merged, own = checkpoint_weights(newest(job)), newest(job).tensors(store.MODEL)
    base = read_hf_folder(trained / "exports/base").state
    assert merged.keys() == base.keys()
    for name, scale in (("layers.0.attn.q", 16 / 4), ("layers.1.mlp.down", 8 / 2)):
        a, b = own[f"{name}.lora_a"], own[f"{name}.lora_b"]
        expected = base[f"{name}.weight"].double() + scale * (b.double() @ a.double())
        found = merged[f"{name}.weight"]
        torch.testing.assert_close(found[()].double(), expected, rtol=1e-6, atol=1e-6)
        assert found[slice(3, 7), slice(2, 9)].equal(found[()][3:7, 2:9])
        assert found[()].equal(found[()]), "merged once, however often it is read"
    assert merged["embed.weight"][()].equal(base["embed.weight"])


@pytest.mark.slow
def test_an_export_holds_the_merged_weights_and_generates_as_the_job_does(dtt: Dtt) -> None:
    assert "logits differ" in dtt("export", "jobs/lora", "export.dtype=fp32").stdout
    exported = read_hf_folder(dtt.folder / "exports/lora").state
    for name, weight in checkpoint_weights(newest(dtt.folder / "jobs/lora")).items():
        assert exported[name].equal(weight[()].to(exported[name].dtype)), name
    asked = "-p", "one", "--max-new-tokens", "8", "--temperature", "0"
    texts = [dtt("generate", source, *asked).stdout for source in ("jobs/lora", "exports/lora")]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_an_adapter_goes_to_peft_and_back(dtt: Dtt) -> None:
    assert "those of PEFT by" in dtt("export", "jobs/lora", "--adapter").stdout
    folder = dtt.folder / "exports/lora-adapter"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert Path(config["base_model_name_or_path"]).is_dir()
    card = (folder / "README.md").read_text()
    assert "AutoPeftModelForCausalLM" in card
    assert config["base_model_name_or_path"] not in card
    run = arguments(LORA, name="on", init__adapter="exports/lora-adapter")
    said = dtt("train", *run).stderr
    assert "differ from those of PEFT by" in said
    assert losses(dtt.folder / "jobs/on")[0] == pytest.approx(
        losses(dtt.folder / "jobs/lora")[-1], abs=1e-6
    )
    other = arguments(LORA, name="other", init__adapter="exports/lora-adapter", adapter__alpha=9)
    assert "alpha: 8.0" in dtt("train", *other, expect=2).stderr


@pytest.mark.slow
def test_a_job_that_starts_from_an_adapter_job_starts_from_the_merged_weights(dtt: Dtt) -> None:
    dtt("train", *arguments(LORA, MODEL, name="next", init__from="jobs/lora"))
    assert losses(dtt.folder / "jobs/next")[0] == pytest.approx(
        losses(dtt.folder / "jobs/lora")[-1], abs=1e-5
    )
    # Its own checkpoint refers to that of the adapter below it.
    merged = checkpoint_weights(newest(dtt.folder / "jobs/next"))
    below = checkpoint_weights(newest(dtt.folder / "jobs/lora"))
    name = "layers.0.attn.v"
    own = newest(dtt.folder / "jobs/next").tensors(store.MODEL)
    added = 2 * own[f"{name}.lora_b"] @ own[f"{name}.lora_a"]
    torch.testing.assert_close(merged[f"{name}.weight"][()], below[f"{name}.weight"][()] + added)
    # PEFT has no base to load for it, and no adapter in a job of all weights.
    said = dtt("export", "jobs/next", "--adapter", expect=2).stderr
    assert "omit --adapter to export the merged model" in said
    assert "has no adapter" in dtt("export", "jobs/base", "--adapter", expect=2).stderr


@pytest.mark.slow
def test_the_average_is_that_of_the_adapter(dtt: Dtt) -> None:
    dtt("train", *arguments(LORA, name="t", train__ema_decay=0.5))
    checkpoint = newest(dtt.folder / "jobs/t")
    state = checkpoint.tensors(store.STATE)
    assert all(".lora_" in path for path in state if path.startswith("ema/layers"))
    name = "layers.0.attn.v"
    a, b = (state[f"ema/{name}.lora_{part}/value"] for part in "ab")
    base = read_hf_folder(dtt.folder / "exports/base").state[f"{name}.weight"]
    averaged = checkpoint_weights(checkpoint, average=True)[f"{name}.weight"][()]
    torch.testing.assert_close(averaged, base + 2 * b @ a)


@pytest.mark.slow
def test_the_reference_of_dpo_is_the_model_without_the_adapter(tmp_path: Path) -> None:
    dtt = Dtt(tmp_path)
    prepare(dtt)
    dtt("train", *preference_settings(name="full"))
    lora = preference_settings(name="lora", adapter__type="lora", adapter__rank=2)
    dtt("train", *lora)
    full, adapter = (tmp_path / "jobs" / name / "reference" for name in ("full", "lora"))
    for file in ReferenceManifest.read(full).files:
        assert (full / file.path).read_bytes() == (adapter / file.path).read_bytes()
    assert losses(tmp_path / "jobs/lora")[-1] < losses(tmp_path / "jobs/lora")[0]


@pytest.mark.slow
def test_the_reference_of_dpo_has_the_adapter_that_the_run_starts_from(tmp_path: Path) -> None:
    dtt = Dtt(tmp_path)
    prepare(dtt)
    dtt("export", "jobs/tiny", "export.dtype=fp32")
    lora = {"init__from": "hf:exports/tiny", "adapter__type": "lora", "adapter__rank": 2}
    dtt("train", *preference_settings(name="first", **lora))
    dtt("export", "jobs/first", "--adapter")
    # That of the base alone, as a killed start without `init.adapter` would leave it.
    shutil.copytree(tmp_path / "jobs/first/reference", tmp_path / "jobs/on/reference")
    dtt("train", *preference_settings(name="on", init__adapter="exports/first-adapter", **lora))
    dtt("train", *preference_settings(name="merged", init__from="jobs/first"))
    start, reference = losses(tmp_path / "jobs/on")[0], tmp_path / "jobs/on/reference"
    assert start == pytest.approx(math.log(2), abs=1e-5), "the policy starts as its reference"
    rows, merged = (
        np.fromfile(tmp_path / f"jobs/{name}/reference/train-00000.f32", "<f4")
        for name in ("on", "merged")
    )
    np.testing.assert_allclose(rows, merged, rtol=1e-4, atol=1e-4)
    first = np.fromfile(tmp_path / "jobs/first/reference/train-00000.f32", "<f4")
    assert np.abs(first - rows).max() > 0.01, "another one than that of the base"
    assert reference.is_dir()


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "no weights": ({"init.from": "null"}, "set init.from"),
    "muon": ({"optim.type": "muon"}, "needs adamw"),
    "pure bf16": ({"train.precision": "bf16-pure"}, "does not support it"),
    "4 bits and fp8": (
        {"train.precision": "fp8", "adapter.base": "nf4"},
        "nf4 does not support fp8",
    ),
    "dropout": ({"adapter.dropout": 0.1, "parallel.tensor": 2}, "must be 0"),
    "no target": ({"adapter.targets": "[q, query]"}, "'query'"),
    "the head": ({"adapter.targets": "[head]"}, "the head and the embedding cannot"),
    "a pattern": ({"adapter.rank_pattern": "{proj: 2}"}, "'proj'"),
    "an expression": ({"adapter.targets": "'*q'"}, "not a regular expression"),
    "no adapter": ({"adapter.type": "none", "init.adapter": "x"}, "needs adapter.type=lora"),
    "divided blocks": ({"adapter.base": "nf4", "parallel.tensor": 2}, "that have one scale"),
    "scaling": ({"scaling.type": "mup", "scaling.base_dim": 32}, "needs standard"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_adapted_is_refused(trained: Path, case: str) -> None:
    keys, said = REFUSED[case]
    lora = {key: value for key, value in LORA.items() if key in ("init.from", "adapter.type")}
    values = {**lora, **keys, "name": "refused"}
    assert said in Dtt(trained)("train", *arguments(values), expect=2).stderr
    assert not (trained / "jobs/refused/checkpoints").exists()


def test_dropout_acts_on_the_input_of_a_alone() -> None:
    torch.manual_seed(0)
    layer = LoraLinear(torch.nn.Linear(12, 8), Adapted(3, 6.0, rslora=False), dropout=0.5)
    torch.nn.init.normal_(layer.lora_a)
    torch.nn.init.normal_(layer.lora_b)
    x = torch.randn(5, 12)
    torch.manual_seed(1)
    out = layer(x)
    torch.manual_seed(1)
    dropped = torch.nn.functional.dropout(x, 0.5)
    expected = x @ layer.weight.T + layer.bias + 2 * dropped @ layer.lora_a.T @ layer.lora_b.T
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(layer.eval()(x) - layer(x), torch.zeros(5, 8))


def test_targets_and_patterns_choose_the_layers(trained: Path) -> None:
    arch = read_hf_folder(trained / "exports/base").arch

    def names(**keys: Any) -> list[str]:
        return sorted(adapted_layers(LoraConfig(**keys), arch))

    assert len(names()) == 2 * 7
    assert names(targets=("q", "mlp.up")) == [
        "layers.0.attn.q", "layers.0.mlp.up", "layers.1.attn.q", "layers.1.mlp.up",
    ]  # fmt: skip
    assert names(targets=r"layers\.1\..*[qk]") == ["layers.1.attn.k", "layers.1.attn.q"]
    layers = adapted_layers(
        LoraConfig(rank=8, alpha=16, rslora=True, rank_pattern={r"^layers\.0\..*": 2, "q": 4}), arch
    )
    assert [layers[f"layers.{i}.attn.q"].rank for i in (0, 1)] == [2, 4]
    assert layers["layers.1.attn.v"].scale == pytest.approx(16 / 8**0.5)
    with pytest.raises(ConfigError, match="'gate_proj'"):
        names(targets=("gate_proj",))
