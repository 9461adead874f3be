"""What a decoder is made of, with nothing left open: every axis chosen, every size known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dtt.config.model import ModelConfig
from dtt.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A resolved decoder. `Decoder` is built from this alone; families make it."""

    family: str
    vocab_size: int
    max_seq_len: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    norm: Literal["layernorm", "rmsnorm"]
    norm_eps: float
    position: Literal["learned", "rope"]
    rope_theta: float
    mlp: Literal["gelu", "swiglu"]
    bias: bool
    """Whether linear layers (the head excepted) have one."""
    tie_embeddings: bool
    init_std: float
    dropout: float


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


def fit_vocabulary(cfg: ModelConfig, tokenizer_size: int) -> int:
    """Rows of the embedding; ConfigError if the tokenizer has ids beyond them."""
    if cfg.vocab_size is None:
        return round_up(tokenizer_size, 64)
    if cfg.vocab_size < tokenizer_size:
        raise ConfigError(
            f"model.vocab_size ({cfg.vocab_size}) is smaller than the tokenizer's vocabulary"
            f" ({tokenizer_size})",
            why="token ids would lie outside the embedding",
            next="set model.vocab_size=null to take the tokenizer's, or use another tokenizer",
        )
    return cfg.vocab_size


def fit_context(cfg: ModelConfig, seq_len: int) -> int:
    """Longest context; ConfigError if training sequences would be longer."""
    if cfg.max_seq_len is None:
        return seq_len
    if cfg.max_seq_len < seq_len:
        raise ConfigError(
            f"train.seq_len ({seq_len}) is longer than model.max_seq_len ({cfg.max_seq_len})",
            next=f"set train.seq_len={cfg.max_seq_len}, or raise model.max_seq_len",
        )
    return cfg.max_seq_len
