from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from tokenizers import Tokenizer, processors

from dtt.artifacts.manifests import ExportManifest
from dtt.base.errors import ConfigError, DamagedError, Diverged
from dtt.base.files import sha256_file
from dtt.hf import publish, verify, write_folder
from dtt.hf.read import LoadedModel, read_hf_folder
from dtt.model.decoder import Decoder

ORIGIN = publish.ExportSource("job", 7, "c0ffee")


def export(
    trained: LoadedModel, out: Path, dtype: write_folder.Dtype = "fp32", size: str = "5GB"
) -> ExportManifest:
    return write_folder.export(
        trained, ORIGIN, out, dtype=dtype, max_shard_size=size, card="# Card\n"
    )


def test_transformers_loads_and_generates_from_an_export(
    trained: LoadedModel, tmp_path: Path
) -> None:
    out = tmp_path / "exports" / "run"
    manifest = export(trained, out, "bf16")
    assert manifest.max_logit_difference < 1e-4
    assert [path.name for path in out.parent.iterdir()] == ["run"]
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert model.config.eos_token_id == tokenizer.eos_token_id == 0
    assert tokenizer.model_max_length == 64
    inputs = tokenizer("def main", return_tensors="pt")
    text = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(text[0]).startswith("def main")


def test_what_transformers_keeps_in_fp32_is_exported_in_fp32(
    trained: LoadedModel, tmp_path: Path
) -> None:
    manifest = export(trained, tmp_path / "run", "bf16")
    assert manifest.max_rounding_difference is not None
    assert 1e-4 < manifest.max_rounding_difference < 1
    back = read_hf_folder(tmp_path / "run").state
    kept = {name for name, tensor in back.items() if tensor.dtype == torch.float32}
    cls = getattr(transformers, verify.families.get(trained.arch.family).hf_class)
    marks = {*(cls._keep_in_fp32_modules or ()), *(cls._keep_in_fp32_modules_strict or ())}
    # Newer releases of transformers keep all of a router, older ones its correction only.
    part = ".router." if "gate.weight" in marks else ".router.balance"
    dots = trained.arch.family == "dots1"
    assert kept == ({name for name in back if part in name} if dots else set())
    assert all(torch.equal(back[name], trained.state[name]) for name in kept)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_weights_have_the_requested_dtype(
    llama: LoadedModel, tmp_path: Path, dtype: write_folder.Dtype
) -> None:
    manifest = export(llama, tmp_path / "run", dtype)
    assert manifest.max_logit_difference < 1e-4
    assert (manifest.max_rounding_difference is None) == (dtype == "fp32")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert model.dtype == write_folder.DTYPES[dtype]


def test_the_manifest_names_every_file(llama: LoadedModel, tmp_path: Path) -> None:
    manifest = export(llama, tmp_path / "run")
    assert ExportManifest.read(tmp_path / "run") == manifest
    listed = {file.path: file.sha256 for file in manifest.files}
    there = {p.name for p in (tmp_path / "run").iterdir()}
    assert there == {*listed, "dtt_export.json"} >= {"config.json", "generation_config.json"}
    assert all(sha256_file(tmp_path / "run" / name) == digest for name, digest in listed.items())
    assert manifest.parameters == sum(tensor.numel() for tensor in llama.state.values())


def test_an_export_is_read_back_bit_for_bit(trained: LoadedModel, tmp_path: Path) -> None:
    export(trained, tmp_path / "run")
    back = read_hf_folder(tmp_path / "run")
    assert (back.arch, back.end_of_document) == (trained.arch, trained.end_of_document)
    assert all(torch.equal(back.state[name], value) for name, value in trained.state.items())


def test_the_same_export_is_recognised_and_another_refused(
    llama: LoadedModel, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert publish.already_done(out, ORIGIN, "fp32") is None
    manifest = export(llama, out)
    assert publish.already_done(out, ORIGIN, "fp32") == manifest
    with pytest.raises(ConfigError, match=r"of another job: job, step 7, fp32\n.*--out"):
        publish.already_done(out, publish.ExportSource("other", 8, "beef"), "fp32")
    assert publish.already_done(out, ORIGIN, "bf16") is None
    (out / "config.json").unlink()
    with pytest.raises(DamagedError, match="export is incomplete"):
        publish.already_done(out, ORIGIN, "fp32")


def test_an_earlier_export_of_the_job_is_replaced(llama: LoadedModel, tmp_path: Path) -> None:
    out = tmp_path / "exports" / "run"
    export(llama, out, size="20KB")
    assert (out / "model.safetensors.index.json").is_file()
    later = publish.ExportSource("job", 8, "beef")
    manifest = write_folder.export(llama, later, out, dtype="bf16", max_shard_size="5GB", card="")
    assert ExportManifest.read(out) == manifest
    assert {path.name for path in out.iterdir()} == {
        *(file.path for file in manifest.files),
        manifest.filename,
    }
    assert [path.name for path in out.parent.iterdir()] == ["run"]


def test_an_export_that_fails_leaves_the_earlier_one(llama: LoadedModel, tmp_path: Path) -> None:
    manifest = export(llama, tmp_path / "run")
    lie = dataclasses.replace(llama.arch, n_layers=3)
    with pytest.raises(DamagedError, match="missing"):
        export(dataclasses.replace(llama, arch=lie), tmp_path / "run", "bf16")
    assert publish.already_done(tmp_path / "run", ORIGIN, "fp32") == manifest


def test_a_tokenizer_that_adds_tokens_gives_the_ids_of_the_token_files(
    llama: LoadedModel, tmp_path: Path
) -> None:
    adding = Tokenizer.from_file(str(llama.tokenizer))
    begin = ("<|endoftext|>", 0)
    adding.post_processor = processors.TemplateProcessing(
        single=f"{begin[0]} $A", special_tokens=[begin]
    )
    adding.enable_truncation(4)
    adding.enable_padding(length=9)
    adding.save(str(tmp_path / "tokenizer.json"))
    export(dataclasses.replace(llama, tokenizer=tmp_path / "tokenizer.json"), tmp_path / "run")
    expected = Tokenizer.from_file(str(llama.tokenizer)).encode("def main").ids
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "run")
    assert adding.encode("def main").ids[0] == 0
    assert loaded("def main")["input_ids"] == expected


def test_a_folder_that_is_not_an_export_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"is not an export\n.*--out"):
        publish.already_done(tmp_path, ORIGIN, "bf16")


def test_verification_finds_one_changed_weight(trained: LoadedModel, tmp_path: Path) -> None:
    out = tmp_path / "run"
    export(trained, out)
    state = {name: value.clone() for name, value in trained.state.items()}
    verify.check(out, verify.random_logits(state, trained.arch), trained.arch)
    down = next(n for n in state if n.endswith(("mlp.down.weight", "experts.down")))
    state[down][..., 3, 5] += 0.2
    with pytest.raises(DamagedError, match="logits of random ids differ"):
        verify.check(out, verify.random_logits(state, trained.arch), trained.arch)


def test_a_model_that_has_diverged_publishes_nothing(llama: LoadedModel, tmp_path: Path) -> None:
    llama.state["norm.weight"].fill_(torch.nan)
    with pytest.raises(Diverged, match="not finite; nothing was published"):
        export(llama, tmp_path / "run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("key", "value"), [("rms_norm_eps", 0.1), ("rope_theta", 2e4), ("max_position_embeddings", 65)]
)
def test_verification_finds_a_wrong_config(
    llama: LoadedModel, tmp_path: Path, key: str, value: float
) -> None:
    out = tmp_path / "run"
    export(llama, out)
    config = json.loads((out / "config.json").read_text())
    del config["rope_parameters"]
    (out / "config.json").write_text(json.dumps(config))
    expected = verify.random_logits(llama.state, llama.arch)
    verify.check(out, expected, llama.arch)
    (out / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(DamagedError, match="reads a different architecture"):
        verify.check(out, expected, llama.arch)


def test_tied_models_are_saved_without_their_head(trained: LoadedModel, tmp_path: Path) -> None:
    export(trained, tmp_path / "run")
    with safe_open(tmp_path / "run" / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in set(file.keys())) != trained.arch.tie_embeddings
    assert (Decoder(trained.arch).head is None) == trained.arch.tie_embeddings
