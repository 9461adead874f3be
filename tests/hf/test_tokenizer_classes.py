"""Types of model for which AutoTokenizer takes a class of its own, whatever a folder names."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers.models.auto import tokenization_auto
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dtt.base.errors import DamagedError
from dtt.config.data import TrainedTokenizerConfig
from dtt.config.run import PRE_TOKENIZER_OF_TYPE
from dtt.data.text.tokenizer import train_tokenizer
from dtt.hf import verify

TEXTS = [verify.TEXT, "नमस्ते दुनिया, हिन्दी में लिखा हुआ पाठ। नमस्ते, नमस्ते दुनिया 12345"]


def folder_of(path: Path, model_type: str, content: str) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (path / "tokenizer.json").write_text(content)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def trained(pre_tokenizer: str) -> str:
    cfg = TrainedTokenizerConfig.model_validate({"pre_tokenizer": pre_tokenizer, "vocab_size": 400})
    return train_tokenizer(cfg, [TEXTS * 10])


def test_the_types_are_those_of_the_library() -> None:
    classes = tokenization_auto.TOKENIZER_MAPPING_NAMES
    replaced = {
        kind
        for kind in tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
        if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and classes[kind] != "TokenizersBackend"
    }
    assert replaced == PRE_TOKENIZER_OF_TYPE.keys()


@pytest.mark.parametrize("model_type", PRE_TOKENIZER_OF_TYPE)
def test_a_tokenizer_of_the_published_form_is_read_as_it_is(
    model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = trained(PRE_TOKENIZER_OF_TYPE[model_type])
    folder = folder_of(tmp_path / "model", model_type, content)
    with caplog.at_level(logging.WARNING):
        verify.check_token_ids(folder, Tokenizer.from_str(content))
    assert not caplog.messages


@pytest.mark.parametrize(("model_type", "wrong"), [("qwen2", "gpt2"), ("qwen3_5", "qwen2")])
def test_another_form_is_refused(model_type: str, wrong: str, tmp_path: Path) -> None:
    content = trained(wrong)
    folder = folder_of(tmp_path / "model", model_type, content)
    with pytest.raises(DamagedError, match=r"AutoTokenizer \(Qwen\w+\) returns different ids"):
        verify.check_token_ids(folder, Tokenizer.from_str(content))
    folder = folder_of(tmp_path / "llama", "llama", content)
    verify.check_token_ids(folder, Tokenizer.from_str(content))


def test_composed_characters_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = json.loads(trained("qwen2")) | {"normalizer": None}
    folder = folder_of(tmp_path / "model", "qwen2", json.dumps(content))
    verify.check_token_ids(folder, Tokenizer.from_str(json.dumps(content)))
    assert "Qwen2Tokenizer composes characters" in caplog.text
