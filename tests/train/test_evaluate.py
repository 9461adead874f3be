from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from dtt.config.model import ModelConfig
from dtt.config.train import TrainConfig
from dtt.model import families
from dtt.model.decoder import Decoder
from dtt.train.evaluate import Sampler


def test_a_model_that_has_diverged_gives_no_sample_and_stops_nothing(
    tokens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = ModelConfig(dim=16, n_layers=1, n_heads=2)
    model = Decoder(families.get(cfg.family).architecture(cfg, 300, 32))
    torch.nn.init.constant_(model.get_parameter("norm.weight"), torch.nan)
    train = TrainConfig(sample_prompt="one", sample_tokens=6)
    with caplog.at_level(logging.WARNING, logger="dtt"):
        record = Sampler(train, tokens / "tokenizer.json", 0, seed=0).record(model, 3)
    assert record == {"kind": "sample", "step": 3, "text": "one"}
    assert "no sample: the model gives no probabilities" in caplog.text
