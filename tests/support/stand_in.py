"""A tiny model in the form in which models for chat are released."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dtt.data.conversations.template import CHATML
from support.tiny_job import IM_END, make_tokenizer


def stored(model: Any) -> dict[str, Tensor]:
    """The weights of a model of transformers by the names that it writes: some hold several."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(f"{folder}/model.safetensors")


def write_stand_in(folder: Path) -> None:
    """Write a Llama of one layer, its tokenizer of bytes, and its chat template."""
    tokenizer = make_tokenizer("<|im_start|>", "<|im_end|>")
    sizes = {"hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 8192}
    tokens = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": IM_END}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, **tokens)).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    own = {"chat_template": CHATML, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
