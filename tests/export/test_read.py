from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dtt.errors import DamagedError, DttError, InputError
from dtt.export import hf
from dtt.export.read import Trained, read_hf_folder
from dtt.model.decoder import Decoder

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


@pytest.mark.parametrize(
    "config",
    [
        transformers.GPT2Config(
            vocab_size=320, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=0
        ),
        transformers.LlamaConfig(**SIZES),
        transformers.MistralConfig(**SIZES, sliding_window=8),
        transformers.Qwen3Config(**SIZES),
        transformers.Gemma3TextConfig(**SIZES, sliding_window=8),
    ],
    ids=lambda config: config.model_type,
)
@torch.no_grad()
def test_a_folder_that_transformers_wrote_is_read(
    config: Any, tokenizer_json: Path, tmp_path: Path
) -> None:
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    theirs.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json.read_bytes())
    found = read_hf_folder(tmp_path)
    assert found.end_of_document == 0
    model = Decoder(found.arch).eval()
    model.load_state_dict(dict(found.state))
    tokens = torch.arange(40)[None]
    torch.testing.assert_close(model(tokens), theirs(tokens).logits)


@pytest.mark.parametrize("end", [None, []])
def test_a_model_that_does_not_say_how_documents_end_is_refused(
    end: object, llama: Trained, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    hf.export(llama, hf.Origin("job", 7, ""), out, dtype="fp32", max_shard_size="5GB", card="")
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"eos_token_id": end}))
    with pytest.raises(InputError, match=r"config\.json lacks 'eos_token_id'"):
        read_hf_folder(out)


def test_an_unknown_kind_of_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(InputError, match="'bert'; known: gpt2, llama, mistral, qwen3, gemma3_text"):
        read_hf_folder(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(InputError, match="safetensors is missing"):
        read_hf_folder(tmp_path)


@pytest.fixture
def folder(llama: Trained, tmp_path: Path) -> Path:
    """An export in several files."""
    out = tmp_path / "run"
    hf.export(llama, hf.Origin("job", 7, ""), out, dtype="fp32", max_shard_size="40KB", card="")
    assert len(list(out.glob("model-*.safetensors"))) > 2
    return out


def some_weights(folder: Path) -> Path:
    return min(folder.glob("model-*.safetensors"))


def edit_header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = some_weights(folder)
        content = path.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])

    return apply


def first(header: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = next(e for n, e in header.items() if n != "__metadata__")
    return entry


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


def lead_out(content: dict[str, Any]) -> None:
    name = next(iter(content["weight_map"]))
    content["weight_map"][name] = "../victim.safetensors"


MALFORMED: dict[str, Callable[[Path], object]] = {
    "a header of 2^60 bytes": lambda f: some_weights(f).write_bytes((2**60).to_bytes(8, "little")),
    "no bytes": lambda f: some_weights(f).write_bytes(b""),
    "a pickle": lambda f: torch.save({"w": torch.ones(3)}, some_weights(f)),
    "an unknown dtype": edit_header(lambda h: first(h).update(dtype="F1024")),
    "integers": edit_header(lambda h: first(h).update(dtype="I32")),
    "overlapping offsets": edit_header(lambda h: first(h).update(data_offsets=[4, 8])),
    "a FIFO": fifo,
    "a name that leads out": index(lead_out),
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


def test_a_leftover_file_that_the_index_does_not_name_is_not_read(folder: Path) -> None:
    before = read_hf_folder(folder).state
    (folder / "model.safetensors").write_bytes(b"of another export")
    after = read_hf_folder(folder).state
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_no_mutation_of_a_weight_file_ends_in_anything_but_one_message(folder: Path) -> None:
    path = some_weights(folder)
    whole, refused = path.read_bytes(), 0
    for seed in range(200):
        rng = random.Random(seed)
        content = bytearray(whole)
        for _ in range(rng.randint(1, 6)):
            content[rng.randrange(400)] = rng.randrange(256)
        path.write_bytes(content[: rng.randrange(len(content))] if seed % 5 == 0 else content)
        try:
            read_hf_folder(folder)
        except DttError:
            refused += 1
    assert refused > 100
