from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dtt.errors import InputError
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
