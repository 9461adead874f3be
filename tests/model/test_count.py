from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

from dtt.config.model import ModelConfig
from dtt.config.shipped import shipped_configs
from dtt.model import count, families
from dtt.model.architecture import Architecture
from dtt.model.decoder import Decoder

PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen3-124m": 50304 * 768 + 12 * (4 * 768**2 + 3 * 768 * 2048 + 2 * 768 + 2 * 128) + 768,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1b": 2 * 50304 * 2048
    + 16 * (2 * 2048**2 + 2 * 2048 * 1024 + 3 * 2048 * 7168 + 2 * 2048 + 2 * 128)
    + 2048,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen2.5-0.5b": 494_032_768,
    "smollm3-3b": 3_075_098_624,
    "olmo2-1b": 1_484_916_736,
    "phi3-mini-4k": 3_821_079_552,
    "phi4": 14_659_507_200,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "olmoe-1b-7b": 6_919_161_856,
    "dots-llm1": 142_774_381_696,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 4_300_079_472 - 419_816_304,  # less the image encoder
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


def test_each_parameter_of_a_layer_has_the_counted_shape(arch: Architecture) -> None:
    for i, layer in enumerate(Decoder(arch).layers):
        shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
        assert count.layer_shapes(arch, i) == shapes


def test_of_a_stack_only_the_experts_of_a_token_are_active() -> None:
    shapes = [(8, 3, 5), (8, 5, 3), (7, 5), (5,)]
    assert count.active_weights(shapes, experts_per_token=2) == 2 * 15 + 2 * 15 + 35


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
    attended = sum(seq_len if window is None else window for window in arch.windows)
    attention = 12 * arch.n_heads * arch.head_dim * attended
    assert count.flops_per_token(arch, seq_len) == by_matrices // seq_len + attention
