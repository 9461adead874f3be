from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.multimodal_folders import write_multimodal
from support.running import Dtt

from dtt.base.errors import DamagedError, InputError
from dtt.config.model import LinearRopeScaling
from dtt.hf import publish, write_folder
from dtt.hf.read import LoadedModel, read_hf_folder
from dtt.hf.verify import check_import
from dtt.model import families

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": [0, 5],
}


@pytest.mark.parametrize("end", [None, [], "absent"])
def test_a_model_may_not_say_how_documents_end(
    end: object, llama: LoadedModel, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    write_folder.export(
        llama, publish.ExportSource("job", 7, ""), out, dtype="fp32", max_shard_size="5GB", card=""
    )
    config = json.loads((out / "config.json").read_text()) | {"eos_token_id": end}
    if end == "absent":
        del config["eos_token_id"]
    (out / "config.json").write_text(json.dumps(config))
    assert read_hf_folder(out).end_of_document == 0, "as generation_config.json has it"
    (out / "generation_config.json").unlink()
    found = read_hf_folder(out)
    assert found.end_of_document is None
    assert found.arch == llama.arch


def test_a_qwen3_that_transformers_made_is_read_and_continues_a_prompt(
    dtt: Dtt, tokenizer_json: Path
) -> None:
    folder = dtt.folder / "qwen3"
    sizes = {key: value for key, value in SIZES.items() if key != "eos_token_id"}
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes)).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(tokenizer_json.read_bytes())
    assert read_hf_folder(folder).end_of_document is None
    run = dtt("generate", folder, "-p", "def main", "--max-new-tokens", "5", "--json")
    assert json.loads(run.stdout)["completion_tokens"] == 5
    empty = dtt("generate", folder, expect=2)
    assert "the prompt is empty" in empty.stderr
    assert "has no end-of-document token" in empty.stderr


def write(config: Any, folder: Path, tokenizer: Path, **changes: object) -> None:
    """Write a model of transformers, and the changes into its config.json."""
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | changes))


def test_equal_rope_settings_in_two_places_are_read(tokenizer_json: Path, tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 4.0}
    config = transformers.LlamaConfig(**SIZES, rope_parameters=scaling | {"rope_theta": 5e5})
    write(config, tmp_path, tokenizer_json, rope_scaling=scaling, rope_theta=5e5)
    found = read_hf_folder(tmp_path)
    assert (found.arch.rope_theta, found.arch.rope_scaling) == (5e5, LinearRopeScaling(factor=4.0))
    check_import(tmp_path, found)


def test_an_unknown_key_at_the_default_of_transformers_is_harmless() -> None:
    family = families.get("llama")
    known = transformers.LlamaConfig().to_dict()
    arch = family.from_hf_config(known | {"new": 3}, lambda: {"new": 3})
    assert arch == family.from_hf_config(known)
    with pytest.raises(InputError, match="new: 4, unknown to dtt"):
        family.from_hf_config(known | {"new": 4}, lambda: {"new": 3})


def test_other_logits_than_those_of_transformers_are_refused(
    tokenizer_json: Path, tmp_path: Path
) -> None:
    write(transformers.LlamaConfig(**SIZES), tmp_path, tokenizer_json)
    found = read_hf_folder(tmp_path)
    assert check_import(tmp_path, found) < 1e-5
    other = dict(found.state) | {"norm.weight": found.state["norm.weight"] * 1.01}
    with pytest.raises(InputError, match="logits of random ids differ by up to"):
        check_import(tmp_path, replace(found, state=other))
    other["norm.weight"] = other["norm.weight"] * torch.nan
    with pytest.raises(DamagedError, match="logits that are not finite"):
        check_import(tmp_path, replace(found, state=other))


def test_files_beside_the_weights_are_not_read(tokenizer_json: Path, tmp_path: Path) -> None:
    write(transformers.LlamaConfig(**SIZES), tmp_path, tokenizer_json)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({n: t + 1 for n, t in tensors.items()}, tmp_path / "model_other.safetensors")
    check_import(tmp_path, read_hf_folder(tmp_path))


def test_a_tied_head_that_is_another_matrix_is_refused(
    tokenizer_json: Path, tmp_path: Path
) -> None:
    write(transformers.LlamaConfig(**SIZES), tmp_path, tokenizer_json, tie_word_embeddings=True)
    with pytest.raises(DamagedError, match="the head is tied, but lm_head"):
        read_hf_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    check_import(tmp_path, read_hf_folder(tmp_path))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@torch.no_grad()
def test_the_text_model_of_a_multimodal_folder_is_read_and_exported_alone(
    prefix: str, tokenizer_json: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = write_multimodal("gemma3", tmp_path, tokenizer_json)
    state = load_file(tmp_path / "model.safetensors")
    form = re.compile(r"(model\.)?language_model\.(model\.)?")
    renamed = {form.sub(prefix, name): tensor for name, tensor in state.items()}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level("WARNING"):
        found = read_hf_folder(tmp_path)
    assert "tensors of its other parts" in caplog.text
    assert found.arch.family == "gemma3"
    assert check_import(tmp_path, found) < 1e-5
    write_folder.export(
        found, publish.ExportSource("job", 1, "c0ffee"), tmp_path / "out", dtype="fp32",
        max_shard_size="5GB", card="",
    )  # fmt: skip
    text = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(text).__name__ == "Gemma3ForCausalLM"
    ids = torch.randint(320, (1, 40))
    torch.testing.assert_close(text(ids).logits, theirs(ids).logits, rtol=0, atol=1e-5)


def test_an_unknown_key_beside_the_text_config_is_refused(
    tokenizer_json: Path, tmp_path: Path
) -> None:
    write_multimodal("gemma3", tmp_path, tokenizer_json)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"audio_config": {"layers": 2}}))
    with pytest.raises(InputError, match="audio_config"):
        read_hf_folder(tmp_path)


def test_an_unsupported_model_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(InputError, match="'t5', which is no causal model of transformers"):
        read_hf_folder(tmp_path)


@pytest.fixture
def folder(llama: LoadedModel, tmp_path: Path) -> Path:
    """An export in several files."""
    out = tmp_path / "run"
    write_folder.export(
        llama, publish.ExportSource("job", 7, ""), out, dtype="fp32", max_shard_size="40KB", card=""
    )
    assert len(list(out.glob("model-*.safetensors"))) > 2
    return out


def some_weights(folder: Path) -> Path:
    return min(folder.glob("model-*.safetensors"))


def fifo(folder: Path) -> None:
    path = some_weights(folder)
    path.unlink()
    os.mkfifo(path)


def index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return apply


MALFORMED: dict[str, Callable[[Path], object]] = {
    "a header of 2^60 bytes": lambda f: some_weights(f).write_bytes((2**60).to_bytes(8, "little")),
    "no bytes": lambda f: some_weights(f).write_bytes(b""),
    "a pickle": lambda f: torch.save({"w": torch.ones(3)}, some_weights(f)),
    "integers": lambda f: save_file(
        {name: tensor.int() for name, tensor in load_file(some_weights(f)).items()}, some_weights(f)
    ),
    "a FIFO": fifo,
    "a name that leads out": index(
        lambda c: c["weight_map"].update(dict.fromkeys(c["weight_map"], "../victim.safetensors"))
    ),
    "a name that is a number": index(lambda c: c["weight_map"].update(x=1)),
    "an index without names": index(lambda c: c.pop("weight_map")),
    "a missing file": lambda f: some_weights(f).unlink(),
    "an index nested deeply": lambda f: (f / "model.safetensors.index.json").write_bytes(
        b"[" * 100_000
    ),
    "a config nested deeply": lambda f: (f / "config.json").write_bytes(b"[" * 100_000),
}


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_folder_is_one_message(folder: Path, change: Callable[[Path], object]) -> None:
    (folder.parent / "victim.safetensors").write_bytes(some_weights(folder).read_bytes())
    read_hf_folder(folder)
    change(folder)
    with pytest.raises((DamagedError, InputError), match=r"(why|next):"):
        read_hf_folder(folder)
