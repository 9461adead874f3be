from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.tiny_architectures import VARIANTS, tiny_architecture
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dtt.hf.read import LoadedModel
from dtt.model.decoder import Decoder
from dtt.model.init import initialize


@pytest.fixture(scope="session")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer of 300 entries; <|endoftext|> is 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["def main():\n    return None  # a word and another word"] * 9, trainer
    )
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(params=VARIANTS)
def trained(request: pytest.FixtureRequest, tokenizer_json: Path) -> LoadedModel:
    """A tiny model of each kind, with weights that are not tiny."""
    return make(request.param, tokenizer_json)


@pytest.fixture
def llama(tokenizer_json: Path) -> LoadedModel:
    """One of them, for what does not depend on the kind."""
    return make("llama", tokenizer_json)


def make(variant: str, tokenizer_json: Path) -> LoadedModel:
    arch = tiny_architecture(variant, 300, 64)
    model = Decoder(arch)
    initialize(model, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(0, 0.1, generator=generator))
    return LoadedModel(arch, model.state_dict(), tokenizer_json, 0, (0,))
