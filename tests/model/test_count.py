from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

from dtt.config.load import shipped_configs
from dtt.config.model import ModelConfig
from dtt.model import count, families
from dtt.model.architecture import Architecture
from dtt.model.decoder import Decoder

PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama3-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
}
SHIPPED = sorted((shipped_configs() / "models").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_model_has_the_parameters_it_says(path: Path) -> None:
    text = path.read_text()
    cfg = ModelConfig(**yaml.safe_load(text)["model"])
    arch = families.get(cfg.family).architecture(cfg, 2048, 256)
    with torch.device("meta"):
        model = Decoder(arch)
    total = sum(p.numel() for p in model.parameters())
    assert total == PUBLISHED.get(path.stem, total)
    assert f"{total:,} parameters" in text
    assert count.parameters(arch) == total


def test_every_published_size_is_shipped() -> None:
    assert set(PUBLISHED) <= {path.stem for path in SHIPPED}


def test_parameters_are_counted_exactly(arch: Architecture) -> None:
    assert count.parameters(arch) == sum(p.numel() for p in Decoder(arch).parameters())


def test_flops_are_those_of_the_matrix_products(arch: Architecture) -> None:
    model, seq_len = Decoder(arch), 24
    tokens = torch.zeros(1, seq_len, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    by_matrices = sum(
        flops
        for op, flops in counter.get_flop_counts()["Global"].items()
        if "attention" not in str(op)
    )
    attention = 12 * arch.n_layers * arch.n_heads * arch.head_dim * seq_len
    assert count.flops_per_token(arch, seq_len) == by_matrices // seq_len + attention
